"""Loads every module that registers operations."""

from . import (  # noqa: F401
    ops_arith,
    ops_call,
    ops_convert,
    ops_host,
    ops_lanes,
    ops_matrix,
    ops_memory,
    ops_struct,
    ops_sync,
    ops_tensor,
    ops_transpose,
    ops_wmma,
)
