"""A rank's runner: its memory, the preparation of widths, and steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from aiter import env
from atom.mono import device as device_kernels
from atom.mono.plan.build_key import key_tuple, source_digest
from atom.mono.runtime.compare import require_same_on_all_ranks
from atom.mono.runtime.consensus import Group, MonoUnsupported, bind_agreed, tp_same
from atom.mono.runtime.debug import raise_if_given_up, region_namer
from atom.mono.runtime.deployment import Deployment, first_refusal
from atom.mono.runtime.lifecycle import owned_peer_buffer
from atom.mono.runtime.mailboxes import StepMailboxes
from atom.mono.runtime.peer_memory import PeerAllocator
from atom.mono.runtime.stream import current_stream, not_current
from atom.mono.runtime.timeline import LayerTimeline
from atom.mono.runtime.widths import WidthBuilds

from .config import Config
from .contract import check_width
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
    code. `config` is taken with what the environment asks for (`Config.with_env`). `builders` are
    for tests: None stands for the layer kernels of this model.
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
        # As tensors name it: "cuda" is the current device, whose number theirs has.
        device = torch.empty(0, device=device).device
        config = config.with_env()
        self.config, self.device, self._group = config, device, group

        def bind() -> Bound:
            if reason := first_refusal([*refusals(config, deployment), not_current(device)]):
                raise MonoUnsupported(reason)
            if allocator.npes != config.tp:
                raise MonoUnsupported(
                    f"peer memory of {allocator.npes} ranks, the model has {config.tp}"
                )
            if env.COMPILE_ONLY.get():
                raise MonoUnsupported("COMPILE_ONLY is set: steps would launch nothing")
            return bind_weights(config, weights, caches, device)

        self._bound = bind_agreed(bind, group)
        self._builders = bind_agreed(lambda: builders or layer_builders(), group)
        if not tp_same(identity(config), group):
            raise MonoUnsupported("ranks differ in their configuration or their kernels' sources")
        scratch = max(_scratch_bytes(config, rows) for rows in config.widths)
        self._buffers = bind_agreed(lambda: Buffers.allocate(config, scratch, device), group)
        # `close()` gives the peer memory back, which otherwise lasts as long as the runner.
        peer_bytes = max(_peer_bytes(config, rows) for rows in config.widths)
        self._peers, self.close = owned_peer_buffer(self, allocator, peer_bytes, device)
        self._mailboxes = bind_agreed(
            lambda: StepMailboxes(config.step_begin(), self._peers, self._buffers.scratch), group
        )
        # The builds must not hold the runner, whose end gives the peer memory back.
        bound, buffers, mailboxes = self._bound, self._buffers, self._mailboxes
        built = self._builders

        def build(rows: int) -> WidthExecution:
            if config.check:
                check_width(config, rows, built)
            return WidthExecution(
                config,
                rows,
                width_kernels(config, rows, built),
                bound,
                buffers,
                mailboxes.of_width(_peer_bytes(config, rows), _scratch_bytes(config, rows)),
                attention,
            )

        self._widths = WidthBuilds(
            build,
            lambda width: [*mailboxes.kernels, *width.kernels.pairs()],
            group,
            "MiniMax-M3 mono",
        )
        # Result and slots of the last step.
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
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
        if step.hidden.data_ptr() == width.first_output:
            raise ValueError("hidden is the buffer that the first layer writes: copy it")
        hidden = width.forward(step, current_stream(self.device))
        self._last = hidden, step.slots
        # In compile-only mode nothing has run.
        if rows not in self._warm and not env.COMPILE_ONLY.get():
            self._warm.add(rows)
        return hidden

    def aux(self, rows: int) -> list[torch.Tensor]:
        """The residual stream behind each of `Config.aux_layers`, as the last step of width `rows`
        left it, [rows, hidden] bf16; the next step overwrites it."""
        return self._widths[rows].aux

    def timeline(self, rows: int) -> LayerTimeline | None:
        """The time stamps of width `rows`; None where the build has none."""
        return self._widths[rows].timeline

    def finish_step(self) -> None:
        """Check the step that has just run, as far as the configuration asks for it.

        Raises WaitGivenUp if a debug build gave up a wait and, with `Config.check`, ResultsDiffer
        on every rank if the ranks' results, but for padding rows, are not one. Waits for the
        device; collective with `Config.check`. Not while a graph is captured.
        """
        if self._buffers.diag is not None:
            tags = region_namer(f"layer {layer}" for layer in range(self.config.layers))
            raise_if_given_up(self._buffers.diag, self._mailboxes.missing_ranks(), tags)
        if self.config.check and self._last is not None:
            result, slots = self._last
            require_same_on_all_ranks(result[slots >= 0], self._group, "MiniMax-M3 step")


def _peer_bytes(config: Config, rows: int) -> int:
    return peer_layout(config.shape(rows)).nbytes


def _scratch_bytes(config: Config, rows: int) -> int:
    return scratch_layout(config.shape(rows), config.sparse(rows, True)).nbytes


def layer_builders() -> Builders:
    """The builders of the layer kernels."""
    from .kernels.dense_post import build_dense_post
    from .kernels.dense_pre import build_dense_pre
    from .kernels.sparse_layer import build_sparse_layer

    return Builders(build_dense_pre, build_dense_post, build_sparse_layer)


def sources() -> str:
    """The digest of the sources of every kernel that a step launches."""
    return source_digest(*_SOURCES)


def identity(config: Config) -> str:
    """What ranks must have in common: every kernel's key, the kernels' sources, and which kernels
    and votes a step is."""
    step = (config.layers, config.dense_layers, sorted(config.reusing), config.check)
    return repr(([key_tuple(key, sources()) for key in config.builds()], step))


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
