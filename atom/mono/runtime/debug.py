"""Who is missing: the waits that debug builds gave up, in words.

Without debug a wait that nobody satisfies does not end, and tells nothing. A debug build gives up,
leaves a record (`atom.mono.device.sync`) and lets the step end, whose numbers are then garbage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from atom.mono.device.sync import DIAG_BYTES, WaitRecord, wait_records


class WaitGivenUp(RuntimeError):
    """Waits of a step were given up; its results are garbage. `missing` are the absent ranks."""

    def __init__(self, message: str, missing: frozenset[int]) -> None:
        super().__init__(message)
        self.missing = missing


def diag_buffer(device: torch.device) -> torch.Tensor:
    """Room for a step's wait records, int32 words."""
    return torch.zeros(DIAG_BYTES // 4, dtype=torch.int32, device=device)


def given_up_waits(diag: torch.Tensor) -> list[WaitRecord]:
    """The records that kernels have left since `diag` was zeroed. Waits for the device."""
    return wait_records(diag.tolist())


def region_namer(layers: Iterable[str]) -> Mapping[int, str]:
    """What the tag of a mailbox word says: which layer wrote it. Tag 0 is an empty word."""
    return {0: "nothing", **dict(enumerate(layers, 1))}


def raise_if_given_up(
    diag: torch.Tensor, missing: Mapping[int, int], tags: Mapping[int, str]
) -> None:
    """Raise WaitGivenUp if ranks were `missing` at the start of the step or waits were given up.

    `missing` is what `StepMailboxes.missing_ranks` says, `tags` what `region_namer` made. Empties
    `diag`, so that the next step starts anew.
    """
    records = given_up_waits(diag)
    if not records and not missing:
        return
    given_up = int(diag[0])
    diag.zero_()
    lines = [
        f"rank {rank} did not come to the step, it was last seen at step {epoch}"
        for rank, epoch in missing.items()
    ]
    lines += [_line(record, tags) for record in records]
    if given_up > len(records):
        lines.append(f"and {given_up - len(records)} more waits")
    absent = {record.rank for record in records if record.rank is not None} | set(missing)
    raise WaitGivenUp("waits were given up:\n  " + "\n  ".join(lines), frozenset(absent))


def _line(record: WaitRecord, tags: Mapping[int, str]) -> str:
    layer = tags.get(record.wanted, f"tag {record.wanted}")
    held = tags.get(record.found, f"tag {record.found}")
    whose = "this rank" if record.rank is None else f"rank {record.rank}"
    return f"{layer}: {record.region}[{record.word}] of {whose} did not come; it holds {held}"
