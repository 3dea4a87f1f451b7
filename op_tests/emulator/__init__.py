"""A CPU emulator for lowered FlyDSL kernels.

    from op_tests.emulator import emulated
    with emulated("gfx950") as emu:
        launcher(...)            # a FlyDSL launcher on CPU tensors

``emulated`` and ``EmulationError`` are what tests import; everything else is internal.
"""

from .code import EmulationError
from .session import Emulator, emulated

__all__ = ["EmulationError", "Emulator", "emulated"]
