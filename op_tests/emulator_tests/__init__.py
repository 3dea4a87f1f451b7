"""Tests of the emulator itself: operations against scalar references, and kernels broken on purpose."""
