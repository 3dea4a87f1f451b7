"""Whether custom ops that return a number compute it under FakeTensorMode.

Such an op looks at shapes or at the machine, never at tensor data, so a replay may run it
although every tensor is fake. The switch lives in a module of its own, always imported by
its full name, so that there is one of it even if :mod:`torch_guard` is loaded twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


def host_scalar_ops_run() -> bool:
    """Whether a scalar op's implementation stands in for its fake."""
    return _depth > 0


@contextmanager
def run_host_scalar_ops_for_real() -> Iterator[None]:
    """Have scalar-returning ops compute their value, in every thread, until exit. Nests."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
