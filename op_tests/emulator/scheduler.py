"""Running a grid: which waves go next, barriers, clusters, spin loops and deadlocks.

A *group* is some workgroups side by side, each with its own LDS. In lock-step order all its waves
form one batch; in random order every batch holds one wave of each of the workgroups (of those at
one place in their clusters), a different one in each, and runs alone until a barrier, a sleep or
its end, or at random until the end of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .code import Code, EmulationError, Segment, pick
from .copies import make_copies
from .machine import Batch
from .memory import Bank, GlobalMemory, MemoryFault
from .stats import KernelStats

WORKGROUP, CLUSTER = -1, -3  # barrier ids
LANES = 4096
SLICE = 2048  # segments a batch runs before others get a turn
PREEMPT = 0.1  # in random order, the chance that others run after a segment


@dataclass(frozen=True)
class Options:
    """``spin_limit``: segments run without any memory change, barrier or exit before a deadlock."""

    order: str = "lockstep"
    seed: int = 0
    poison: bool = False
    spin_limit: int = 100_000


@dataclass(frozen=True)
class Geometry:
    """Launch dimensions, x first."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    lds: int = 0


class Barrier:
    """Arrivals at one barrier id.

    ``owner``: for every wave the workgroup or cluster whose barrier it is. ``party``: what signals
    once; every wave of a workgroup for its own barrier, one wave of each workgroup for a cluster's.
    A wave remembers which openings it has passed, so it may come to wait after the opening.
    """

    def __init__(self, owner: np.ndarray, party: np.ndarray) -> None:
        self.owner, self.party = owner, party
        parties, first = np.unique(party, return_index=True)
        self.need = np.bincount(owner[first[parties]])
        self.running = np.bincount(party)
        self.count = np.zeros_like(self.need)
        self.opened = np.zeros_like(self.need)
        self.passed = np.zeros(len(owner), np.int64)

    def signal(self, waves: np.ndarray) -> None:
        np.add.at(self.count, self.owner[waves], 1)

    def leave(self, waves: np.ndarray) -> None:
        """Waves that ended: nobody waits for a party whose waves have all ended."""
        np.subtract.at(self.running, self.party[waves], 1)
        parties, first = np.unique(self.party[waves], return_index=True)
        ended = waves[first[self.running[parties] == 0]]
        np.subtract.at(self.need, self.owner[ended], 1)

    def open(self) -> bool:
        """Open where all have signalled; whether any did."""
        done = (self.count >= self.need) & (self.count > 0)
        self.opened[done] += 1
        self.count[done] = 0
        return bool(done.any())

    def may_pass(self, waves: np.ndarray) -> np.ndarray:
        """Which of ``waves`` the barrier lets through, now that they wait; they are through."""
        opened = self.opened[self.owner[waves]]
        free = opened > self.passed[waves]
        self.passed[waves[free]] = opened[free]
        return free


class Group:
    """Workgroups ``ids`` (linear, x fastest) that run side by side."""

    def __init__(self, grid: Grid, ids: np.ndarray) -> None:
        geometry = grid.geometry
        self.grid, self.ids, self.memory, self.stats = grid, ids, grid.memory, grid.stats
        self.rng = grid.rng
        self.threads_each = int(np.prod(geometry.block))
        self.waves_each = -(-self.threads_each // grid.width)
        self.lds = Bank("LDS", len(ids), grid.lds_bytes, grid.options.poison)
        waves = np.arange(len(ids) * self.waves_each)
        workgroup = waves // self.waves_each
        cluster = np.unique(grid.cluster_of(ids)[0], return_inverse=True)[1][workgroup]
        self.barriers = {WORKGROUP: Barrier(workgroup, waves), CLUSTER: Barrier(cluster, workgroup)}
        if self.rng is None:
            parts = [waves]
        else:
            order = self.rng.permuted(waves.reshape(len(ids), self.waves_each), axis=1)
            place = grid.cluster_of(ids)[1]
            parts = [
                order[place == p, slot] for p in np.unique(place) for slot in range(order.shape[1])
            ]
        self.batches = [Runner(self, part) for part in parts]


class Runner(Batch):
    """A batch with its program counters."""

    def __init__(self, group: Group, waves: np.ndarray) -> None:
        grid = group.grid
        super().__init__(group, waves, grid.width, list(grid.code.template))
        self.code = grid.code
        self.pending: dict[int, np.ndarray] = {0: self.alive.copy()}
        self.waiting = np.zeros(self.count, np.int64)  # the barrier id a wave waits at, or 0
        self.asleep = np.zeros(self.count, bool)
        self.suspended = False
        for slot, value in zip(self.code.function.blocks[0].params, grid.arguments, strict=True):
            self.v[slot] = value

    def run(self) -> Iterator[str]:
        """Execute until all lanes have returned; yields why it cannot go on at once."""
        steps = 0
        while self.pending:
            chosen = self._choose()
            if chosen is None:
                slept = bool(self.asleep.any())
                self.asleep[:] = False
                self._refresh()
                steps = 0
                yield "spin" if slept else "barrier"
                continue
            index, mask = chosen
            self._execute(self.code.segments[index], mask)
            steps += 1
            if self.group.rng is not None and self.group.rng.random() < PREEMPT:
                yield "turn"
            if steps >= SLICE:
                self.asleep |= mask.reshape(self.count, self.width).any(axis=1)
                self.suspended, steps = True, 0
        self.copies.finish()

    def _refresh(self) -> None:
        for number in np.unique(self.waiting[self.waiting != 0]):
            waves = np.flatnonzero(self.waiting == number)
            done = self.group.barriers[int(number)].may_pass(self.waves[waves])
            self.waiting[waves[done]] = 0
        self.suspended = bool(self.asleep.any() or self.waiting.any())

    def _choose(self) -> tuple[int, np.ndarray] | None:
        """The first segment, in loop order, that a wave may run, and the lanes that run it."""
        if not self.suspended:
            index = min(self.pending)
            return index, self.pending.pop(index)
        self._refresh()
        free = ~(self.asleep | (self.waiting != 0))
        lanes = np.repeat(free, self.width)
        for index in sorted(self.pending):
            mask = self.pending[index]
            chosen = mask & lanes
            if chosen.any():
                rest = mask & ~lanes
                if rest.any():
                    self.pending[index] = rest
                else:
                    del self.pending[index]
                return index, chosen
        return None

    def _execute(self, segment: Segment, mask: np.ndarray) -> None:
        v = self.v
        self.set_mask(None if mask.all() else mask)
        self.group.grid.idle += 1
        self.copies.wander()
        saved = None if self.mask is None else [(slot, v[slot]) for slot in segment.live_out]
        op = None
        try:
            with np.errstate(all="ignore"):
                for op in segment.ops:
                    op(v, self)
                if saved:
                    for slot, old in saved:
                        v[slot] = pick(mask, v[slot], old)
                segment.executed += self.count if self.mask is None else self.active_waves().sum()
                op = None
                self._end(segment, mask)
        except EmulationError:
            raise
        except Exception as error:
            inst = segment.end_inst if op is None else segment.insts[segment.ops.index(op)]
            raise self._explain(error, inst) from error

    def _explain(self, error: Exception, inst) -> EmulationError:
        lane = error.lane if isinstance(error, MemoryFault) else None
        where = ""
        if lane is not None:
            wave = self.waves[lane // self.width]
            workgroup = self.group.grid.workgroup(self.group.ids[self.owner[lane]])
            where = (
                f"\n  workgroup {workgroup}, wave {wave % self.group.waves_each}, "
                f"lane {lane % self.width}"
            )
        kind = "" if isinstance(error, MemoryFault) else f"{type(error).__name__}: "
        return EmulationError(
            f"{self.code.function.name}: {inst.name}: {kind}{error}{where}\n  at {inst.where}"
        )

    def _end(self, segment: Segment, mask: np.ndarray) -> None:
        kind, *detail = segment.end
        if kind == "br":
            self._go(detail[0], mask)
        elif kind == "cond":
            slot, yes, no = detail
            self._branch(self.v[slot], yes, no, mask)
        elif kind == "return":
            self._exit(mask)
        elif kind == "switch":
            slot, values, edges = detail
            left = mask
            value = self.v[slot]
            for number, target in zip(values, edges[1:], strict=True):
                taken = left & (value == number)
                left = left & ~taken
                self._go(target, taken)
            self._go(edges[0], left)
        elif kind in ("barrier", "signal", "wait", "sleep"):
            self._suspend(kind, detail, mask)
        else:
            raise RuntimeError(f"reached {kind}")

    def _branch(self, condition: np.ndarray, yes: tuple, no: tuple, mask: np.ndarray) -> None:
        if len(condition) == 1:
            self._go(yes if condition[0] else no, mask)
            return
        taken = mask & condition
        other = mask & ~condition
        if not other.any():
            self._go(yes, mask)
        elif not taken.any():
            self._go(no, mask)
        else:
            self._go(yes, taken)
            self._go(no, other)

    def _go(self, edge: tuple, mask: np.ndarray) -> None:
        target, moves = edge
        if moves:
            v = self.v
            values = [v[source] for source, _ in moves]
            everyone = self.mask is None and mask.all()
            for (_, slot), value in zip(moves, values, strict=True):
                v[slot] = value if everyone else pick(mask, value, v[slot])
        if not mask.any():
            return
        waiting = self.pending.get(target)
        self.pending[target] = mask if waiting is None else waiting | mask

    def _waves(self, mask: np.ndarray) -> np.ndarray:
        return np.flatnonzero(mask.reshape(self.count, self.width).any(axis=1))

    def _suspend(self, kind: str, detail: list, mask: np.ndarray) -> None:
        number, target = detail
        waiting = self.pending.get(target)
        self.pending[target] = mask.copy() if waiting is None else waiting | mask
        waves = self._waves(mask)
        if kind == "sleep":
            self.asleep[waves] = True
            self.suspended = True
            return
        barrier = self.group.barriers[number]
        if kind in ("barrier", "signal"):
            barrier.signal(self.waves[waves])
            self._open(barrier)
        if kind in ("barrier", "wait"):
            blocked = waves[~barrier.may_pass(self.waves[waves])]
            self.waiting[blocked] = number
            self.suspended |= bool(len(blocked))

    def _open(self, barrier: Barrier) -> None:
        if barrier.open():
            self.group.grid.changes += 1

    def _exit(self, mask: np.ndarray) -> None:
        before = self.alive.reshape(self.count, self.width).any(axis=1)
        self.alive &= ~mask
        after = self.alive.reshape(self.count, self.width).any(axis=1)
        ended = np.flatnonzero(before & ~after)
        for barrier in self.group.barriers.values():
            barrier.leave(self.waves[ended])
            self._open(barrier)
        self.group.grid.changes += 1

    def waits(self) -> list[str]:
        """For a deadlock report: what every unfinished wave is doing."""
        lines = []
        for index, mask in sorted(self.pending.items()):
            segment = self.code.segments[index]
            inst = segment.insts[0] if segment.insts else segment.end_inst
            for wave in self._waves(mask):
                number = self.waves[wave]
                workgroup = self.group.grid.workgroup(self.group.ids[self.wave_owner[wave]])
                who = f"workgroup {workgroup} wave {number % self.group.waves_each}"
                if self.waiting[wave]:
                    barrier = self.group.barriers[int(self.waiting[wave])]
                    owner = barrier.owner[number]
                    kind = "cluster" if self.waiting[wave] == CLUSTER else "workgroup"
                    arrived = f"{barrier.count[owner]} of {barrier.need[owner]} signals"
                    what = f"waits at a {kind} barrier that has {arrived}"
                else:
                    what = "spins"
                    if self.recent is not None:
                        source, at = self.recent
                        place = self.group.memory.describe(int(at[-1]))
                        what += f" on a load of {place}\n    loaded at {source}"
                lines.append(f"  {who} {what}\n    next operation at {inst.where}")
        return lines


class Grid:
    """One kernel launch. ``arguments`` are the kernel's, in order, as values."""

    def __init__(
        self,
        code: Code,
        arch: str,
        geometry: Geometry,
        arguments: list,
        memory: GlobalMemory,
        stats: KernelStats,
        options: Options,
        static_lds: int,
    ) -> None:
        self.code, self.arch, self.geometry, self.arguments = code, arch, geometry, arguments
        self.memory, self.stats, self.options = memory, stats, options
        self.width = 32 if arch.startswith("gfx12") else 64
        self.lds_bytes = static_lds + geometry.lds
        self.rng = np.random.default_rng(options.seed) if options.order == "random" else None
        self.changes, self.idle = 0, 0
        self._seen = -1
        self.active: list[tuple[Runner, Iterator[str]]] = []
        self._todo = self._groups()
        for size, have in zip(geometry.cluster, geometry.grid, strict=True):
            if have % size:
                raise EmulationError(
                    f"grid {geometry.grid} is not whole clusters of {geometry.cluster}"
                )

    def copies(self, batch: Batch):
        return make_copies(batch, self.rng)

    def workgroup(self, linear: int) -> tuple[int, int, int]:
        x, y, _ = self.geometry.grid
        return (int(linear % x), int(linear // x % y), int(linear // (x * y)))

    def cluster_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For workgroups, their cluster's linear number and their linear place within it."""
        grid, cluster = self.geometry.grid, self.geometry.cluster
        place = [ids % grid[0], ids // grid[0] % grid[1], ids // (grid[0] * grid[1])]
        outer, inner, width, inside = 0, 0, 1, 1
        for at, have, size in zip(place, grid, cluster, strict=True):
            outer = outer + at // size * width
            inner = inner + at % size * inside
            width, inside = width * (have // size), inside * size
        return outer, inner

    def _groups(self) -> Iterator[Group]:
        total = int(np.prod(self.geometry.grid))
        cluster = int(np.prod(self.geometry.cluster))
        waves = -(-int(np.prod(self.geometry.block)) // self.width)
        each = max(1, LANES // (waves * self.width * cluster)) * cluster
        ids = np.arange(total)
        if cluster > 1:
            outer, inner = self.cluster_of(ids)
            ids = np.lexsort((inner, outer))
        start = 0
        while start < total:
            size = each
            if self.rng is not None:  # fewer in lock-step: workgroups race each other too
                size = int(self.rng.integers(1, each // cluster + 1)) * cluster
            yield Group(self, ids[start : start + size])
            start += size

    def rounds(self) -> Iterator[None]:
        """Run the grid; yields after every active batch had a turn."""
        more = True
        while more or self.active:
            if more:
                group = next(self._todo, None)
                more = group is not None
                if group is not None:
                    self.active += [(b, b.run()) for b in group.batches]
            spinning = False
            while self.active:
                spinning = self._round()
                if self.active and (spinning or self._begin_more()):
                    yield
                if spinning:
                    break

    def _begin_more(self) -> bool:
        return self.rng is not None and self.rng.random() < 0.25

    def _round(self) -> bool:
        """Give every active batch a turn; whether one of them spins."""
        turns = list(self.active)
        if self.rng is not None:
            self.rng.shuffle(turns)
        spinning, blocked = False, True
        for batch, steps in turns:
            before = self.idle
            state = next(steps, None)
            if state is None:
                self.active.remove((batch, steps))
            spinning |= state == "spin"
            blocked &= state == "barrier" and self.idle == before
        if blocked and turns:
            spinning = True
            self.idle += 1000
        return spinning

    def stuck(self) -> bool:
        """Whether nothing has changed for too long; call it once a round."""
        changes = self.changes + self.memory.changes
        if changes != self._seen:
            self._seen, self.idle = changes, 0
        return self.idle > self.options.spin_limit

    def report(self) -> list[str]:
        lines = [f"{self.code.function.name}: no progress"]
        for batch, _ in self.active:
            lines += batch.waits()
        return lines[:40] + (["  ..."] if len(lines) > 40 else [])
