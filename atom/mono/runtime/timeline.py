"""Where a step's time goes: when the workgroups of each launch entered each stage.

    timeline = LayerTimeline(launches, blocks, device)   # launch i is given timeline.address(i)
    ...                                                  # a step of a timeline build
    for span in timeline.spans(): ...
    timeline.write_chrome_trace(Path("step.json"))       # for chrome://tracing or Perfetto

A launch overwrites its stamps, so what is read is the last step that ran.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from atom.mono.device.stamps import MARKS, TICKS_PER_US, stamps_bytes


@dataclass(frozen=True)
class Launched:
    """A launch of a step: what to call it, and its stages in order."""

    name: str
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Span:
    """A stage of a launch, in microseconds since the first workgroup of the step.

    `first` is when the first workgroup entered it and `end` when the last left it; `busy` is the
    mean over workgroups of the time between.
    """

    launch: str
    stage: str
    first: float
    end: float
    busy: float


class LayerTimeline:
    """The stamps of a step's launches on `blocks` workgroups each."""

    def __init__(self, launches: Sequence[Launched], blocks: int, device: torch.device) -> None:
        self.launches = tuple(launches)
        for launch in self.launches:
            if len(launch.stages) >= MARKS:
                raise ValueError(f"{launch.name}: {len(launch.stages)} stages, at most {MARKS - 1}")
        self._stride = stamps_bytes(blocks)
        self.stamps = torch.zeros(
            len(self.launches), MARKS, blocks, dtype=torch.int64, device=device
        )

    def address(self, launch: int) -> int:
        """Where launch number `launch` leaves its stamps."""
        return self.stamps.data_ptr() + launch * self._stride

    def spans(self) -> list[Span]:
        """Every stage of the last step, in order. Waits for the device.

        Raises RuntimeError when some launch has left no stamps yet.
        """
        ticks = self.stamps.cpu()
        silent = [
            launch.name
            for launch, rows in zip(self.launches, ticks, strict=True)
            if bool((rows[: len(launch.stages) + 1] == 0).any())
        ]
        if silent:
            raise RuntimeError(f"no step has run: {', '.join(silent[:3])} left no stamps")
        began = min(int(rows[0].min()) for rows in ticks)
        at = lambda tick: (float(tick) - began) / TICKS_PER_US
        return [
            Span(
                launch.name,
                stage,
                first=at(rows[number].min()),
                end=at(rows[number + 1].max()),
                busy=float((rows[number + 1] - rows[number]).double().mean()) / TICKS_PER_US,
            )
            for launch, rows in zip(self.launches, ticks, strict=True)
            for number, stage in enumerate(launch.stages)
        ]

    def write_chrome_trace(self, path: Path) -> None:
        """The last step as a Chrome trace: a row for each workgroup, a box for each stage."""
        self.spans()
        ticks = self.stamps.tolist()
        began = min(min(rows[0]) for rows in ticks)
        events = [
            {
                "name": stage,
                "cat": launch.name,
                "ph": "X",
                "pid": 0,
                "tid": block,
                "ts": (start - began) / TICKS_PER_US,
                "dur": (rows[number + 1][block] - start) / TICKS_PER_US,
                "args": {"launch": launch.name},
            }
            for launch, rows in zip(self.launches, ticks, strict=True)
            for number, stage in enumerate(launch.stages)
            for block, start in enumerate(rows[number])
        ]
        path.write_text(json.dumps({"traceEvents": events}))
