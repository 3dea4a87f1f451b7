"""Heads, block selection and attention on a paged cache, each stage against torch."""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.expr as fx
import pytest
import torch

from aiter.ops.flydsl.kernels.device import global_pointer
from atom.mono.device.attention import (
    ATTENTION_BYTES,
    PART_WORDS,
    AttentionShape,
    ChosenBlocks,
    attention,
    await_inserted,
    merge_attention,
)
from atom.mono.device.block_select import SelectShape, index_scores, select_blocks
from atom.mono.device.heads import Caches, HeadCounts, HeadInputs, finish_heads
from atom.mono.device.matvec import PlainRows
from atom.mono.device.sync import Words
from atom.mono.plan.trace import Space
from op_tests.mono import torch_m3
from op_tests.mono.torch_m3 import HEAD_DIM, PAGE
from op_tests.torch_moe import relative_l2

from .stages import empty_words, floats_in, pairs_in, run_stage, stage_launcher, words_of

pytestmark = pytest.mark.emulated
EPS = 1e-5


@dataclass
class Cache:
    """Sequences in random pages, values transposed in each page."""

    k: torch.Tensor  # [pages, kv, PAGE, dim] bf16
    v: torch.Tensor  # [pages, kv, dim, PAGE]
    index: torch.Tensor  # [pages, PAGE, dim]
    table: torch.Tensor  # [sequences, blocks] i32

    @classmethod
    def random(cls, sequences: int, blocks: int, kv: int, g: torch.Generator) -> Cache:
        pages = sequences * blocks + 1
        draw = lambda *shape: torch.randn(*shape, generator=g).to(torch.bfloat16)
        order = torch.randperm(pages, generator=g)[: sequences * blocks].to(torch.int32)
        return cls(
            draw(pages, kv, PAGE, HEAD_DIM),
            draw(pages, kv, HEAD_DIM, PAGE),
            draw(pages, PAGE, HEAD_DIM),
            order.view(sequences, blocks),
        )

    def rows(self, sequence: int, head: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's first `count` positions."""
        pages = self.table[sequence]
        values = self.v[:, head].transpose(1, 2)
        return (
            torch_m3.paged_rows(self.k[:, head], pages, count),
            torch_m3.paged_rows(values, pages, count),
        )


@pytest.mark.parametrize(("index_q", "order"), [(2, "random"), (0, "lockstep")])
def test_heads_are_normed_turned_and_inserted(emulate, index_q, order):
    g = torch.Generator().manual_seed(index_q)
    counts = HeadCounts(q=4, kv=2, index_q=index_q, rotary=64)
    tokens, rows = 3, counts.total * HEAD_DIM
    qkv = torch.randn(tokens, rows, generator=g)
    norms = [torch.randn(HEAD_DIM, generator=g).to(torch.bfloat16) for _ in range(4)]
    cos_sin = torch_m3.cos_sin_table(300, 64)
    positions = torch.tensor([0, 130, 299], dtype=torch.int32)
    slots = torch.tensor([5, -1, 2 * PAGE + 127], dtype=torch.int32)
    cache = Cache.random(1, 2, 2, g)
    before = [c.clone() for c in (cache.k, cache.v, cache.index)]
    q = torch.zeros(tokens, counts.q * HEAD_DIM, dtype=torch.bfloat16)
    index = torch.zeros(tokens, max(index_q, 1) * HEAD_DIM, dtype=torch.bfloat16)
    inserted = empty_words(tokens * counts.inserted)
    norm_rows = torch.stack(norms)

    def body(cta, addresses, number, waits):
        words, q_out, iq_out, table, k, v, ik, flags, n, places, at = addresses[:11]
        inputs = HeadInputs(*(n + 256 * i for i in range(4)), table, at, places)

        def store_q(token, head, lane, pair):
            global_pointer(fx.Int32, q_out)[(token * counts.q + head) * 64 + lane] = pair

        def store_iq(token, head, lane, pair):
            global_pointer(fx.Int32, iq_out)[(token * index_q + head) * 64 + lane] = pair

        finish_heads(
            cta,
            counts,
            tokens,
            EPS,
            Words("qkv", Space.SCRATCH, words, number, waits),
            rows,
            inputs,
            Caches(2, k, v, ik),
            store_q,
            store_iq if index_q else None,
            Words("inserted", Space.SCRATCH, flags, number, waits),
        )

    emulate("gfx950", order=order, poison=True)
    given = [words_of(qkv, 3), q, index, cos_sin, cache.k, cache.v, cache.index, inserted]
    run_stage(stage_launcher(body), [*given, norm_rows, slots, positions], 3)

    heads = qkv.view(tokens, counts.total, HEAD_DIM)
    kinds = [0] * 4 + [1] * 2 + [None] * 2 + ([2] * index_q + [3] if index_q else [])
    turned = torch.zeros_like(heads)
    for head, kind in enumerate(kinds):
        one = heads[:, head : head + 1]
        if kind is not None:
            one = torch_m3.rotary(torch_m3.rms_norm(one, norms[kind], EPS), cos_sin, positions)
        turned[:, head : head + 1] = one
    assert relative_l2(q.float().view(tokens, 4, HEAD_DIM), turned[:, :4]) < 3e-3
    if index_q:
        got = index.float().view(tokens, index_q, HEAD_DIM)
        assert relative_l2(got, turned[:, 8 : 8 + index_q]) < 3e-3
    assert (inserted == torch.tensor([1, 3], dtype=torch.int32)).all()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, place = divmod(slot, PAGE)
        assert relative_l2(cache.k[page, :, place].float(), turned[token, 4:6]) < 3e-3
        assert torch.equal(cache.v[page, :, :, place], heads[token, 6:8].to(torch.bfloat16))
        before[0][page, :, place] = cache.k[page, :, place]
        before[1][page, :, :, place] = cache.v[page, :, :, place]
        if index_q:
            assert relative_l2(cache.index[page, place].float(), turned[token, -1]) < 3e-3
            before[2][page, place] = cache.index[page, place]
    for was, now in zip(before, (cache.k, cache.v, cache.index), strict=True):
        assert torch.equal(was, now)  # nothing else is touched


@pytest.mark.parametrize(
    ("heads", "group", "chosen", "splits", "order"),
    [
        (32, 16, 4, 1, "lockstep"),
        (4, 2, 9, 1, "lockstep"),
        (2, 2, 3, 1, "random"),
        (4, 2, 8, 4, "random"),
        (16, 16, 2, 8, "lockstep"),
    ],
)
def test_attention_over_chosen_blocks(emulate, heads, group, chosen, splits, order):
    g = torch.Generator().manual_seed(heads + chosen)
    kv, blocks = heads // group, 12
    positions = torch.tensor([0, 1289, 1535], dtype=torch.int32)
    tokens = len(positions)
    cache = Cache.random(tokens, blocks, kv, g)
    q = torch.randn(tokens, heads, HEAD_DIM, generator=g).to(torch.bfloat16)
    choice = torch.full((tokens, kv, chosen), -1, dtype=torch.int32)
    for t, position in enumerate(positions.tolist()):
        for head in range(kv):
            there = torch.randperm(position // PAGE + 1, generator=g)[: chosen - 1]
            picked = torch.unique(torch.cat([there, torch.tensor([position // PAGE])]))
            choice[t, head, : len(picked)] = picked.to(torch.int32)
    out = empty_words(tokens * heads * HEAD_DIM // 2)
    flags = words_of(torch.ones(70, dtype=torch.int32), 5)
    shape = AttentionShape(heads, group, chosen, HEAD_DIM**-0.5, splits)
    between = empty_words(tokens * heads * splits * PART_WORDS)

    def body(cta, addresses, number, waits):
        o, queries, k, v, picked, at, table, ready, part = addresses[:9]
        result = Words("attended", Space.SCRATCH, o, number, waits)
        parts = Words("attn_parts", Space.SCRATCH, part, number, waits)
        await_inserted(cta, Words("inserted", Space.SCRATCH, ready, number, waits), 70)
        attention(
            cta,
            shape,
            tokens,
            PlainRows(queries, HEAD_DIM),
            Caches(kv, k, v, None),
            ChosenBlocks(chosen, None, picked),
            at,
            table,
            fx.Int32(blocks),
            result if splits == 1 else parts,
        )
        if splits > 1:
            merge_attention(cta, shape, tokens, parts, result)

    emulate("gfx950", order=order, poison=True)
    launcher = stage_launcher(body, lds_bytes=ATTENTION_BYTES)
    given = [out, q, cache.k, cache.v, choice, positions, cache.table, flags, between]
    run_stage(launcher, given, 5)
    got = pairs_in(out, 5).float().view(tokens, heads, HEAD_DIM)
    for t, position in enumerate(positions.tolist()):
        for head in range(kv):
            keys, values = cache.rows(t, head, position + 1)
            picked = [b for b in choice[t, head].tolist() if b >= 0]
            mine = slice(head * group, (head + 1) * group)
            want = torch_m3.attend(q[t, mine].float(), keys, values, picked, shape.sm_scale)
            assert relative_l2(got[t, mine], want) < 6e-3


@pytest.mark.parametrize(
    ("kv", "group", "topk", "init", "local", "last", "order"),
    [
        (2, 2, 4, 1, 1, 1500, "lockstep"),
        (1, 1, 3, 0, 2, 1500, "random"),
        (1, 1, 4, 1, 1, 20000, "lockstep"),  # more blocks than a wave has lanes
    ],
)
def test_blocks_are_chosen_by_index_score(emulate, kv, group, topk, init, local, last, order):
    g = torch.Generator().manual_seed(topk)
    positions = torch.tensor([2, 511, last], dtype=torch.int32)
    tokens, blocks, most = len(positions), last // PAGE + 1, last // PAGE + 5
    cache = Cache.random(tokens, blocks, 1, g)
    iq = torch.randn(tokens, kv * group, HEAD_DIM, generator=g).to(torch.bfloat16)
    shape = SelectShape(kv, group, topk, init, local, most)
    scores = empty_words(tokens * kv * most)
    selected = empty_words(tokens * kv * topk)
    kept = torch.zeros(tokens, kv, topk, dtype=torch.int32)

    def body(cta, addresses, number, waits):
        score, chosen, keep, queries, index, at, table = addresses[:7]
        words = Words("block_scores", Space.SCRATCH, score, number, waits)
        caches = Caches(kv, index, index, index)
        rows = PlainRows(queries, HEAD_DIM)
        index_scores(cta, shape, tokens, rows, caches, at, table, fx.Int32(blocks), words)
        into = Words("selected", Space.SCRATCH, chosen, number, waits)
        select_blocks(cta, shape, tokens, at, words, into, keep)

    emulate("gfx950", order=order, poison=True)
    launcher = stage_launcher(body, lds_bytes=shape.lds_bytes)
    run_stage(launcher, [scores, selected, kept, iq, cache.index, positions, cache.table], 2)
    assert torch.equal(selected[:, 0].view_as(kept), kept)
    assert (selected[:, 1] == 2).all()
    for t, position in enumerate(positions.tolist()):
        keys = torch_m3.paged_rows(cache.index, cache.table[t], position + 1)
        for head in range(kv):
            own = iq[t, head * group : (head + 1) * group].float()
            want = torch_m3.block_scores(own, keys)
            count = want.numel()
            if count > topk:
                got = scores.view(tokens, kv, most, 2)[t, head, :count].reshape(-1, 2)
                assert relative_l2(floats_in(got, 2), want) < 1e-6
            chosen = torch_m3.choose_blocks(want, topk, init, local)
            chosen += [-1] * (topk - len(chosen))
            assert sorted(kept[t, head].tolist()) == sorted(chosen)
