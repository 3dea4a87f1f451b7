"""Small kernels with the ABI of MiniMax-M3's layer kernels, and a model to run them in.

The residual stream is taken as i32 words. A layer adds its number + 1 to each; in a dense layer
the number goes through q and attention first, so that a step's result shows what ran, in which
order, on which buffers: the words that came in plus 1 + 2 + ... + layers.
"""

from __future__ import annotations

import inspect

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch
from flydsl.compiler.jit_function import JitFunction
from flydsl.compiler.kernel_function import KernelFunction

from aiter.jit.utils.chip_info import Target
from aiter.ops.flydsl.kernels.device import global_pointer, traced
from aiter.ops.flydsl.kernels.tensor_shim import kernel_builder
from atom.mono.device.launch import launcher_of
from atom.mono.models.minimax_m3.builds import (
    DENSE_POST_ABI,
    DENSE_PRE_ABI,
    I32_NAMES,
    SPARSE_ABI,
    DensePostBuild,
    DensePreBuild,
    Dims,
    SparseBuild,
)
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.execution import Builders, Step
from atom.mono.models.minimax_m3.runner import MiniMaxM3Runner
from atom.mono.models.minimax_m3.weights import (
    Tensors,
    Weights,
    expected_caches,
    expected_weights,
)
from atom.mono.runtime.deployment import Deployment
from atom.mono.runtime.peer_memory import InProcessHeap, PeerAllocator
from op_tests.emulator.session import Emulator

CPU = torch.device("cpu")
PAGES = 2
DIMS = Dims(
    hidden=128,
    heads=2,
    kv_heads=1,
    index_heads=1,
    dense_inter=128,
    inter=128,
    experts=16,
    topk=2,
)
# Few layers: two dense, three sparse, the second of which reuses the first's selection.
FEW = {"layers": 5, "dense_layers": 2, "reusing": frozenset({3})}
LANES = 64


@traced
def _add(h_out: fx.Int64, h_in: fx.Int64, words: int, number: fx.Int32) -> None:
    for i in range(fx.Int32(fx.thread_idx.x), fx.Int32(words), fx.Int32(LANES)):
        value = global_pointer(fx.Int32, h_in)[fx.Int32(i)]
        global_pointer(fx.Int32, h_out)[fx.Int32(i)] = value + number


def _types(abi: tuple[str, ...]) -> dict[str, type]:
    return {name: fx.Int32 if name in I32_NAMES else fx.Int64 for name in abi}


def _start(kernel: KernelFunction, given: dict) -> None:
    """Start `kernel` with those of a launcher's arguments that it takes."""
    taken = {name: given[name] for name in inspect.signature(kernel._func).parameters}
    kernel(**taken).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=given["stream"])


@kernel_builder
def build_dense_pre(key: DensePreBuild) -> JitFunction:
    """q_out[0] = layer."""

    @flyc.kernel
    def dense_pre(q_out: fx.Int64, layer: fx.Int32):
        global_pointer(fx.Int32, q_out)[fx.Int32(0)] = layer

    def launch(**given):
        _start(dense_pre, given)

    return launcher_of(launch, "launch_dense_pre", _types(DENSE_PRE_ABI))


@kernel_builder
def build_dense_post(key: DensePostBuild) -> JitFunction:
    """h_out = h_in + attn_in[0] + 1."""
    words = key.shape.tokens * key.shape.dims.hidden // 2

    @flyc.kernel
    def dense_post(h_out: fx.Int64, h_in: fx.Int64, attn_in: fx.Int64):
        _add(h_out, h_in, words, global_pointer(fx.Int32, attn_in)[fx.Int32(0)] + 1)

    def launch(**given):
        _start(dense_post, given)

    return launcher_of(launch, "launch_dense_post", _types(DENSE_POST_ABI))


@kernel_builder
def build_sparse(key: SparseBuild) -> JitFunction:
    """h_out = h_in + layer + 1."""
    words = key.shape.tokens * key.shape.dims.hidden // 2

    @flyc.kernel
    def sparse_layer(
        h_out: fx.Int64,
        h_in: fx.Int64,
        positions: fx.Int64,
        slots: fx.Int64,
        block_table: fx.Int64,
        qkv_w: fx.Int64,
        layer: fx.Int32,
        table_stride: fx.Int32,
    ):
        _add(h_out, h_in, words, layer + 1)

    def launch(**given):
        _start(sparse_layer, given)

    return launcher_of(launch, "launch_sparse", _types(SPARSE_ABI))


STAND_INS = Builders(build_dense_pre, build_dense_post, build_sparse)


def small_config(**changes: object) -> Config:
    """MiniMax-M3's 60 layers at the smallest dimensions, one rank, a grid of two workgroups."""
    options = {"dims": DIMS, "tp": 1, "max_blocks": 16, "blocks": 2, **changes}
    return Config(**options)  # type: ignore[arg-type]


def zeros(expected: dict) -> dict[str, torch.Tensor]:
    """Tensors of the first dtype that is expected."""
    made = {}
    for name, want in expected.items():
        dtype = want.dtypes[0]
        tensor = (
            torch.zeros(want.shape, dtype=torch.uint8).view(dtype)
            if (dtype.itemsize == 1)
            else torch.full(want.shape, int(want.positive), dtype=dtype)
        )
        if want.shuffled:
            tensor.is_shuffled = True
        made[name] = tensor
    return made


def make_weights(config: Config) -> Weights:
    """Zero weights of a rank."""
    cos_sin = torch.zeros(config.context, config.dims.rotary)
    return Weights(
        cos_sin, [zeros(expected_weights(config, layer)) for layer in range(config.layers)]
    )


def make_caches(config: Config) -> list[Tensors]:
    """Zero caches of `PAGES` pages."""
    return [zeros(expected_caches(config, layer, PAGES)) for layer in range(config.layers)]


def copy_attention(layer: int, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
    """An attention that hands q on."""
    out.copy_(q)


def deployment_of(config: Config) -> Deployment:
    """One that `config` serves."""
    return Deployment(
        Target.of("gfx950"), config.tp, kv_dtype=config.kv_format, context=config.context
    )


def make_runner(
    config: Config,
    allocator: PeerAllocator | None = None,
    builders: Builders = STAND_INS,
    device: torch.device = CPU,
) -> MiniMaxM3Runner:
    """A runner over zero weights, alone unless an allocator says otherwise."""
    return MiniMaxM3Runner(
        config,
        deployment_of(config),
        make_weights(config),
        make_caches(config),
        copy_attention,
        allocator or InProcessHeap(config.tp).allocator(0),
        None,
        device,
        builders,
    )


def make_step(config: Config, rows: int, first: int = 0) -> Step:
    """A step whose residual words count up from `first`."""
    words = torch.arange(first, first + rows * config.dims.hidden // 2, dtype=torch.int32)
    return Step(
        hidden=words.view(torch.bfloat16).view(rows, config.dims.hidden),
        positions=torch.zeros(rows, dtype=torch.int32),
        slots=torch.arange(rows, dtype=torch.int32),
        block_table=torch.zeros(rows, 3, dtype=torch.int32),
    )


def words_of(hidden: torch.Tensor) -> torch.Tensor:
    """The residual stream as its i32 words."""
    return hidden.contiguous().view(torch.int32).flatten()


def allow(emulator: Emulator, runner: MiniMaxM3Runner, *steps: Step) -> None:
    """Let emulated kernels reach what `runner` and `steps` give them by address."""
    b = runner._buffers
    held = [*b.residual, *b.aux.values(), b.q, b.attn, b.selection, b.scratch]
    for width in runner._widths.built:
        held += [width.begin.peers.addresses]
        held += [] if width.timeline is None else [width.timeline.stamps]
    held += [runner._mailboxes.state, *([] if b.diag is None else [b.diag])]
    held += [runner._bound.held, *(t for layer in runner._bound.layers for t in layer.held)]
    for step in steps:
        held += [step.hidden, step.positions, step.slots, step.block_table]
    for tensor in held:
        emulator.register(tensor)
