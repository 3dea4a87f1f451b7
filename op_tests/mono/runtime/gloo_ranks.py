"""What each process of a group does in `test_consensus`: one line of a dictionary a scenario."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from atom.mono.runtime.compare import ResultsDiffer, require_same_on_all_ranks
from atom.mono.runtime.consensus import MonoUnsupported, bind_agreed, tp_agree, tp_same
from atom.mono.runtime.peer_memory import HipIpcAllocator
from op_tests.mono.runtime.fake_hip import FakeHip


def _outcome(bind: Any, group: Any) -> str:
    try:
        return f"bound {bind_agreed(bind, group)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _refuse() -> None:
    raise MonoUnsupported("this rank has no scales")


def _crash() -> None:
    raise KeyError("qkv_w")


def _addresses(group: Any, hip: FakeHip, nbytes: int) -> str | list[str]:
    """Of each rank's memory: that it is this rank's own, or a peer's as opened here."""
    try:
        addresses = HipIpcAllocator(group, hip).allocate(nbytes)
    except MonoUnsupported as error:
        return f"{error}; freed {hip.calls.count('hipFree')}, closed {len(hip.closed)}"
    opened = [address >= hip.opened_at for address in addresses]
    HipIpcAllocator(group, hip).release(addresses)
    assert (hip.calls.count("hipFree"), len(hip.closed)) == (1, len(addresses) - 1)
    return ["peer's" if is_opened else "own" for is_opened in opened]


def _compared(result: torch.Tensor, group: Any) -> str:
    try:
        require_same_on_all_ranks(result, group, "step")
    except ResultsDiffer as error:
        return str(error)
    return "one"


def rank_main(rank: int, ranks: int, folder: str, results: Any) -> None:
    """Vote in every scenario over a real gloo group and put (rank, answers) into `results`."""
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    # Ranks that no longer vote on the same things fail instead of waiting for each other.
    patience = timedelta(seconds=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    group = dist.group.WORLD
    last = rank == ranks - 1
    results.put(
        (
            rank,
            {
                "all agree": tp_agree(True, group),
                "last disagrees": tp_agree(not last, group),
                "none agrees": tp_agree(False, group),
                "same": tp_same("key", group),
                "last differs": tp_same("other" if last else "key", group),
                "bound": _outcome(lambda: rank, group),
                "last refuses": _outcome(_refuse if last else lambda: rank, group),
                "last crashes": _outcome(_crash if last else lambda: rank, group),
                "memory": _addresses(group, FakeHip(), 64),
                "last has other sizes": _addresses(group, FakeHip(), 32 if last else 64),
                "last cannot allocate": _addresses(
                    group, FakeHip("hipExtMallocWithFlags" if last else ""), 64
                ),
                "last cannot open": _addresses(
                    group, FakeHip("hipIpcOpenMemHandle" if last else ""), 64
                ),
                "results are one": _compared(torch.ones(4), group),
                "last result differs": _compared(torch.ones(4) + last * 2**-20, group),
                "last result is NaN": _compared(torch.ones(4) / (not last), group),
                "still in step": tp_agree(True, group),
            },
        )
    )
    dist.destroy_process_group()
