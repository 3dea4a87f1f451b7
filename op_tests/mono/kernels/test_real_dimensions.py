"""The kernels as they are served: a rank of MiniMax-M3 at TP 4, the whole grid, 2^20 tokens."""

from __future__ import annotations

from dataclasses import replace

import flydsl.expr as fx
import pytest
import torch

from atom.mono.device.block_select import SelectShape, index_scores, select_blocks
from atom.mono.device.caches import Plane
from atom.mono.device.matvec import PlainRows
from atom.mono.device.sync import Words
from atom.mono.models.minimax_m3.builds import MINIMAX_M3, PAGE, LayerShape, SparseBuild
from atom.mono.plan.execution import BLOCKS
from atom.mono.plan.trace import Space
from op_tests.mono import torch_m3
from op_tests.torch_moe import relative_l2

from .layers import LayerWeights, Rank, Reference, Sequences
from .stages import empty_words, run_stage, stage_launcher

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

# Heads and inner dimensions of a rank; fewer experts, whose number no loop over K or rows sees.
SHARE = replace(
    MINIMAX_M3, heads=16, kv_heads=1, index_heads=1, inter=768, dense_inter=3072, experts=8
)
POSITIONS = 4096


def test_a_sparse_layer_on_256_workgroups_matches_torch(emulate):
    emu = emulate("gfx950")
    positions = [3000, 5, 2047, 2900]  # one with fewer blocks than are chosen, one at a page's end
    shape = LayerShape(SHARE, tp=1, tokens=len(positions))
    build = SparseBuild(shape, max_blocks=64)
    assert (shape.blocks, build.attention_splits) == (BLOCKS, 8)
    sequences = Sequences.random(SHARE, positions, POSITIONS // PAGE, 1, ("fp8", "fp8"))
    table = torch_m3.cos_sin_table(POSITIONS, SHARE.rotary)
    reference = Reference(shape, build, sequences.clone(), table)
    rank = Rank(shape, build, 0, sequences)
    rank.cos_sin = table
    g = torch.Generator().manual_seed(7)
    hidden = torch.randn(shape.tokens, SHARE.hidden, generator=g).to(torch.bfloat16)
    rank.h[0].copy_(hidden)
    rank.peers[0] = rank.peer.data_ptr()
    emu.register(rank.peer)
    weights = LayerWeights.random(SHARE, dense=False, seed=3)
    rank.begin()
    rank.sparse_layer(weights, 3, build)

    exact = weights.rounded(build.attn_format, build.ffn_format)
    q, index_q = reference.heads(exact, hidden.float())
    reference.choose(index_q)
    want = reference.finish(exact, hidden.float(), reference.attend(q, dense=False))
    assert relative_l2(rank.h[0].float(), want) < 1.5e-2
    for token, (blocks,) in enumerate(reference.chosen):
        got = [block for block in rank.selection[token, 0].tolist() if block >= 0]
        assert sorted(got) == blocks


def test_blocks_are_chosen_from_the_longest_context(emulate):
    most = SparseBuild(LayerShape(MINIMAX_M3, 4, 1)).max_blocks
    g = torch.Generator().manual_seed(0)
    position = most * PAGE - 1
    assert position + 1 == 1 << 20
    raw = torch.randint(0, 255, (most, PAGE, PAGE), dtype=torch.uint8, generator=g)
    raw[(raw & 127) == 127] = 1  # those would be NaN
    index = raw.view(torch.float8_e4m3fn)
    table = torch.randperm(most, generator=g).to(torch.int32)[None]
    query = torch.randn(1, 1, PAGE, generator=g).to(torch.bfloat16)
    shape = SelectShape(kv_heads=1, group=1, topk=16, init=0, local=1, max_blocks=most)
    kept = torch.zeros(16, dtype=torch.int32)

    def body(cta, addresses, number, waits):
        score, chosen, keep, queries, keys, at, pages = addresses[:7]
        words = Words("block_scores", Space.SCRATCH, score, number, waits)
        rows, plane = PlainRows(queries, PAGE), Plane("fp8", keys, 1, None)
        index_scores(cta, shape, 1, rows, plane, at, pages, fx.Int32(most), words)
        into = Words("selected", Space.SCRATCH, chosen, number, waits)
        select_blocks(cta, shape, 1, at, words, into, keep)

    emulate("gfx950")
    launcher = stage_launcher(body, blocks=BLOCKS, lds_bytes=shape.lds_bytes)
    at = torch.tensor([position], dtype=torch.int32)
    run_stage(launcher, [empty_words(most), empty_words(16), kept, query, index, at, table], 2)
    scores = torch_m3.block_scores(
        query[0].float(), torch_m3.paged_rows(index, table[0], position + 1)
    )
    assert sorted(kept.tolist()) == torch_m3.choose_blocks(scores, 16, 0, 1)
