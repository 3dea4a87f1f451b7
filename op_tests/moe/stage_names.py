"""Kernel names that between them reach every tile, flavour and parameter of the MX stages."""

from __future__ import annotations

from flydsl.compiler.jit_function import JitFunction

from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import KernelName, Moe1Name, parse
from aiter.ops.flydsl.kernels.moe_stage1 import build_stage1
from aiter.ops.flydsl.kernels.moe_stage2 import build_stage2
from aiter.ops.flydsl.moe.request import BF16, FP4, FP8, CallerVariant, MoeRequest, Policy
from aiter.ops.flydsl.moe.stages import stage1_key, stage2_key
from op_tests.moe.cases import GFX950

_A4W4, _A8W4, _A8W8 = "afp4_wfp4_bf16", "afp8_wfp4_bf16", "afp8_wfp8_bf16"
_A16W4 = "abf16_wfp4_bf16"

# (name, model_dim, inter_dim, sort block)
NAMES = [
    *(
        (f"flydsl_moe1_{_A4W4}_t{m}x{n}x{k}_fp4", 6144, inter, m)
        for m, n, k, inter in (
            (16, 128, 256, 512),
            (32, 32, 256, 384),
            (32, 128, 128, 512),
            (64, 64, 256, 512),
            (64, 128, 128, 512),
            (128, 64, 256, 512),
            (128, 128, 256, 768),
            (128, 256, 256, 512),
        )
    ),
    *(
        (f"flydsl_moe1_{_A8W4}_t{m}x{n}x256_gui_fp8", 7168, 512, m)
        for m, n in ((16, 128), (32, 64), (64, 128), (64, 256), (128, 128), (128, 256))
    ),
    *(
        (f"flydsl_moe1_{_A16W4}_t{m}x{n}x{k}", 3584, 512, m)
        for m, n, k in (
            (16, 64, 128),
            (16, 128, 256),
            (32, 32, 256),
            (32, 128, 256),
            (64, 128, 128),
            (64, 128, 256),
            (64, 256, 256),
            (128, 64, 256),
            (128, 128, 128),
            (128, 256, 256),
        )
    ),
    (f"flydsl_moe1_{_A16W4}_t128x128x256_gui", 3072, 3072, 128),
    (f"flydsl_moe1_{_A16W4}_t32x64x256_w3_kw2", 3584, 512, 32),
    (f"flydsl_moe1_{_A16W4}_t32x32x128_w4_kw4", 3584, 384, 32),
    (f"flydsl_moe1_{_A4W4}_t32x64x256_kb4_bnt0_go_xcd4_fp4", 6144, 384, 32),
    (f"flydsl_moe1_{_A8W4}_t32x64x256_w2_gui_xcd4_kw4_fp8", 7168, 512, 32),
    (f"flydsl_moe1_{_A8W8}_t128x128x256_gui", 6144, 512, 128),
    (f"flydsl_moe1_{_A8W8}_t64x256x256_gui_fp8", 6144, 512, 64),
    *(
        (f"flydsl_moe2_{flavour}_t{m}x{n}x{k}_{epilogue}_xcd4", 7168, 3072, 128)
        for flavour, epilogue in ((_A4W4, "reduce"), (_A8W4, "atomic"), (_A16W4, "atomic"))
        for m, n, k in (
            (16, 128, 256),
            (32, 128, 128),
            (32, 256, 256),
            (64, 128, 256),
            (128, 128, 128),
            (128, 128, 256),
            (128, 256, 256),
        )
    ),
    (f"flydsl_moe2_layout_{_A8W8}_t128x128x256_reduce", 6144, 768, 128),
    (f"flydsl_moe2_layout_{_A8W8}_t64x256x256_atomic", 6144, 512, 64),
]

_DTYPES = {"bf16": BF16, "fp4": FP4, "fp8": FP8}


def request_for(name: KernelName, model_dim: int, inter_dim: int) -> MoeRequest:
    """A request that `name` serves, with every option that adds code to it."""
    mode = GateMode.SEPARATED
    if isinstance(name, Moe1Name) and name.gate_mode == GateMode.INTERLEAVE:
        mode = GateMode.INTERLEAVE
    return MoeRequest(
        target=GFX950,
        policy=Policy(False, True, False),
        tokens=1,
        model_dim=model_dim,
        inter_dim=inter_dim,
        experts=128,
        topk=8,
        dtype="bfloat16",
        a_dtype=_DTYPES[name.a_dtype],
        w_dtype=_DTYPES[name.w_dtype],
        activation=ActivationType.Situv2,
        quant_type=QuantType.per_1x32,
        use_g1u1=True,
        doweight_stage1=False,
        shuffled=True,
        caller=CallerVariant(mode, bias="both"),
    )


def launchers_of(text: str, model_dim: int, inter_dim: int, block_m: int) -> list[JitFunction]:
    """The launcher of the named stage."""
    name = parse(text)
    request = request_for(name, model_dim, inter_dim)
    if isinstance(name, Moe1Name):
        return [build_stage1(stage1_key(request, name, block_m))]
    return [build_stage2(stage2_key(request, name, block_m))]
