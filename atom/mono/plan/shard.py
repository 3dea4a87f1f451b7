"""A rank's part of a dimension under tensor parallelism."""

from __future__ import annotations


def shard(total: int, ranks: int, rank: int, what: str = "dimension") -> range:
    """The indices of `total` that `rank` of `ranks` holds: equal, consecutive parts.

    Raises ValueError, naming `what`, when the parts would not be equal.
    """
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}")
    if total % ranks:
        raise ValueError(f"{what}: {total} cannot be divided equally among {ranks} ranks")
    size = total // ranks
    return range(rank * size, (rank + 1) * size)
