"""The persistent grid that every layer kernel runs on, and how a stage's tasks fall on it.

One workgroup a compute unit, all of them resident at once: stages hand over by polling memory, so
a workgroup that is not running while another waits for it would never be waited out. A stage is a
table of `count` tasks; workgroup `b` does tasks b, b + blocks, b + 2 * blocks, ...

`blocks` is a parameter everywhere because tests emulate small grids; a device always has `BLOCKS`.
"""

from __future__ import annotations

BLOCKS = 256
THREADS = 512
LANES = 64
WAVES = THREADS // LANES


def rounds(tasks: int, blocks: int) -> int:
    """How many tasks of a stage's table the busiest of `blocks` workgroups has."""
    return ceil_div(tasks, blocks)


def ceil_div(count: int, by: int) -> int:
    """count / by rounded up, for count >= 0 and by > 0."""
    return -(-count // by)


def round_up(count: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `count`."""
    return ceil_div(count, to) * to
