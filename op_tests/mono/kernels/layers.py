"""Reduced MiniMax-M3 layers: random weights, their shards in the ranks' layouts, references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.device.step_begin import (
    FENCE_BYTES,
    STATE_BYTES,
    StepBeginBuild,
    build_step_begin,
)
from atom.mono.device.sync import DIAG_BYTES
from atom.mono.models.minimax_m3.builds import (
    DENSE_POST_ABI,
    DENSE_PRE_ABI,
    HEAD_DIM,
    PAGE,
    SPARSE_ABI,
    DensePostBuild,
    DensePreBuild,
    Dims,
    LayerShape,
    SparseBuild,
)
from atom.mono.models.minimax_m3.kernels.dense_post import build_dense_post
from atom.mono.models.minimax_m3.kernels.dense_pre import build_dense_pre
from atom.mono.models.minimax_m3.kernels.sparse_layer import build_sparse_layer
from atom.mono.models.minimax_m3.layout import peer_layout, scratch_layout
from op_tests.moe.cases import spread
from op_tests.mono import torch_m3
from op_tests.mono.torch_m3 import bf16

from .stages import StoredWeight, pairs_in

DIMS = Dims(
    hidden=256,
    heads=8,
    kv_heads=4,
    index_heads=4,
    dense_inter=512,
    inter=512,
    experts=6,
    topk=2,
)
POSITIONS = 1024


@dataclass(frozen=True)
class LayerWeights:
    """A layer over all ranks, natural f32; `experts` 0 for a dense layer."""

    dims: Dims
    experts: int
    q: torch.Tensor  # [heads, dim, hidden], and so on
    k: torch.Tensor
    v: torch.Tensor
    iq: torch.Tensor
    ik: torch.Tensor
    norms: torch.Tensor  # [4, dim]: q, k, index q, index k
    norm1: torch.Tensor
    norm2: torch.Tensor
    o: torch.Tensor  # [hidden, heads * dim]
    router: torch.Tensor
    bias: torch.Tensor
    gate: torch.Tensor  # [experts + 1, inter, hidden]
    up: torch.Tensor
    down: torch.Tensor  # [experts + 1, hidden, inter]

    @classmethod
    def random(cls, dims: Dims, dense: bool, seed: int) -> LayerWeights:
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape, size=0.06: spread(*shape, generator=g, size=size)
        factor = lambda *shape: (1 + 0.2 * torch.randn(*shape, generator=g)).to(torch.bfloat16)
        experts, inter = (0, dims.dense_inter) if dense else (dims.experts, dims.inter)
        heads = lambda n: draw(n, HEAD_DIM, dims.hidden)
        return cls(
            dims,
            experts,
            heads(dims.heads),
            heads(dims.kv_heads),
            heads(dims.kv_heads),
            heads(dims.index_heads),
            heads(1),
            factor(4, HEAD_DIM),
            factor(dims.hidden),
            factor(dims.hidden),
            draw(dims.hidden, dims.heads * HEAD_DIM),
            draw(max(experts, 1), dims.hidden, size=0.1),
            0.1 * torch.randn(max(experts, 1), generator=g),
            draw(experts + 1, inter, dims.hidden),
            draw(experts + 1, inter, dims.hidden),
            draw(experts + 1, dims.hidden, inter),
        )

    def shard(
        self, tp: int, rank: int, indexed: bool, attn: str, ffn: str
    ) -> dict[str, StoredWeight | torch.Tensor]:
        """What rank `rank` holds, by its names in the ABI without `_w` and `_s`."""
        part = lambda x, dim: x.chunk(tp, dim)[rank]
        heads = [part(self.q, 0), part(self.k, 0), part(self.v, 0)]
        if indexed:
            heads += [part(self.iq, 0), self.ik]
        both = torch.cat([part(self.gate, 1), part(self.up, 1)], 1)
        padded = torch.zeros(-(-self.router.shape[0] // 16) * 16, self.dims.hidden)
        padded[: self.router.shape[0]] = self.router
        return {
            "qkv": StoredWeight.of(torch.cat(heads).flatten(0, 1), attn),
            "o": StoredWeight.of(part(self.o, 1).contiguous(), attn),
            "router": StoredWeight.of(padded, "bf16"),
            "gate_up": StoredWeight.of(both, ffn),
            "down": StoredWeight.of(part(self.down, 2).contiguous(), ffn),
        }

    def rounded(self, attn: str, ffn: str) -> LayerWeights:
        """The values the kernels compute with."""
        value = lambda x, fmt: StoredWeight.of(x.flatten(0, -2), fmt).value.view_as(x)
        heads = [value(x, attn) for x in (self.q, self.k, self.v, self.iq, self.ik)]
        experts = [value(x, ffn) for x in (self.gate, self.up, self.down)]
        return LayerWeights(
            self.dims,
            self.experts,
            *heads,
            self.norms,
            self.norm1,
            self.norm2,
            value(self.o, attn),
            self.router.to(torch.bfloat16).float(),
            self.bias,
            *experts,
        )


@dataclass
class Sequences:
    """The paged context of the batch, over all ranks; one kv head has PAGE rows a page."""

    formats: tuple[str, str]  # of keys and values, of index keys
    k: torch.Tensor  # [pages, kv, PAGE, dim]
    v: torch.Tensor  # [pages, kv, dim, PAGE]
    index: torch.Tensor  # [pages, PAGE, dim]
    table: torch.Tensor  # [tokens, blocks] i32
    positions: torch.Tensor
    slots: torch.Tensor
    scales: torch.Tensor  # [3] f32 of k, v and index

    @classmethod
    def random(
        cls,
        dims: Dims,
        positions: list[int],
        blocks: int,
        seed: int,
        formats: tuple[str, str] = ("bf16", "bf16"),
    ) -> Sequences:
        """Every token a sequence of its own, but the last follows the one before it. The first
        token is padding: it is in no cache."""
        g = torch.Generator().manual_seed(seed)
        tokens = len(positions)
        pages = tokens * blocks
        scales = torch.tensor([0.25, 0.5, 2.0])
        kinds = (formats[0], formats[0], formats[1])
        draw = lambda i, *shape: torch_m3.stored(
            torch.randn(*shape, generator=g), kinds[i], float(scales[i])
        )
        table = torch.randperm(pages, generator=g).to(torch.int32).view(tokens, blocks)
        if tokens > 2:
            table[-1] = table[-2]
            positions = [*positions[:-1], positions[-2] + 1]
        at = torch.tensor(positions, dtype=torch.int32)
        page = table[torch.arange(tokens), at.long() // PAGE]
        slots = page * PAGE + at % PAGE
        if tokens > 1:
            slots[0] = -1
        return cls(
            formats,
            draw(0, pages, dims.kv_heads, PAGE, HEAD_DIM),
            draw(1, pages, dims.kv_heads, HEAD_DIM, PAGE),
            draw(2, pages, PAGE, HEAD_DIM),
            table,
            at,
            slots,
            scales,
        )

    def clone(self) -> Sequences:
        k, v, index = (x.clone() for x in (self.k, self.v, self.index))
        return replace(self, k=k, v=v, index=index)

    def insert(self, token: int, k: torch.Tensor, v: torch.Tensor, ik: torch.Tensor) -> None:
        """Put a token's heads [kv, dim] and index key [dim] where its slot says."""
        slot = int(self.slots[token])
        if slot >= 0:
            page, place = divmod(slot, PAGE)
            (kv, index), scales = self.formats, self.scales.tolist()
            self.k[page, :, place] = torch_m3.stored(k, kv, scales[0])
            self.v[page, :, :, place] = torch_m3.stored(v, kv, scales[1])
            self.index[page, place] = torch_m3.stored(ik, index, scales[2])

    def rows(self, token: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that a token's kv head sees."""
        pages, count = self.table[token], int(self.positions[token]) + 1
        k_scale, v_scale, _ = self.scales.tolist()
        return (
            torch_m3.paged_rows(self.k[:, head], pages, count, k_scale),
            torch_m3.paged_rows(self.v[:, head].transpose(1, 2), pages, count, v_scale),
        )


@dataclass
class Reference:
    """The layers in torch, over all ranks at once; `eps` and so on as in the build keys."""

    shape: LayerShape
    sparse: SparseBuild
    sequences: Sequences
    cos_sin: torch.Tensor
    chosen: list[list[list[int]]] | None = None  # blocks of each token and kv head

    def heads(self, w: LayerWeights, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and index q [tokens, heads, dim]; k, v and index k go into the caches."""
        x = bf16(torch_m3.rms_norm(h, w.norm1, self.shape.eps))
        product = lambda rows: torch.einsum("ndh,th->tnd", rows, x)
        turn = lambda y, kind: bf16(
            torch_m3.rotary(
                torch_m3.rms_norm(y, w.norms[kind], self.shape.eps),
                self.cos_sin,
                self.sequences.positions,
            )
        )
        q, k = turn(product(w.q), 0), turn(product(w.k), 1)
        iq, ik = turn(product(w.iq), 2), turn(product(w.ik), 3)
        v = product(w.v)
        for token in range(h.shape[0]):
            self.sequences.insert(token, k[token], v[token], ik[token, 0])
        return q, iq

    def choose(self, iq: torch.Tensor) -> None:
        """Select blocks for every token and kv head."""
        s, d = self.sparse, self.shape.dims
        self.chosen = []
        for token in range(iq.shape[0]):
            count = int(self.sequences.positions[token]) + 1
            keys = torch_m3.paged_rows(self.sequences.index, self.sequences.table[token], count)
            own = iq[token].view(d.kv_heads, -1, HEAD_DIM)
            self.chosen.append(
                [
                    torch_m3.choose_blocks(
                        torch_m3.block_scores(group, keys),
                        s.index_topk,
                        s.init_blocks,
                        s.local_blocks,
                    )
                    for group in own
                ]
            )

    def attend(self, q: torch.Tensor, dense: bool) -> torch.Tensor:
        """[tokens, heads * dim], over the chosen blocks or over all."""
        d = self.shape.dims
        out = torch.empty_like(q)
        for token in range(q.shape[0]):
            for head in range(d.kv_heads):
                keys, values = self.sequences.rows(token, head)
                blocks = list(range(-(-keys.shape[0] // PAGE)))
                if not dense:
                    blocks = self.chosen[token][head]
                own = slice(head * self.shape.group, (head + 1) * self.shape.group)
                out[token, own] = torch_m3.attend(
                    q[token, own], keys, values, blocks, self.sparse.sm_scale
                )
        return bf16(out.flatten(1))

    def finish(self, w: LayerWeights, h: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """From the output projection to the next residual."""
        mid = bf16(h + attended @ w.o.T)
        x = bf16(torch_m3.rms_norm(mid, w.norm2, self.shape.eps))
        ids, weights, shared = torch.zeros(x.shape[0], 0), torch.zeros(x.shape[0], 0), 1.0
        if w.experts:
            shared = self.sparse.shared_weight
            logits = x @ w.router.T
            _require_clear(torch.sigmoid(logits) + w.bias, self.shape.dims.topk)
            ids, weights = torch_m3.route(
                logits, w.bias, self.shape.dims.topk, self.sparse.route_scale
            )
            weights[self.sequences.slots < 0] = 0  # padding takes no routed expert
        ffn = torch_m3.Experts(torch.cat([w.gate, w.up], 1), w.down)
        return bf16(mid + ffn(x, ids, weights, shared, self.sparse.swiglu_limit))


def _require_clear(ranked: torch.Tensor, topk: int) -> None:
    """Raise ValueError if rounding could change which experts are chosen."""
    ordered = ranked.sort(-1, descending=True).values
    margin = (ordered[:, topk - 1] - ordered[:, topk]).min().item()
    if margin < 0.01:
        raise ValueError(f"the choice of experts hangs on {margin}: take another seed")


class Rank:
    """One rank's memory and its launches."""

    def __init__(
        self, shape: LayerShape, sparse: SparseBuild, rank: int, sequences: Sequences
    ) -> None:
        t, hidden = shape.tokens, shape.dims.hidden
        part = lambda x, dim: x.chunk(shape.tp, dim)[rank].clone().contiguous()
        self.shape, self.sparse, self.rank, self.sequences = shape, sparse, rank, sequences
        self.k, self.v = part(sequences.k, 1), part(sequences.v, 1)
        self.index = sequences.index.clone()
        # Full of what would be wrong if it were read.
        self.scratch = torch.full((scratch_layout(shape, sparse).nbytes,), 1, dtype=torch.uint8)
        self.fence_off = peer_layout(shape).nbytes
        self.peer = torch.full((self.fence_off + FENCE_BYTES,), 1, dtype=torch.uint8)
        self.peer[self.fence_off :] = 0
        self.state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32)
        self.diag = torch.zeros(DIAG_BYTES // 4, dtype=torch.int32)
        self.selection = torch.full((t, shape.kv_heads, sparse.index_topk), 99, dtype=torch.int32)
        self.q = torch.zeros(t, shape.heads * HEAD_DIM, dtype=torch.bfloat16)
        self.attended = torch.zeros(t, shape.heads * HEAD_DIM, dtype=torch.bfloat16)
        self.h = [torch.zeros(t, hidden, dtype=torch.bfloat16) for _ in range(2)]
        self.peers = torch.zeros(shape.tp, dtype=torch.int64)
        self.cos_sin = torch_m3.cos_sin_table(POSITIONS, shape.dims.rotary)

    def pairs(self, region: str) -> torch.Tensor:
        """The bf16 pairs that the last layer left in words of scratch, f32."""
        place = scratch_layout(self.shape, self.sparse)[region]
        words = self.scratch[place.offset : place.end].view(torch.int32).view(-1, 2)
        return pairs_in(words, int(words[0, 1])).float()

    def begin(self) -> None:
        shape = self.shape
        build = StepBeginBuild(shape.tp, shape.debug, shape.blocks, shape.polls)
        peers = (self.peers, self.fence_off, self.rank, self.state, None)
        _run_compiled(build_step_begin(build), self.scratch, self.scratch.numel(), None, 0, *peers)

    def _values(self, w: LayerWeights, layer: int, indexed: bool, attn: str, ffn: str) -> dict:
        stored = w.shard(self.shape.tp, self.rank, indexed, attn, ffn)
        values = {
            "h_in": self.h[0],
            "h_out": self.h[1],
            "norm_w": w.norm1,
            "norm1_w": w.norm1,
            "norm2_w": w.norm2,
            "q_norm_w": w.norms[0],
            "k_norm_w": w.norms[1],
            "iq_norm_w": w.norms[2],
            "ik_norm_w": w.norms[3],
            "cos_sin": self.cos_sin,
            "positions": self.sequences.positions,
            "slots": self.sequences.slots,
            "k_cache": self.k,
            "v_cache": self.v,
            "index_cache": self.index,
            "cache_scales": self.sequences.scales,
            "block_table": self.sequences.table,
            "table_stride": self.sequences.table.shape[1],
            "selection": self.selection,
            "q_out": self.q,
            "attn_in": self.attended,
            "router_bias": w.bias,
            "scratch": self.scratch,
            "peers": self.peers,
            "rank": self.rank,
            "layer": layer,
            "diag": self.diag,
            "stamps": None,
        }
        for name, weight in stored.items():
            values[f"{name}_w"], values[f"{name}_s"] = weight.data, weight.scale
        return values

    def _run(self, launcher, abi: tuple[str, ...], values: dict) -> None:
        _run_compiled(launcher, *(values[name] for name in abi), None)

    def dense_pre(self, w: LayerWeights, layer: int, attn: str = "bf16") -> None:
        values = self._values(w, layer, False, attn, "bf16")
        build = DensePreBuild(self.shape, attn, self.sparse.kv_format)
        self._run(build_dense_pre(build), DENSE_PRE_ABI, values)

    def dense_post(
        self, w: LayerWeights, layer: int, attn: str = "bf16", ffn: str = "bf16"
    ) -> None:
        values = self._values(w, layer, False, attn, ffn) | {"norm_w": w.norm2}
        build = DensePostBuild(self.shape, attn, ffn, self.sparse.swiglu_limit)
        self._run(build_dense_post(build), DENSE_POST_ABI, values)
        self.h.reverse()

    def sparse_layer(self, w: LayerWeights, layer: int, build: SparseBuild) -> None:
        values = self._values(w, layer, build.select, build.attn_format, build.ffn_format)
        self._run(build_sparse_layer(build), SPARSE_ABI, values)
        self.h.reverse()
