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
from atom.mono.device.caches import Caches, Plane
from atom.mono.device.heads import HeadCounts, HeadInputs, finish_heads
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

    fmt: str
    k: torch.Tensor  # [pages, kv, PAGE, dim] in fmt
    v: torch.Tensor  # [pages, kv, dim, PAGE]
    index: torch.Tensor  # [pages, PAGE, dim]
    table: torch.Tensor  # [sequences, blocks] i32
    scales: torch.Tensor  # [3] f32 of k, v, index

    @classmethod
    def random(cls, sequences: int, blocks: int, kv: int, g: torch.Generator, fmt: str) -> Cache:
        pages = sequences * blocks + 1
        scales = torch.tensor([0.25, 0.1, 2.0])
        draw = lambda i, *shape: torch_m3.stored(
            torch.randn(*shape, generator=g), fmt, float(scales[i])
        )
        order = torch.randperm(pages, generator=g)[: sequences * blocks].to(torch.int32)
        return cls(
            fmt,
            draw(0, pages, kv, PAGE, HEAD_DIM),
            draw(1, pages, kv, HEAD_DIM, PAGE),
            draw(2, pages, PAGE, HEAD_DIM),
            order.view(sequences, blocks),
            scales,
        )

    def spoil(self, positions: list[int]) -> None:
        """Fill what lies beyond each sequence's position, and pages of no sequence, with NaN."""
        seen = torch.zeros(len(self.k), PAGE, dtype=torch.bool)
        for pages, position in zip(self.table.tolist(), positions, strict=True):
            for block in range(position // PAGE + 1):
                seen[pages[block], : position + 1 - block * PAGE] = True
        # torch cannot fill fp8 by a mask.
        kind, nan = (torch.uint8, 0x7F) if self.fmt == "fp8" else (torch.int16, 0x7FC0)
        self.k.view(kind).permute(0, 2, 1, 3)[~seen] = nan
        self.v.view(kind).permute(0, 3, 1, 2)[~seen] = nan
        self.index.view(kind)[~seen] = nan

    def rows(self, sequence: int, head: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence's first `count` positions."""
        pages = self.table[sequence]
        values = self.v[:, head].transpose(1, 2)
        k_scale, v_scale, _ = self.scales.tolist()
        return (
            torch_m3.paged_rows(self.k[:, head], pages, count, k_scale),
            torch_m3.paged_rows(values, pages, count, v_scale),
        )


@pytest.mark.parametrize(
    ("index_q", "order", "fmt"),
    [(2, "random", "bf16"), (0, "lockstep", "bf16"), (2, "lockstep", "fp8"), (0, "random", "fp8")],
)
def test_heads_are_normed_turned_and_inserted(emulate, index_q, order, fmt):
    g = torch.Generator().manual_seed(index_q)
    counts = HeadCounts(q=4, kv=2, index_q=index_q, rotary=64)
    tokens, rows = 3, counts.total * HEAD_DIM
    qkv = torch.randn(tokens, rows, generator=g)
    norms = [torch.randn(HEAD_DIM, generator=g).to(torch.bfloat16) for _ in range(4)]
    cos_sin = torch_m3.cos_sin_table(300, 64)
    positions = torch.tensor([0, 130, 299], dtype=torch.int32)
    slots = torch.tensor([5, -1, 2 * PAGE + 127], dtype=torch.int32)
    cache = Cache.random(1, 2, 2, g, fmt)
    before = [c.clone() for c in (cache.k, cache.v, cache.index)]
    q = torch.zeros(tokens, counts.q * HEAD_DIM, dtype=torch.bfloat16)
    index = torch.zeros(tokens, max(index_q, 1) * HEAD_DIM, dtype=torch.bfloat16)
    inserted = empty_words(tokens * counts.inserted)
    norm_rows = torch.stack(norms)

    def body(cta, addresses, number, waits):
        words, q_out, iq_out, table, k, v, ik, flags, n, places, at, scales = addresses
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
            Caches(2, fmt, k, v, scales, fmt, ik),
            store_q,
            store_iq if index_q else None,
            Words("inserted", Space.SCRATCH, flags, number, waits),
        )

    emulate("gfx950", order=order, poison=True)
    given = [words_of(qkv, 3), q, index, cos_sin, cache.k, cache.v, cache.index, inserted]
    run_stage(stage_launcher(body), [*given, norm_rows, slots, positions, cache.scales], 3)

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
    close = 3e-3 if fmt == "bf16" else 4e-2
    k_scale, v_scale, index_scale = cache.scales.tolist()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        page, place = divmod(slot, PAGE)
        put = [cache.k[page, :, place], cache.v[page, :, :, place], cache.index[page, place]]
        assert relative_l2(torch_m3.held(put[0], k_scale), turned[token, 4:6]) < close
        want = torch_m3.stored(heads[token, 6:8], fmt, v_scale)
        # Rounding may go the other way where the reciprocal of the scale is not exact.
        assert relative_l2(put[1].float(), want.float()) < (1e-9 if fmt == "bf16" else 5e-3)
        before[0][page, :, place], before[1][page, :, :, place] = put[:2]
        if index_q:
            assert relative_l2(torch_m3.held(put[2], index_scale), turned[token, -1]) < close
            before[2][page, place] = put[2]
    for was, now in zip(before, (cache.k, cache.v, cache.index), strict=True):
        assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))  # nothing else is touched


def test_what_fp8_cannot_hold_saturates_and_nan_stays(emulate):
    """Keys and values beyond 448 scales are the largest number; a NaN is not hidden."""
    counts, tokens = HeadCounts(q=1, kv=1, index_q=0, rotary=64), 1
    v = torch.zeros(HEAD_DIM)
    v[:6] = torch.tensor([1e4, -1e4, torch.nan, torch.inf, 44.8, -45.0])
    qkv = torch.cat([torch.ones(2 * HEAD_DIM), v])[None]
    cache = Cache.random(1, 1, 1, torch.Generator().manual_seed(0), "fp8")
    norms = torch.ones(4, HEAD_DIM, dtype=torch.bfloat16)
    zero = torch.zeros(1, dtype=torch.int32)
    cos_sin = torch_m3.cos_sin_table(1, 64)

    def body(cta, addresses, number, waits):
        words, table, k, values, n, at, scales = addresses[:7]
        finish_heads(
            cta,
            counts,
            tokens,
            EPS,
            Words("qkv", Space.SCRATCH, words, number, waits),
            3 * HEAD_DIM,
            HeadInputs(n, n, n, n, table, at, at),
            Caches(1, "fp8", k, values, scales),
            lambda token, head, lane, pair: None,
            None,
            None,
        )

    emulate("gfx950")
    given = [words_of(qkv, 1), cos_sin, cache.k, cache.v, norms, zero, cache.scales]
    run_stage(stage_launcher(body), given)
    got = cache.v[0, 0, :7, 0].float()
    assert got[[0, 1, 3, 4, 5, 6]].tolist() == [448.0, -448.0, 448.0, 448.0, -448.0, 0.0]
    assert got[2].isnan()


@pytest.mark.parametrize(
    ("heads", "group", "chosen", "splits", "order", "fmt"),
    [
        (32, 16, 4, 1, "lockstep", "bf16"),
        (4, 2, 9, 1, "lockstep", "fp8"),
        (2, 2, 3, 1, "random", "bf16"),
        (4, 2, 8, 4, "random", "fp8"),
        (16, 16, 2, 8, "lockstep", "bf16"),
    ],
)
def test_attention_over_chosen_blocks(emulate, heads, group, chosen, splits, order, fmt):
    g = torch.Generator().manual_seed(heads + chosen)
    kv, blocks = heads // group, 12
    positions = torch.tensor([0, 1289, 1535], dtype=torch.int32)
    tokens = len(positions)
    cache = Cache.random(tokens, blocks, kv, g, fmt)
    cache.spoil(positions.tolist())
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
        o, queries, k, v, picked, at, table, ready, part, scales = addresses[:10]
        caches = Caches(kv, fmt, k, v, scales)
        result = Words("attended", Space.SCRATCH, o, number, waits)
        parts = Words("attn_parts", Space.SCRATCH, part, number, waits)
        await_inserted(cta, Words("inserted", Space.SCRATCH, ready, number, waits), 70)
        attention(
            cta,
            shape,
            tokens,
            PlainRows(queries, HEAD_DIM),
            caches,
            ChosenBlocks(chosen, None, picked),
            at,
            table,
            fx.Int32(blocks),
            result if splits == 1 else parts,
        )
        if splits > 1:
            merge_attention(cta, shape, tokens, parts, caches, result)

    emulate("gfx950", order=order, poison=True)
    launcher = stage_launcher(body, lds_bytes=ATTENTION_BYTES)
    given = [out, q, cache.k, cache.v, choice, positions, cache.table, flags, between]
    run_stage(launcher, [*given, cache.scales], 5)
    got = pairs_in(out, 5).float().view(tokens, heads, HEAD_DIM)
    for t, position in enumerate(positions.tolist()):
        for head in range(kv):
            keys, values = cache.rows(t, head, position + 1)
            picked = [b for b in choice[t, head].tolist() if b >= 0]
            mine = slice(head * group, (head + 1) * group)
            want = torch_m3.attend(q[t, mine].float(), keys, values, picked, shape.sm_scale)
            assert relative_l2(got[t, mine], want) < 6e-3


@pytest.mark.parametrize(
    ("kv", "group", "topk", "init", "local", "last", "order", "fmt"),
    [
        (2, 2, 4, 1, 1, 1500, "lockstep", "bf16"),
        (1, 1, 3, 0, 2, 1500, "random", "fp8"),
        (1, 1, 4, 0, 1, 20000, "lockstep", "fp8"),  # more blocks than a wave has lanes
    ],
)
def test_blocks_are_chosen_by_index_score(emulate, kv, group, topk, init, local, last, order, fmt):
    g = torch.Generator().manual_seed(topk)
    positions = torch.tensor([2, 511, last], dtype=torch.int32)
    tokens, blocks, most = len(positions), last // PAGE + 1, last // PAGE + 5
    cache = Cache.random(tokens, blocks, 1, g, fmt)
    cache.spoil(positions.tolist())
    iq = torch.randn(tokens, kv * group, HEAD_DIM, generator=g).to(torch.bfloat16)
    shape = SelectShape(kv, group, topk, init, local, most)
    scores = empty_words(tokens * kv * most)
    selected = empty_words(tokens * kv * topk)
    kept = torch.zeros(tokens, kv, topk, dtype=torch.int32)

    def body(cta, addresses, number, waits):
        score, chosen, keep, queries, index, at, table = addresses[:7]
        words = Words("block_scores", Space.SCRATCH, score, number, waits)
        rows, plane = PlainRows(queries, HEAD_DIM), Plane(fmt, index, 1, None)
        index_scores(cta, shape, tokens, rows, plane, at, table, fx.Int32(blocks), words)
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
