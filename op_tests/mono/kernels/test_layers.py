"""Whole layers on one to four ranks that share memory, against torch over all ranks at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom.mono.device.sync import wait_records
from atom.mono.models.minimax_m3.builds import HEAD_DIM, PAGE, LayerShape, SparseBuild
from op_tests.mono import torch_m3
from op_tests.torch_moe import relative_l2

from .layers import DIMS, POSITIONS, LayerWeights, Rank, Reference, Sequences

pytestmark = pytest.mark.emulated
BLOCKS = 2
EPS = 0.1
FP8_CLOSE = 5e-2  # some roundings go the other way
WIDEST = [3, 140, 127, 128, 383, 384, 255, 256, 500, 511, 512, 640, 767, 900, 1000, 1001]
CLOSE = 1.5e-2  # bf16 roundings on the way; a wrong element of a row is far above it


class Setup:
    """Ranks, their common input and the reference of one case."""

    def __init__(
        self,
        emu,
        tp: int,
        positions: list[int],
        debug: bool = False,
        blocks: int = BLOCKS,
        topk: int = 3,
        formats: tuple[str, str] = ("bf16", "bf16"),
    ) -> None:
        tokens = len(positions)
        # Nothing has its default, and eps is large enough to be seen.
        shape = LayerShape(DIMS, tp, tokens, EPS, blocks, debug, 30)
        self.sparse = SparseBuild(
            shape,
            kv_format=formats[0],
            index_format=formats[1],
            index_topk=topk,
            init_blocks=1,
            local_blocks=topk - 2,
            max_blocks=8,
            sm_scale=0.11,
            route_scale=1.7,
            shared_weight=0.6,
            swiglu_limit=0.8,
        )
        sequences = Sequences.random(DIMS, positions, 8, tp, formats)
        self.reference = Reference(
            shape, self.sparse, sequences.clone(), torch_m3.cos_sin_table(POSITIONS, DIMS.rotary)
        )
        self.ranks = [Rank(shape, self.sparse, r, sequences) for r in range(tp)]
        g = torch.Generator().manual_seed(7)
        self.h = torch.randn(tokens, DIMS.hidden, generator=g).to(torch.bfloat16)
        table = torch.tensor([r.peer.data_ptr() for r in self.ranks], dtype=torch.int64)
        for rank in self.ranks:
            emu.register(rank.peer)
            rank.peers.copy_(table)
            rank.h[0].copy_(self.h)
        self.emu = emu

    def run(self, function, present: list[int] | None = None) -> None:
        ranks = self.ranks if present is None else [self.ranks[n] for n in present]
        self.emu.run_ranks([lambda r=r: function(r) for r in ranks])

    def require_same(self, want: torch.Tensor) -> None:
        for rank in self.ranks:
            assert torch.equal(rank.h[0], self.ranks[0].h[0])
        assert relative_l2(self.ranks[0].h[0].float(), want) < CLOSE
        rows = (self.ranks[0].h[0].float() - want).norm(dim=1) / want.norm(dim=1)
        assert rows.max() < 2 * CLOSE

    def require_caches(self, index: bool) -> None:
        """What the ranks' caches hold is what the reference's do, but for single roundings of the
        cells that this step's tokens went to."""
        want, tp = self.reference.sequences, len(self.ranks)
        cells = [divmod(slot, PAGE) for slot in want.slots.tolist() if slot >= 0]
        for rank in self.ranks:
            mine = lambda cache, r=rank: cache.chunk(tp, 1)[r.rank]
            kinds = [(rank.k, mine(want.k)), (rank.v.mT, mine(want.v).mT)]
            if index:
                kinds.append((rank.index[:, None], want.index[:, None]))
            for cache, reference in kinds:
                close = CLOSE if cache.dtype == torch.bfloat16 else FP8_CLOSE
                got, exact = cache.float(), reference.float()
                for page, place in cells:
                    assert relative_l2(got[page, :, place], exact[page, :, place]) < close
                    got[page, :, place] = exact[page, :, place]
                assert torch.equal(got, exact)


@pytest.mark.parametrize(
    ("tp", "order", "attn", "ffn", "kv"),
    [
        (1, "lockstep", "fp8", "fp4", "fp8"),
        (2, "random", "bf16", "bf16", "bf16"),
        (4, "lockstep", "bf16", "fp8", "fp8"),
    ],
)
def test_a_dense_layer(emulate, tp, order, attn, ffn, kv):
    emu = emulate("gfx950", order=order, poison=True)
    setup = Setup(emu, tp, [3, 140, 600, 601], formats=(kv, "bf16"))
    w = LayerWeights.random(DIMS, dense=True, seed=tp)
    exact = w.rounded(attn, ffn)

    def pre(rank: Rank) -> None:
        rank.begin()
        rank.dense_pre(w, 0, attn)

    setup.run(pre)
    ref = setup.reference
    q, _ = ref.heads(exact, setup.h.float())
    got = torch.cat([r.q.view(len(q), -1, HEAD_DIM) for r in setup.ranks], 1)
    assert relative_l2(got.float(), q) < 5e-3
    setup.require_caches(index=False)

    attended = ref.attend(q, dense=True)
    for rank, part in zip(setup.ranks, attended.chunk(tp, 1), strict=True):
        rank.attended.copy_(part.to(torch.bfloat16))
    setup.run(lambda rank: rank.dense_post(w, 0, attn, ffn))
    setup.require_same(ref.finish(exact, setup.h.float(), attended))


@pytest.mark.parametrize(
    ("tp", "order", "positions", "ffn", "caches", "seed", "blocks", "topk"),
    [
        (1, "lockstep", [900], "fp4", ("fp8", "fp8"), 0, 2, 3),
        (2, "random", [3, 140, 900], "fp8", ("bf16", "bf16"), 1, 2, 3),
        (4, "lockstep", [3, 140, 600, 601], "fp4", ("fp8", "bf16"), 4, 2, 3),
        # Workgroups share a token's attention.
        (4, "random", [900], "bf16", ("fp8", "fp8"), 2, 4, 4),
        # The widest step, at the borders of pages and of the selection.
        (2, "lockstep", WIDEST, "fp4", ("fp8", "fp8"), 3, 2, 3),
    ],
)
def test_sparse_layers_select_and_then_reuse(
    emulate, tp, order, positions, ffn, caches, seed, blocks, topk
):
    emu = emulate("gfx950", order=order, poison=True)
    setup = Setup(emu, tp, positions, blocks=blocks, topk=topk, formats=caches)
    assert setup.sparse.attention_splits == (2 if topk == 4 else 1)
    first, second = (LayerWeights.random(DIMS, dense=False, seed=seed + i) for i in range(2))
    full = replace(setup.sparse, ffn_format=ffn)
    reuse = replace(full, select=False)

    def step(rank: Rank) -> None:
        rank.begin()
        rank.sparse_layer(first, 3, full)
        rank.sparse_layer(second, 4, reuse)

    setup.run(step)
    ref, exact = setup.reference, [w.rounded("bf16", ffn) for w in (first, second)]
    h = setup.h.float()
    for i, w in enumerate(exact):
        q, iq = ref.heads(w, h)
        if i == 0:
            ref.choose(iq)
            index = ref.sequences.index.clone()
            for rank, want in zip(setup.ranks, iq.chunk(tp, 1), strict=True):
                assert relative_l2(rank.pairs("index_q").view_as(want), want) < 5e-3
        h = ref.finish(w, h, ref.attend(q, dense=False))
    for rank in setup.ranks:
        for token in range(len(positions)):
            heads = range(rank.rank * rank.shape.kv_heads, (rank.rank + 1) * rank.shape.kv_heads)
            for mine, head in enumerate(heads):
                got = [b for b in rank.selection[token, mine].tolist() if b >= 0]
                assert sorted(got) == ref.chosen[token][head]
    ref.sequences.index = index  # a layer that reuses a selection inserts none
    setup.require_caches(index=True)
    setup.require_same(h)


def test_a_step_is_not_fooled_by_what_the_last_one_left(emulate):
    """The same layer number in two steps means the same tags: only zeroing tells them apart."""
    setup = Setup(emulate("gfx950"), 2, [300, 200])
    w = LayerWeights.random(DIMS, dense=True, seed=2)
    g = torch.Generator().manual_seed(5)
    attended = [torch.randn(2, 8 * HEAD_DIM, generator=g).to(torch.bfloat16) for _ in range(2)]

    def steps(rank: Rank) -> None:
        for number in range(2):
            rank.attended.copy_(attended[number].chunk(2, 1)[rank.rank])
            rank.begin()
            rank.dense_post(w, 0)

    setup.run(steps)
    h, exact = setup.h.float(), w.rounded("bf16", "bf16")
    for number in range(2):
        h = setup.reference.finish(exact, h, attended[number].float())
    setup.require_same(h)


def test_a_rank_that_never_arrives_is_named_by_a_debug_build(emulate):
    setup = Setup(emulate("gfx950"), 2, [300], debug=True)
    w = LayerWeights.random(DIMS, dense=True, seed=1)
    setup.run(lambda rank: rank.begin())
    setup.run(lambda rank: rank.dense_post(w, 5), present=[1])
    records = wait_records(setup.ranks[1].diag.tolist())
    assert (records[0].region, records[0].rank) == ("attn_sums", 0)
    assert (records[0].wanted, records[0].found) == (6, 0)
    assert setup.ranks[0].diag[0] == 0
