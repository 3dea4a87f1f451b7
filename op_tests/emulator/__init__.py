"""A CPU emulator for lowered FlyDSL kernels.

    from op_tests.emulator import emulated
    with emulated("gfx950", order="random", seed=1, poison=True) as emu:
        launcher(...)                  # any FlyDSL launcher, on CPU tensors
        _run_compiled(launcher, ...)   # the project's own launch path

It interprets, with numpy, the module FlyDSL has lowered to the LLVM and ROCDL dialects, so layouts
and addresses are those of the real kernel. From the entry inwards:

    session    ``emulated``: what a launch is            lowering   FlyDSL's private parts
    scheduler  groups, batches, barriers, deadlocks      copies     asynchronous copies and waits
    machine    lanes, masks and their memory accesses    memory     tensors, LDS, bounds, poison
    code       operations decoded to closures            program    the module as plain data
    ops_*      the operations, one concern a file        formats    low precision floats

It shows wrong numbers, wild and unwritten accesses, missing barriers and waits, and deadlocks. It
cannot show what LLVM makes of the module: registers, hazards, the exact order of float sums, or
one-ulp differences of native functions. What the compiler's own wait insertion would mend (a
register load used too early) cannot go wrong here; a copy to LDS that nothing waits for does.

``emulated`` and ``EmulationError`` are what tests import; everything else is internal.
"""

from .code import EmulationError
from .session import Emulator, emulated

__all__ = ["EmulationError", "Emulator", "emulated"]
