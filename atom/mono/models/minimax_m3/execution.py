"""One width's launches in order, and their arguments.

    step-begin
    dense layer    dense_pre -> attention, which is the caller's -> dense_post
    sparse layer   one launch

The residual stream goes from the caller's tensor through two buffers in turn, and where it is kept
for a draft model, through a buffer of its own. Weights, caches and buffers are bound when the
width is prepared; a step brings the addresses and numbers of its own and its stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from flydsl.compiler.jit_function import JitFunction

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.runtime.abi import KernelAbi
from atom.mono.runtime.compile import trace
from atom.mono.runtime.debug import diag_buffer
from atom.mono.runtime.step_begin import StepBegin
from atom.mono.runtime.timeline import Launched, LayerTimeline

from .builds import (
    DENSE_POST_ABI,
    DENSE_PRE_ABI,
    DENSE_PRE_STEP,
    HEAD_DIM,
    SPARSE_ABI,
    SPARSE_STEP,
    DensePostBuild,
    DensePreBuild,
    SparseBuild,
)
from .config import Config
from .weights import Bound

PRE = KernelAbi(DENSE_PRE_ABI, step=DENSE_PRE_STEP)
POST = KernelAbi(DENSE_POST_ABI)
SPARSE = KernelAbi(SPARSE_ABI, step=SPARSE_STEP)

# A launcher and its bound arguments, h_in last.
Launch = tuple[JitFunction | int, ...]


@dataclass(frozen=True)
class Step:
    """What a decode step brings, padded to a width of `rows`.

    hidden       [rows, hidden] bf16: the embedded tokens; read only
    positions    [rows] i32
    slots        [rows] i32: the cache cell of each row's token, -1 for a padding row, whose
                 results mean nothing
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
            (self.pre, PRE),
            (self.post, POST),
            (self.selecting, SPARSE),
            (self.reusing, SPARSE),
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
    aux        [rows, hidden] bf16 for each layer whose result is kept
    q, attn    [rows, local heads * 128] bf16
    selection  [rows, local kv heads, index_topk] i32
    scratch    zeroed by step-begin
    diag       wait records of debug builds, else None
    """

    residual: tuple[torch.Tensor, torch.Tensor]
    aux: dict[int, torch.Tensor]
    q: torch.Tensor
    attn: torch.Tensor
    selection: torch.Tensor
    scratch: torch.Tensor
    diag: torch.Tensor | None

    @classmethod
    def allocate(cls, config: Config, scratch_bytes: int, device: torch.device) -> Buffers:
        """For the widest width of `config`."""
        rows = max(config.widths)
        shape = config.shape(rows)
        bf16 = lambda columns: torch.zeros(rows, columns, dtype=torch.bfloat16, device=device)
        return cls(
            residual=(bf16(config.dims.hidden), bf16(config.dims.hidden)),
            aux={layer: bf16(config.dims.hidden) for layer in config.aux_layers},
            q=bf16(shape.heads * HEAD_DIM),
            attn=bf16(shape.heads * HEAD_DIM),
            selection=torch.zeros(
                rows, shape.kv_heads, config.index_topk, dtype=torch.int32, device=device
            ),
            scratch=torch.zeros(scratch_bytes, dtype=torch.uint8, device=device),
            diag=diag_buffer(device) if config.debug else None,
        )

    def output(self, layer: int) -> torch.Tensor:
        """What `layer` writes the residual stream into; its input is another buffer."""
        return self.aux.get(layer, self.residual[layer & 1])


class WidthExecution:
    """The layers of steps of `rows` rows, bound to their memory.

    `begin` opens a step. `result` is the residual stream after the last layer and `aux` what is
    kept of it, in the order of `Config.aux_layers`, all [rows, hidden] bf16 in buffers that the
    next step overwrites. `timeline` is there where the build has one.
    """

    def __init__(
        self,
        config: Config,
        rows: int,
        kernels: WidthKernels,
        bound: Bound,
        buffers: Buffers,
        begin: StepBegin,
        attention: DenseAttention,
    ) -> None:
        self.kernels, self.begin = kernels, begin
        self._attention = attention
        self._q, self._attn = buffers.q[:rows], buffers.attn[:rows]
        self.aux = [buffers.aux[layer][:rows] for layer in config.aux_layers]
        self.result = buffers.output(config.layers - 1)[:rows]
        self.first_output = buffers.output(0).data_ptr()
        common = {
            "cos_sin": bound.cos_sin,
            "q_out": buffers.q.data_ptr(),
            "attn_in": buffers.attn.data_ptr(),
            "selection": buffers.selection.data_ptr(),
            "scratch": buffers.scratch.data_ptr(),
            "diag": 0 if buffers.diag is None else buffers.diag.data_ptr(),
            "peers": begin.peers.addresses.data_ptr(),
            "rank": begin.peers.rank,
        }
        plan = list(_launches(config, kernels))
        self.timeline = _timeline(config, kernels, plan, begin) if config.timeline else None
        self._dense: list[list[Launch]] = [[] for _ in range(config.dense_layers)]
        self._sparse: list[Launch] = []
        for number, (layer, launcher, abi) in enumerate(plan):
            names = {"norm_w": "norm1_w" if abi is PRE else "norm2_w"}
            values = {
                **common,
                **bound.layers[layer].addresses,
                "layer": layer,
                # Of the first layer it is the step's.
                "h_in": buffers.output(layer - 1).data_ptr() if layer else 0,
                "h_out": buffers.output(layer).data_ptr(),
                "stamps": 0 if self.timeline is None else self.timeline.address(number),
            }
            launch = (launcher, *_bound(abi, values, names))
            (self._sparse if abi is SPARSE else self._dense[layer]).append(launch)

    def forward(self, step: Step, stream: int | None) -> torch.Tensor:
        """Open a step and run all layers on `stream`; `result`."""
        self.begin(stream)
        table = step.block_table
        tokens = (step.positions.data_ptr(), step.slots.data_ptr())
        pre_brings = (*tokens, stream)
        post_brings = (stream,)
        sparse_brings = (*tokens, table.data_ptr(), table.shape[1], stream)
        first = (step.hidden.data_ptr(),)
        q, attn, attention = self._q, self._attn, self._attention
        for layer, (pre, post) in enumerate(self._dense):
            if layer == 0:
                pre, post = pre[:-1] + first, post[:-1] + first
            _run_compiled(*(pre + pre_brings))
            attention(layer, q, step, attn)
            _run_compiled(*(post + post_brings))
        sparse = self._sparse
        if sparse and not self._dense:
            sparse = [sparse[0][:-1] + first, *sparse[1:]]
        for launch in sparse:
            _run_compiled(*(launch + sparse_brings))
        return self.result


def _launches(
    config: Config, kernels: WidthKernels
) -> Iterator[tuple[int, JitFunction, KernelAbi]]:
    """(layer, launcher, its ABI) of every launch of the layers, in order."""
    for layer in range(config.layers):
        if layer < config.dense_layers:
            found = [(kernels.pre, PRE), (kernels.post, POST)]
        else:
            launcher = kernels.selecting if config.selects(layer) else kernels.reusing
            found = [(launcher, SPARSE)]
        for launcher, abi in found:
            assert launcher is not None
            yield layer, launcher, abi


def _bound(abi: KernelAbi, values: dict[str, int], names: dict[str, str]) -> tuple[int, ...]:
    """The bound arguments of `abi` out of `values`; `names` says where a name is another."""
    bound = abi.names[: len(abi.names) - len(abi.step)]
    assert bound[-1] == "h_in", "the first layer's is a step's"
    return abi.bind({name: values[names.get(name, name)] for name in bound})


def _timeline(
    config: Config,
    kernels: WidthKernels,
    plan: list[tuple[int, JitFunction, KernelAbi]],
    begin: StepBegin,
) -> LayerTimeline:
    """One for the launches of `plan`, whose stages are what tracing finds."""
    stages = {id(launcher): tuple(trace(launcher, abi).stages) for launcher, abi in kernels.pairs()}
    launches = [
        Launched(f"layer {layer} {launcher.func.__name__}", stages[id(launcher)])
        for layer, launcher, _ in plan
    ]
    return LayerTimeline(launches, config.blocks, begin.peers.addresses.device)
