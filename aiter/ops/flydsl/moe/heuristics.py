"""The kernels of a request that no tuned row serves, as the names a tuned row would hold."""

from __future__ import annotations

from aiter.ops.flydsl.kernel_names import Moe1Name, Moe2Name

from .request import MoeRequest
from .stages import FORMAT

# Tokens below -> (rows of a tile and sort block, waves a SIMD, weights past the caches in
# stage 1, and in stage 2). Few tokens read every weight once; many share them in the caches.
_BY_TOKENS = (
    (2048, 32, 2, True, True),
    (4096, 64, 3, False, False),
    (16384, 128, 2, False, False),
)
_BEYOND = (64, 4, False, False)


def heuristic_names(request: MoeRequest) -> tuple[Moe1Name, Moe2Name]:
    """(stage 1, stage 2); the sort block is stage 1's tile_m."""
    tile_m, waves, stream1, stream2 = next(
        (choice[1:] for choice in _BY_TOKENS if request.tokens < choice[0]), _BEYOND
    )
    a_dtype, w_dtype = FORMAT[request.a_dtype], FORMAT[request.w_dtype]
    # 128 rows of 256 bf16 would leave a compute unit's LDS to a single workgroup.
    tile_k = 128 if a_dtype == "bf16" and tile_m == 128 else 256
    stage1 = Moe1Name(
        a_dtype=a_dtype,
        w_dtype=w_dtype,
        out_dtype="bf16",
        tile_m=tile_m,
        tile_n=128,
        tile_k=tile_k,
        waves_per_eu=waves,
        b_nt=2 if stream1 else 0,
        gate_mode=request.caller.gate_mode,
        requant=None if a_dtype == "bf16" else a_dtype,
    )
    stage2 = Moe2Name(
        a_dtype=a_dtype,
        w_dtype=w_dtype,
        out_dtype="bf16",
        tile_m=tile_m,
        tile_n=128,
        tile_k=tile_k if request.inter_dim % tile_k == 0 else 128,
        epilogue="atomic",
        b_nt=2 if stream2 else 0,
    )
    return stage1, stage2
