"""Kernel names and their values correspond one to one."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiter.ops.enum import GateMode
from aiter.ops.flydsl import kernel_names
from aiter.ops.flydsl.kernel_names import (
    GroupedName,
    ImplName,
    KernelNameError,
    Moe1Name,
    Moe2LayoutName,
    Moe2Name,
    MxmoeG1Name,
    MxmoeG2Name,
    backend_of,
    format_name,
    is_flydsl,
    parse,
)

EXAMPLES = {
    "flydsl_moe1_afp4_wfp4_bf16_t128x128x256": Moe1Name("fp4", "fp4", "bf16", 128, 128, 256),
    "flydsl_moe1_afp8_wfp4_bf16_t32x64x256_w4_bnt0_gui_xcd4_kw2_fp8": Moe1Name(
        "fp8",
        "fp4",
        "bf16",
        32,
        64,
        256,
        waves_per_eu=4,
        b_nt=0,
        gate_mode=GateMode.INTERLEAVE,
        xcd_swizzle=4,
        k_wave=2,
        requant="fp8",
    ),
    "flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w3_kb4_bnt0_go_xcd4_fp4": Moe1Name(
        "fp4",
        "fp4",
        "bf16",
        32,
        64,
        256,
        waves_per_eu=3,
        k_batch=4,
        b_nt=0,
        gate_mode=GateMode.MOCK_GATE_ONLY,
        xcd_swizzle=4,
        requant="fp4",
    ),
    "flydsl_moe2_abf16_wint4_bf16_t16x128x256_atomic": Moe2Name(
        "bf16", "int4", "bf16", 16, 128, 256, "atomic"
    ),
    "flydsl_moe2_afp8_wfp8_bf16_t64x128x256_reduce_bnt2_xcd4_persist_sbm128": Moe2Name(
        "fp8",
        "fp8",
        "bf16",
        64,
        128,
        256,
        "reduce",
        b_nt=2,
        xcd_swizzle=4,
        persist=True,
        sort_block_m=128,
    ),
    "flydsl_moe2_afp4_wfp4_bf16_t64x128x256_atomic_persist_async_w4_cumul3": Moe2Name(
        "fp4",
        "fp4",
        "bf16",
        64,
        128,
        256,
        "atomic",
        persist=True,
        async_copy=True,
        waves_per_eu=4,
        cu_num_mul=3,
    ),
    "flydsl_moe2_layout_afp4_wfp4_bf16_t64x256x128_reduce_sbm64_bf16lds_sp1601": Moe2LayoutName(
        "fp4",
        "fp4",
        "bf16",
        64,
        256,
        128,
        "reduce",
        sort_block_m=64,
        bf16_lds=True,
        spatial_partition=1601,
    ),
    "flydsl_mxmoe_g1_a4w4_16x256x256_f16in_nt": MxmoeG1Name(
        "fp4", 16, 256, 256, inline_quant=True, nt=True
    ),
    "flydsl_mxmoe_g2_a4w4_128x256x256": MxmoeG2Name("fp4", 128, 256, 256),
    "flydsl_mxmoe_g2_a4w4_32x256x256_atomic_nt": MxmoeG2Name(
        "fp4", 32, 256, 256, epilogue="atomic", nt=True
    ),
    "grouped_gemm1_fp4_gugu": GroupedName(1, "fp4", gugu=True),
    "impl__flydsl_bf16__tm64__free": ImplName("flydsl_bf16", "tm64__free"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_mean_what_they_say(name: str):
    assert parse(name) == EXAMPLES[name]
    assert format_name(EXAMPLES[name]) == name
    assert is_flydsl(name)
    assert backend_of(name) == "flydsl"


@pytest.mark.parametrize(
    ("name", "token", "problem"),
    [
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_zz", "zz", "unknown token"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_kw2_w2", "w2", "repeated or out of order"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w2_w2", "w2", "repeated or out of order"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_go_gui", "gui", "repeated or out of order"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w1", "w1", "the default is left out"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_w04", "w04", "unknown token"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x064x256", "t32x064x256", "t{M}x{N}x{K} is expected"),
        ("flydsl_moe1_afp5_wfp4_bf16_t32x64x256", "afp5", "a{bf16|fp4|fp8} is expected"),
        ("flydsl_moe1_afp4_wfp4_bf16", "", "ends where t{M}x{N}x{K} is expected"),
        ("flydsl_moe1_afp4_wfp4_bf16_t32x64x256_", "", "unknown token"),
        ("flydsl_moe2_afp4_wfp4_bf16_t32x64x256", "", "ends where atomic|reduce is expected"),
        ("flydsl_moe2_afp4_wfp4_bf16_t32x64x256_atomic_cumul3", "", "needs persist"),
        ("flydsl_moe2_layout_abf16_wfp4_bf16_t32x64x256_atomic", "abf16", "is expected"),
        ("flydsl_mxmoe_g2_a4w4_128x256x256_f4out_nt", "", "atomic epilogue only"),
        ("flydsl_mxmoe_g3_a4w4_128x256x256", "", "not a FlyDSL name"),
        ("impl__only", "only", "configuration after the second '__' is missing"),
        ("impl____x", "impl____x", "words joined by single underscores"),
        ("opus_moe1_afp8_wfp4_bf16_t32x384", "", "not a FlyDSL name"),
        ("", "", "not a FlyDSL name"),
    ],
)
def test_other_text_is_refused_with_the_token_and_its_place(name: str, token: str, problem: str):
    with pytest.raises(KernelNameError) as error:
        parse(name)
    assert problem in str(error.value)
    assert repr(name) in str(error.value)
    assert error.value.token == token
    assert name[error.value.position :].startswith(token) or name == "impl____x"


def test_values_that_no_name_stands_for_are_refused():
    good = EXAMPLES["flydsl_moe1_afp4_wfp4_bf16_t128x128x256"]
    for change in (
        {"tile_m": 0},
        {"a_dtype": "fp6"},
        {"requant": "fp6"},
        {"waves_per_eu": -1},
        {"b_nt": 1},
    ):
        with pytest.raises(KernelNameError):
            format_name(dataclasses.replace(good, **change))


# ---------------------------------------------------------------- round trip over the grammar

_count = st.integers(1, 4096)
_VALUES = {
    "a_dtype": st.sampled_from(["bf16", "fp4", "fp8"]),
    "w_dtype": st.sampled_from(["fp4", "fp8", "int4"]),
    "out_dtype": st.just("bf16"),
    "b_nt": st.sampled_from([0, 2]),
    "gate_mode": st.sampled_from(GateMode),
    "requant": st.sampled_from([None, "fp4", "fp8"]),
    "sort_block_m": st.none() | _count,
    "epilogue": st.sampled_from(["atomic", "reduce", "f4out", "cshuffle", "nonatomic"]),
    "stage": st.sampled_from([1, 2]),
    "xcd_swizzle": st.integers(0, 64),
    "spatial_partition": st.integers(0, 9999),
    **dict.fromkeys(["tile_m", "tile_n", "tile_k"], _count),
    **dict.fromkeys(["waves_per_eu", "k_batch", "k_wave", "cu_num_mul"], _count),
    **dict.fromkeys(
        ["persist", "async_copy", "nt", "bf16_lds", "inline_quant", "gugu"], st.booleans()
    ),
}


@st.composite
def _kernels(draw: st.DrawFn) -> kernel_names.KernelName:
    family = draw(st.sampled_from(kernel_names.FAMILIES))
    values = {field.name: draw(_VALUES[field.name]) for field in dataclasses.fields(family)}
    if "persist" in values and not values["persist"] and "cu_num_mul" in values:
        values["cu_num_mul"] = 1
    if family is MxmoeG2Name and values["nt"]:
        values["epilogue"] = "atomic"
    return family(**values)


def _in_grammar(kernel: kernel_names.KernelName) -> bool:
    """Families differ in the types and epilogues they know; the strategy draws from all."""
    values = vars(kernel)
    if isinstance(kernel, (Moe2Name, Moe2LayoutName)) and kernel.epilogue not in (
        "atomic",
        "reduce",
    ):
        return False
    if isinstance(kernel, MxmoeG2Name) and kernel.epilogue == "reduce":
        return False
    if (
        isinstance(kernel, (Moe2LayoutName, MxmoeG1Name, MxmoeG2Name))
        and values["a_dtype"] == "bf16"
    ):
        return False
    return not (isinstance(kernel, (Moe2LayoutName, GroupedName)) and values["w_dtype"] == "int4")


@given(_kernels())
def test_every_value_has_a_name_that_parses_back_or_is_refused(kernel: kernel_names.KernelName):
    if _in_grammar(kernel):
        assert parse(format_name(kernel)) == kernel
    else:
        with pytest.raises(KernelNameError):
            format_name(kernel)


_WORDS = """
    afp4 afp8 wfp4 bf16 t32x64x256 w4 w1 kb4 bnt0 bnt2 go gui xcd4 kw2 fp4 fp8 sbm64 atomic reduce
    persist async cumul3 nt sp801 bf16lds a4w4 16x256x256 f16in f4out cshuffle gemm1 gugu
"""
_words = st.sampled_from(_WORDS.split())


@given(
    st.sampled_from([family.PREFIX for family in kernel_names.FAMILIES]),
    st.lists(_words, max_size=9),
)
def test_any_text_that_parses_is_its_own_canonical_name(prefix: str, words: list[str]):
    name = "_".join([prefix, *words])
    try:
        kernel = parse(name)
    except KernelNameError:
        return
    assert format_name(kernel) == name


# ---------------------------------------------------------------- whose kernel it is


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("", "none"),
        (" Null ", "none"),
        ("nan", "none"),
        ("moe_ck2stages_gemm1_256x128x128x128_1x4_silu_FP4X2_FP4X2_B16", "ck"),
        ("cktile_a8w4_bm32", "cktile"),
        ("swiglu_mxfp4_bf16_cktile", "cktile"),
        ("opus_moe1_afp8_wfp4_bf16_t32x384_gs_qgb6_stream_k8_fp8", "opus"),
        ("opus_moe2_afp8_wfp4_fp8_t32x256x256_sbm32_occ4_rbn2240", "opus"),
        ("_ZN5aiter48fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256E", "asm"),
        ("fmoe_bf16_blockscaleFp8_g1u1", "asm"),
    ],
)
def test_kernels_of_others_are_told_apart(name: str, backend: str):
    assert backend_of(name) == backend
    assert not is_flydsl(name)


def test_a_name_of_nobodys_is_an_error_that_names_it():
    with pytest.raises(KernelNameError, match="'triton_moe'"):
        backend_of("triton_moe")
    assert not is_flydsl("triton_moe")
