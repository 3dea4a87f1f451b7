"""A HIP driver that runs nothing and records everything, for tests of the launch path.

    from op_tests.hip_stub import Driver, hip_stub  # noqa: F401  (the fixture)

    def launches_once(driver: Driver) -> list[Launched]:     # runs in a process with the stub
        _run_compiled(launcher, 0x1000, None)
        return driver.launches()

    def test_it(hip_stub):
        (launch,) = hip_stub.run(launches_once)

The driver must be in a process before FlyDSL's runtime is, so tests run functions of theirs in
child processes; see `server`. `build` makes the library with gcc, `driver` is its Python side.
"""

from .build import StubError, build
from .driver import Driver, Launched
from .fixture import HipStub, ScenarioError, hip_stub

__all__ = ["Driver", "HipStub", "Launched", "ScenarioError", "StubError", "build", "hip_stub"]
