"""What check mode compares: the ranks' results of a step.

Every rank sums the same parts in the same order, so results are equal to the last bit or something
is wrong: weights that are not shards of one model, a lost write, a rank on another step.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from .consensus import Group


class ResultsDiffer(RuntimeError):
    """A step's results are not numbers, or are not the same on every rank."""


def require_same_on_all_ranks(result: torch.Tensor, group: Group, what: str) -> None:
    """Raise ResultsDiffer, on every rank, unless `result` is finite and has the same bits on all.

    Collective over `group`; waits for the device. Ranks are compared with the first of the
    majority; `what` names the result.
    """
    cells = result.detach().cpu().contiguous()
    wrong = int((~cells.float().isfinite()).sum())
    own = (hashlib.sha256(cells.view(torch.uint8).numpy()).hexdigest(), wrong)
    every: list[Any] = [own]
    if group is not None:
        every = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, own, group=group)
    lines = [
        f"rank {rank} has {count} elements that are no numbers"
        for rank, (_, count) in enumerate(every)
        if count
    ]
    digests = [digest for digest, _ in every]
    usual = max(digests, key=digests.count)
    differing = [rank for rank, digest in enumerate(digests) if digest != usual]
    if differing:
        first = digests.index(usual)
        lines.append(f"ranks {differing} do not have the bits of rank {first}")
    if lines:
        raise ResultsDiffer(f"{what}: " + "; ".join(lines))
