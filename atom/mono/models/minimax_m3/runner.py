"""A rank's runner: its memory, the preparation of widths, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aiter import env
from atom.mono import device as device_kernels
from atom.mono.plan.build_key import key_tuple, source_digest
from atom.mono.runtime.consensus import Group, MonoUnsupported, bind_agreed, tp_same
from atom.mono.runtime.debug import diag_buffer, raise_if_given_up, region_namer
from atom.mono.runtime.deployment import Deployment, first_refusal
from atom.mono.runtime.lifecycle import owned_peer_buffer
from atom.mono.runtime.mailboxes import StepMailboxes
from atom.mono.runtime.peer_memory import PeerAllocator
from atom.mono.runtime.stream import current_stream
from atom.mono.runtime.widths import WidthBuilds

from .config import Config
from .dispatch import refusals
from .execution import Buffers, Builders, DenseAttention, Step, WidthExecution, width_kernels
from .layout import peer_layout, scratch_layout
from .weights import Bound, Tensors, Weights, bind_weights

_SOURCES = (Path(__file__).parent, Path(device_kernels.__file__).parent)


class MiniMaxM3Runner:
    """Decode steps of one rank.

        runner = MiniMaxM3Runner(
            config, deployment, weights, caches, attention, allocator, group, device
        )
        if runner.prepare(4):                 # compiles, launches nothing
            hidden = runner.forward(step)     # the first one of a width loads it

    All calls are collective over the ranks of `group` (None: one rank), in the same order. Making
    one raises MonoUnsupported, on every rank, when on any of them the deployment cannot be served,
    weights or caches do not fit or nothing would be launched, or when ranks would run different
    code. `builders` are for tests: None stands for the layer kernels of this model.
    """

    def __init__(
        self,
        config: Config,
        deployment: Deployment,
        weights: Weights,
        caches: Sequence[Tensors],
        attention: DenseAttention,
        allocator: PeerAllocator,
        group: Group,
        device: torch.device,
        builders: Builders | None = None,
    ) -> None:
        self.config, self.device = config, device

        def bind() -> Bound:
            if reason := first_refusal(refusals(config, deployment)):
                raise MonoUnsupported(reason)
            if env.COMPILE_ONLY.get():
                raise MonoUnsupported("COMPILE_ONLY is set: steps would launch nothing")
            return bind_weights(config, weights, caches, device)

        self._bound = bind_agreed(bind, group)
        self._builders = bind_agreed(lambda: builders or layer_builders(), group)
        if not tp_same(identity(config), group):
            raise MonoUnsupported("ranks differ in their configuration or their kernels' sources")
        if allocator.npes != config.tp:
            raise MonoUnsupported(
                f"peer memory of {allocator.npes} ranks, the model has {config.tp}"
            )
        shapes = [config.shape(rows) for rows in config.widths]
        peer_bytes = max(peer_layout(shape).nbytes for shape in shapes)
        scratch_bytes = max(
            scratch_layout(shape, config.sparse(shape.tokens, True)).nbytes for shape in shapes
        )
        diag = diag_buffer(device) if config.debug else None
        self._buffers = bind_agreed(
            lambda: Buffers.allocate(config, scratch_bytes, diag, device), group
        )
        # `close()` gives the peer memory back, which otherwise lasts as long as the runner.
        self._peers, self.close = owned_peer_buffer(self, allocator, peer_bytes, device)
        self._mailboxes = StepMailboxes(config.step_begin(), self._peers, self._buffers.scratch)
        # The builds must not hold the runner, whose end gives the peer memory back.
        bound, buffers, peers = self._bound, self._buffers, self._peers
        built = self._builders

        def build(rows: int) -> WidthExecution:
            return WidthExecution(
                config,
                rows,
                width_kernels(config, rows, built),
                bound,
                buffers,
                peers.addresses.data_ptr(),
                peers.rank,
                attention,
            )

        begin = self._mailboxes.kernels
        self._widths = WidthBuilds(
            build, lambda width: [*begin, *width.kernels.pairs()], group, "MiniMax-M3 mono"
        )
        self._warm: set[int] = set()

    def prepare(self, rows: int) -> bool:
        """Whether steps of width `rows` can run, after compiling it if need be."""
        return rows in self.config.widths and self._widths.prepare(rows)

    def warm(self, rows: int) -> bool:
        """Whether a step of width `rows` has run: only such a one may be captured."""
        return rows in self._warm

    def forward(self, step: Step) -> torch.Tensor:
        """Run a step on the current stream; the residual stream after the last layer.

        The result, [rows, hidden] bf16, is a buffer that the next step overwrites. Raises
        MonoUnsupported for a width that is not prepared, ValueError for tensors that do not fit.
        """
        if not self.close.alive:
            raise MonoUnsupported("the runner is closed: its peer memory is gone")
        rows = step.hidden.shape[0]
        width = self._widths[rows]
        _check_step(step, rows, self.config, self.device)
        if step.hidden.data_ptr() == self._buffers.residual[0].data_ptr():
            raise ValueError("hidden is the buffer that the first layer writes: copy it")
        stream = current_stream(self.device)
        self._mailboxes.begin_step(stream)
        hidden = width.forward(step, stream)
        # In compile-only mode nothing has run.
        if rows not in self._warm and not env.COMPILE_ONLY.get():
            self._warm.add(rows)
        return hidden

    def finish_step(self) -> None:
        """Raise WaitGivenUp if the last step's debug build gave up a wait. Waits for the device."""
        if self._buffers.diag is not None:
            tags = region_namer(f"layer {layer}" for layer in range(self.config.layers))
            raise_if_given_up(self._buffers.diag, self._mailboxes.missing_ranks(), tags)


def layer_builders() -> Builders:
    """The builders of the layer kernels."""
    from .kernels.dense_post import build_dense_post
    from .kernels.dense_pre import build_dense_pre
    from .kernels.sparse_layer import build_sparse_layer

    return Builders(build_dense_pre, build_dense_post, build_sparse_layer)


def identity(config: Config) -> str:
    """What ranks must have in common: every kernel's key, and the kernels' sources."""
    sources = source_digest(*_SOURCES)
    keys = [config.step_begin()]
    for rows in config.widths:
        keys += [
            config.dense_pre(rows),
            config.dense_post(rows),
            config.sparse(rows, True),
            config.sparse(rows, False),
        ]
    layers = (config.layers, config.dense_layers, sorted(config.reusing))
    return repr(([key_tuple(key, sources) for key in keys], layers))


def _check_step(step: Step, rows: int, config: Config, device: torch.device) -> None:
    bf16, i32 = torch.bfloat16, torch.int32
    table = step.block_table
    for name, tensor, shape, dtype in (
        ("hidden", step.hidden, (rows, config.dims.hidden), bf16),
        ("positions", step.positions, (rows,), i32),
        ("slots", step.slots, (rows,), i32),
        ("block_table", table, (rows, min(table.shape[-1], config.max_blocks)), i32),
    ):
        if (
            tensor.shape != shape
            or tensor.dtype != dtype
            or tensor.device != device
            or not tensor.is_contiguous()
        ):
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not "
                f"contiguous {dtype} {shape} on {device}"
            )
