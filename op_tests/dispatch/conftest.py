"""The fixture that runs this folder's scenarios against the recording driver."""

from op_tests.hip_stub import hip_stub

__all__ = ["hip_stub"]
