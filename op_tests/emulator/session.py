"""The public entry: run FlyDSL kernels on CPU tensors inside ``with emulated(...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from .code import Code, EmulationError, decode
from .lowering import flydsl_arch, jit_calls, lower
from .memory import Allocation, GlobalMemory
from .program import Function, Program
from .ranks import Ranks
from .scheduler import Geometry, Grid, Options
from .stats import KernelStats

ARCHS = ("gfx942", "gfx950", "gfx1250")
_decoded: dict[tuple[int, str], tuple[Program, Code]] = {}


class Emulator:
    """What ``emulated`` yields. ``stats`` maps kernel names to their counters."""

    def __init__(self, arch: str, options: Options, detailed_stats: bool) -> None:
        self.arch, self.options = arch, options
        self.memory = GlobalMemory()
        self.stats: dict[str, KernelStats] = {}
        self._detailed = detailed_stats
        self._ranks: Ranks | None = None

    def register(
        self, tensor: torch.Tensor, label: str = "", scratch: bool = False
    ) -> torch.Tensor:
        """Allow kernels to use the storage of ``tensor`` until the context ends.

        Needed for tensors a launch does not name, such as those behind an address table. With
        ``scratch``, reading bytes that nothing has written is an error when ``poison`` is on.
        """
        self.memory.register(tensor, label, scratch and self.options.poison)
        return tensor

    def launch(self, launcher, args: tuple, kwargs: dict | None = None) -> None:
        """Run one launch of a JitFunction to its end."""
        steps = self.rounds(launcher, args, kwargs or {})
        rank = self._ranks.current() if self._ranks else None
        if rank is not None:
            rank.drive(steps)
        else:
            for _ in steps:
                pass

    def run_ranks(self, functions: Sequence[Callable[[], object]]) -> list[object]:
        """Call one host function a rank, all at once over one address space; their results.

        Kernels of different ranks advance in turns, so ranks may wait for each other's writes.
        Tensors that other ranks touch must be registered.
        """
        if self._ranks is not None:
            raise RuntimeError("run_ranks inside run_ranks")
        seed = self.options.seed if self.options.order == "random" else None
        self._ranks = Ranks(functions, seed)
        try:
            return self._ranks.run()
        finally:
            self._ranks = None

    def rounds(self, launcher, args: tuple, kwargs: dict) -> Iterator[Grid]:
        """The same step by step: yields a grid whenever its batches have had a turn."""
        held = self._hold([*args, *kwargs.values()])
        try:
            args = tuple(_address(launcher, n, a) for n, a in enumerate(args))
            program, values = lower(launcher, args, kwargs, self.arch)
            yield from self.program_rounds(program, values)
        finally:
            for allocation in held:
                self.memory.release(allocation)

    def program_rounds(self, program: Program, values: list) -> Iterator[Grid]:
        """Run a program whose host function gets ``values``; yields as :meth:`rounds` does."""
        for name, geometry, arguments in self._host(program, values):
            yield from self._kernel(program, name, geometry, arguments)

    def _hold(self, values: list) -> list[Allocation]:
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        tensors += [
            t for v in values if isinstance(t := getattr(v, "torch_tensor", None), torch.Tensor)
        ]
        return [self.memory.register(t) for t in tensors if t.untyped_storage().nbytes()]

    def _host(self, program: Program, values: list) -> list[tuple[str, Geometry, list]]:
        """The kernel launches the host function asks for."""
        asked: list[tuple[str, Geometry, list]] = []
        grid = self._grid(program, program.host, Geometry((1, 1, 1), (1, 1, 1)), values, "host")
        grid.launch_kernel = lambda *launch: asked.append(launch)
        for _ in grid.rounds():
            pass
        return asked

    def _grid(
        self, program: Program, function: Function, geometry: Geometry, values: list, name: str
    ) -> Grid:
        key = (id(program), function.name)
        if key not in _decoded:
            _decoded[key] = (program, decode(program, function))
        code = _decoded[key][1]
        if name == "host":
            stats, options = KernelStats(name), Options()
        else:
            banks = 32 if self.arch == "gfx942" else 64
            fresh = KernelStats(name, self._detailed, banks)
            stats, options = self.stats.setdefault(name, fresh), self.options
        return Grid(
            code, self.arch, geometry, values, self.memory, stats, options, program.lds_bytes
        )

    def _kernel(
        self, program: Program, name: str, geometry: Geometry, values: list
    ) -> Iterator[Grid]:
        if 0 in geometry.grid:
            return
        grid = self._grid(program, program.kernels[name], geometry, values, name)
        grid.stats.launches += 1
        before = [segment.executed for segment in grid.code.segments]
        try:
            for _ in grid.rounds():
                if grid.stuck():
                    raise EmulationError("\n".join(grid.report()))
                yield grid
        finally:
            for segment, was in zip(grid.code.segments, before, strict=True):
                for kind, count in segment.histogram.items():
                    grid.stats.instructions[kind] += count * int(segment.executed - was)


def _address(launcher, position: int, value: object) -> object:
    """A tensor or None given for an integer slot becomes its address."""
    launcher._ensure_sig()
    parameters = list(launcher._sig.parameters.values())
    note = parameters[position].annotation if position < len(parameters) else None
    if getattr(note, "__name__", "") not in ("Int64", "Uint64"):
        return value
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return 0 if value is None else value


@contextmanager
def emulated(
    target: object,
    order: str = "lockstep",
    seed: int = 0,
    poison: bool = False,
    spin_limit: int = 100_000,
    detailed_stats: bool = False,
) -> Iterator[Emulator]:
    """Run FlyDSL kernels on this process's CPU tensors as the GPU ``target`` would.

    Inside, a plain call of a ``@flyc.jit`` launcher, and ``tensor_shim._run_compiled``, execute on
    CPU tensors with unchanged arguments.

    ``target``: a gfx name, or anything with a ``gfx`` attribute.
    ``order``: "lockstep" runs waves together (fast); "random" runs waves one at a time between
    barriers and lands asynchronous copies late, both chosen by ``seed``.
    ``poison``: report reads of LDS and of scratch tensors that nothing has written.
    ``spin_limit``: how many segments may run without any change before a deadlock is reported.
    ``detailed_stats``: also count LDS bank conflicts.

    Raises :class:`EmulationError`, naming kernel, operation, source line and lane.
    """
    arch = str(getattr(target, "gfx", target))
    if arch not in ARCHS:
        raise ValueError(f"the emulator knows {', '.join(ARCHS)}, not {arch!r}")
    if order not in ("lockstep", "random"):
        raise ValueError(f"order must be 'lockstep' or 'random', not {order!r}")
    emulator = Emulator(arch, Options(order, seed, poison, spin_limit), detailed_stats)
    run: Callable = emulator.launch
    with ExitStack() as stack:
        stack.enter_context(flydsl_arch(arch))
        stack.enter_context(jit_calls(run))
        shim = _tensor_shim()
        if shim is not None:
            stack.enter_context(shim.intercepted(lambda launcher, args: run(launcher, args)))
        yield emulator


def _tensor_shim():
    """The project's choke point, where it can be imported."""
    try:
        from aiter.ops.flydsl.kernels import tensor_shim
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("aiter"):
            raise
        return None
    return tensor_shim
