"""Tests of the emulator: operations against scalar references, kernels broken on purpose."""
