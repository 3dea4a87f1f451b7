"""One width's launches in order, and their arguments.

    step-begin
    dense layer    dense_pre -> attention, which is the caller's -> dense_post
    sparse layer   one launch

The residual stream goes from the caller's tensor through two buffers in turn. Weights, caches and
buffers are bound when the width is prepared; the residual stream's buffers and all that a step
brings are addresses and numbers of that step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from flydsl.compiler.jit_function import JitFunction

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.runtime.abi import KernelAbi, StepPack

from .builds import (
    DENSE_POST_ABI,
    DENSE_PRE_ABI,
    HEAD_DIM,
    SPARSE_ABI,
    DensePostBuild,
    DensePreBuild,
    SparseBuild,
)
from .config import Config
from .weights import Bound

# What is fresh in every launch, in the order in which `forward` gives it.
FRESH = ("h_in", "h_out", "positions", "slots", "block_table", "table_stride")
PRE = StepPack(KernelAbi(DENSE_PRE_ABI), FRESH)
POST = StepPack(KernelAbi(DENSE_POST_ABI), FRESH)
SPARSE = StepPack(KernelAbi(SPARSE_ABI), FRESH)


@dataclass(frozen=True)
class Step:
    """What a decode step brings, padded to a width of `rows`.

    hidden       [rows, hidden] bf16: the embedded tokens; read only
    positions    [rows] i32
    slots        [rows] i32: the cache cell of each row's token, -1 for a padding row
    block_table  [rows, n] i32: the cache page of each 128 tokens of each row's sequence
    """

    hidden: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor


class DenseAttention(Protocol):
    """Attention of a dense layer over its caches, an ordinary kernel of the caller's.

    It reads `q` and writes `out`, both [rows, local heads * 128] bf16, on the current stream.
    """

    def __call__(
        self, layer: int, q: torch.Tensor, step: Step, out: torch.Tensor
    ) -> None:  # pragma: no cover
        ...


@dataclass(frozen=True)
class Builders:
    """What makes the layer launchers of a key."""

    dense_pre: Callable[[DensePreBuild], JitFunction]
    dense_post: Callable[[DensePostBuild], JitFunction]
    sparse: Callable[[SparseBuild], JitFunction]


@dataclass(frozen=True)
class WidthKernels:
    """The layer launchers of one width; None where no layer needs it."""

    pre: JitFunction | None
    post: JitFunction | None
    selecting: JitFunction | None
    reusing: JitFunction | None

    def pairs(self) -> list[tuple[JitFunction, KernelAbi]]:
        """The launchers there are, with their ABIs."""
        found = (
            (self.pre, PRE.abi),
            (self.post, POST.abi),
            (self.selecting, SPARSE.abi),
            (self.reusing, SPARSE.abi),
        )
        return [(launcher, abi) for launcher, abi in found if launcher is not None]


def width_kernels(config: Config, rows: int, builders: Builders) -> WidthKernels:
    """Build the launchers of width `rows`."""
    dense, selecting = config.dense_layers, any(map(config.selects, config.sparse_layers))
    return WidthKernels(
        builders.dense_pre(config.dense_pre(rows)) if dense else None,
        builders.dense_post(config.dense_post(rows)) if dense else None,
        builders.sparse(config.sparse(rows, select=True)) if selecting else None,
        builders.sparse(config.sparse(rows, select=False)) if config.reusing else None,
    )


@dataclass(frozen=True)
class Buffers:
    """What a rank's layers share, for its widest step.

    residual   two of [rows, hidden] bf16, in turn
    q, attn    [rows, local heads * 128] bf16
    selection  [rows, local kv heads, index_topk] i32
    scratch    zeroed by step-begin
    diag       wait records of debug builds, else None
    """

    residual: tuple[torch.Tensor, torch.Tensor]
    q: torch.Tensor
    attn: torch.Tensor
    selection: torch.Tensor
    scratch: torch.Tensor
    diag: torch.Tensor | None

    @classmethod
    def allocate(
        cls, config: Config, scratch_bytes: int, diag: torch.Tensor | None, device: torch.device
    ) -> Buffers:
        """For the widest width of `config`."""
        rows = max(config.widths)
        shape = config.shape(rows)
        bf16 = lambda columns: torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
        return cls(
            residual=(bf16(config.dims.hidden), bf16(config.dims.hidden)),
            q=bf16(shape.heads * HEAD_DIM),
            attn=bf16(shape.heads * HEAD_DIM),
            selection=torch.zeros(
                rows, shape.kv_heads, config.index_topk, dtype=torch.int32, device=device
            ),
            scratch=torch.zeros(scratch_bytes, dtype=torch.uint8, device=device),
            diag=diag,
        )


class WidthExecution:
    """The layers of steps of `rows` rows, bound to their memory."""

    def __init__(
        self,
        config: Config,
        rows: int,
        kernels: WidthKernels,
        bound: Bound,
        buffers: Buffers,
        peers: int,
        rank: int,
        attention: DenseAttention,
    ) -> None:
        self.kernels = kernels
        self._attention = attention
        self._residual = tuple(tensor[:rows] for tensor in buffers.residual)
        self._q, self._attn = buffers.q[:rows], buffers.attn[:rows]
        common = {
            "cos_sin": bound.cos_sin,
            "q_out": buffers.q.data_ptr(),
            "attn_in": buffers.attn.data_ptr(),
            "selection": buffers.selection.data_ptr(),
            "scratch": buffers.scratch.data_ptr(),
            "diag": 0 if buffers.diag is None else buffers.diag.data_ptr(),
            "peers": peers,
            "rank": rank,
        }
        self._dense: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        self._sparse: list[tuple[int, JitFunction, tuple[int, ...]]] = []
        for layer, weights in enumerate(bound.layers):
            values = {**common, **weights.addresses, "layer": layer}
            if layer < config.dense_layers:
                pre = _bind(PRE, values, norm_w="norm1_w")
                post = _bind(POST, values, norm_w="norm2_w")
                self._dense.append((layer, pre, post))
            else:
                launcher = kernels.selecting if config.selects(layer) else kernels.reusing
                assert launcher is not None
                self._sparse.append((layer, launcher, _bind(SPARSE, values)))

    def forward(self, step: Step, stream: int | None) -> torch.Tensor:
        """Run all layers on `stream`; the residual stream after the last, [rows, hidden] bf16.

        The result is one of two buffers that the next step overwrites.
        """
        a, b = self._residual
        at = (a.data_ptr(), b.data_ptr())
        table = step.block_table
        brought = (
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            table.data_ptr(),
            table.shape[1],
        )
        # Layer i writes buffer i mod 2 and reads the other; the first reads what the step brings.
        fresh = ((at[1], at[0], *brought), (at[0], at[1], *brought))
        first = (step.hidden.data_ptr(), at[0], *brought)
        kernels, q, attn, attention = self.kernels, self._q, self._attn, self._attention
        order_pre, order_post, order = PRE.order, POST.order, SPARSE.order
        for layer, pre, post in self._dense:
            values = fresh[layer & 1] if layer else first
            _run_compiled(kernels.pre, *order_pre(pre + values), stream)
            attention(layer, q, step, attn)
            _run_compiled(kernels.post, *order_post(post + values), stream)
        for layer, launcher, weights in self._sparse:
            values = fresh[layer & 1] if layer else first
            _run_compiled(launcher, *order(weights + values), stream)
        return self._residual[(len(self._dense) + len(self._sparse) - 1) & 1]


def _bind(pack: StepPack, values: dict[str, int], **renamed: str) -> tuple[int, ...]:
    """The bound arguments of `pack` out of `values`; `renamed` says where a name is another."""
    return pack.bind({name: values[renamed.get(name, name)] for name in pack.bound})
