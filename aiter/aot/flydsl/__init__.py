"""The ahead-of-time build of FlyDSL kernels; see README.md in this folder.

    moe.py        the command line of the MoE: python -m aiter.aot.flydsl.moe
    command.py    what the command lines of all kinds share: options, phases, exit codes
    common.py     run_aot for a package build, and what the command line and the engine share
    rows.py       tables -> the rows to replay, and those that are another backend's
    dry_run.py    the context a replay runs in
    recipe.py     what a caller of a row passes to fused_moe, as FakeTensors
    ranges.py     which token counts to replay
    replay.py     rows -> launches and outcomes, in one process per architecture
    compiling.py  one launch -> one artifact, or its key, in a worker
    pool.py       worker processes that survive what kills a worker
    limits.py     how many workers
    engine.py     launches -> cache and manifest
    check.py      launches against cache and manifest, compiling nothing
    artifacts.py  what a well-formed artifact is; putting one into the cache
    manifest.py   what is in a cache, and why
    report.py     the log, the summary and the JSON document

From outside use `common.run_aot`, or the command line; for another kind of kernels, `command`.
Importing this package, `command`, `common`, `rows` or `moe` loads neither torch nor FlyDSL.
"""
