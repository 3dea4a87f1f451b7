"""One build a width, on every rank or on none.

A width is the number of rows (tokens) of a step. Its kernels are built, compiled and inspected the
first time it is wanted, and what comes of that is final: a width that was refused stays refused,
because ranks that tried again at different times would wait for each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from .compile import Pairs, compile_kernels, residency_problems
from .consensus import Group, MonoUnsupported, tp_agree

logger = logging.getLogger(__name__)

B = TypeVar("B")

# Runners share launchers: two threads that built one at once would have an object each, and what
# the first launch retains is on the object.
_building = threading.Lock()


class WidthBuilds(Generic[B]):
    """Builds by width.

    `build(rows)` makes a width's launchers, `kernels` lists those of a build with their ABIs, and
    `what` names them in the log.
    """

    def __init__(
        self,
        build: Callable[[int], B],
        kernels: Callable[[B], Pairs],
        group: Group,
        what: str,
    ) -> None:
        self._build, self._kernels = build, kernels
        self._group, self._what = group, what
        self._built: dict[int, B] = {}
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self, rows: int) -> bool:
        """Whether width `rows` can run, after building it if nobody has tried. Collective.

        Launches nothing. Failures are logged: a build that raises, kernels whose grid would not be
        resident, and another rank's refusal.
        """
        with self._lock:
            if rows in self._built or rows in self._refused:
                return rows in self._built
            # Final already: a vote that raises must not be repeated by this rank alone.
            self._refused.add(rows)
            built = self._try(rows)
            agreed = tp_agree(built is not None, self._group)
            if built is not None and not agreed:
                logger.warning("%s: width %d is refused by another rank", self._what, rows)
            if built is None or not agreed:
                return False
            self._refused.discard(rows)
            self._built[rows] = built
            return True

    def _try(self, rows: int) -> B | None:
        try:
            with _building:
                built = self._build(rows)
                launchers = compile_kernels(self._kernels(built))
            problems = [line for launcher in launchers for line in residency_problems(launcher)]
        except Exception:
            logger.exception("%s: width %d cannot be built", self._what, rows)
            return None
        if problems:
            logger.warning("%s: width %d is refused: %s", self._what, rows, "; ".join(problems))
            return None
        return built

    @property
    def built(self) -> list[B]:
        """The builds there are."""
        return list(self._built.values())

    def __contains__(self, rows: int) -> bool:
        return rows in self._built

    def __getitem__(self, rows: int) -> B:
        """The build of width `rows`. Raises MonoUnsupported unless `prepare` said it can run."""
        try:
            return self._built[rows]
        except KeyError:
            state = "was refused" if rows in self._refused else "is not prepared"
            raise MonoUnsupported(f"{self._what}: width {rows} {state}") from None
