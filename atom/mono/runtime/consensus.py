"""Agreement of the ranks: a mono kernel runs on all of them or on none.

A rank that took another path would leave the others polling for its part, so every decision that
could differ between ranks is voted on over a CPU (gloo) group. Votes are collective: all ranks
make the same calls in the same order, and a rank that failed votes too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Group = dist.ProcessGroup | None


class MonoUnsupported(RuntimeError):
    """Mono kernels cannot serve this; the message says why. The caller takes its other path."""


def tp_agree(ok: bool, group: Group) -> bool:
    """Whether `ok` on every rank of `group`. None is a single rank, which agrees with itself."""
    if group is None:
        return ok
    vote = torch.tensor([int(ok)], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


def tp_same(text: str, group: Group) -> bool:
    """Whether `text` is the same on every rank of `group`."""
    if group is None:
        return True
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], dtype=torch.int64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    return extremes[0].item() == -extremes[1].item()


def bind_agreed(bind: Callable[[], T], group: Group) -> T:
    """`bind()`, once every rank's has succeeded.

    A rank's own exception is raised on that rank after the vote; the others raise MonoUnsupported.
    """
    try:
        result = bind()
    except Exception:
        # Not kept in a variable: the traceback would keep this frame, and with it the group.
        tp_agree(False, group)
        raise
    if not tp_agree(True, group):
        raise MonoUnsupported("another rank refused; its log says why")
    return result
