"""Stages that the layer kernels are composed of, one concern a file.

A layer kernel is persistent: `blocks` workgroups of 512 threads, all resident, run the same
stages in the same order. A stage is a task table, of which workgroup b does tasks b, b + blocks,
...; stages hand over through mailbox words that consumers poll (`sync`), never by a grid barrier.

    launch        kernels and launchers of a persistent grid
    cta           a workgroup's place in the grid, its LDS, sums over it
    sync          mailbox words, bounded waits and their records
    stamps        when workgroups enter the stages, for timelines
    formats       bf16, fp8 and fp4 as matrix operations take them
    caches        the paged caches of keys, values and index keys
    step_begin    zero the mailboxes and fence the ranks
    rms_norm      norm of rows, with or without the sum of an all-reduce before it
    matvec        weights in bf16, fp8 or fp4 times up to 16 tokens
    heads         per-head norm, rotary embedding, cache insert
    block_select  index scores and the choice of blocks
    attention     paged decode attention over chosen blocks, shared among workgroups
    routing       top-k experts
    expert_ffn    gate and up projections, activation, down projection
    all_reduce    partial sums into every rank's memory
"""
