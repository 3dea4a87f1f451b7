"""Every flavour, activation, layout and mode of the MX family against the torch reference."""

import importlib

import pytest
import torch

from aiter.jit.tables import Source
from aiter.jit.tuned import FmoeTable, TunedRow
from aiter.jit.utils.chip_info import pinned
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.moe.request import BF16, FP4, FP8, CallerVariant, MoeRequest, Policy
from aiter.ops.flydsl.moe.selection import Selector
from op_tests.moe.cases import GFX950, MoeCase, routing
from op_tests.torch_moe import Activation, relative_l2

fused_moe_module = importlib.import_module("aiter.fused_moe")

pytestmark = pytest.mark.emulated
TOLERANCE = 1e-2

FLAVOURS = [("fp8", "fp4"), ("fp4", "fp4"), ("fp8", "fp8"), ("bf16", "fp4")]
ACTIVATIONS = {
    "silu": (ActivationType.Silu, {}, Activation()),
    "gelu": (ActivationType.Gelu, {}, Activation("gelu")),
    "swiglu": (ActivationType.Swiglu, {}, Activation("swiglu")),
    "swiglu_limit": (ActivationType.Swiglu, {"swiglu_limit": 0.5}, Activation("swiglu", 0.5)),
    "situv2": (ActivationType.Situv2, {}, Activation("situv2")),
    "situv2_kimi": (
        ActivationType.Situv2,
        {"beta": 4.0, "linear_beta": 25.0},
        Activation("situv2", beta=4.0, linear_beta=25.0),
    ),
}


@pytest.mark.parametrize("gate_mode", ["interleave", "separated"])
@pytest.mark.parametrize("flavour", FLAVOURS, ids="x".join)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_flavours_activations_and_layouts(emulate, flavour, name, gate_mode):
    activation, options, reference = ACTIVATIONS[name]
    case = MoeCase.random(19, 512, 256, 5, 2, "skewed", *flavour)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(gate_mode, activation=activation, **options)
    assert relative_l2(out, case.reference(activation=reference)) < TOLERANCE


@pytest.mark.parametrize("flavour", FLAVOURS, ids="x".join)
@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, "even"), (3, "idle"), (32, "one"), (65, "skewed")]
)
def test_flavours_and_routings(emulate, flavour, tokens, kind):
    case = MoeCase.random(tokens, 256, 384, 6, 3, kind, *flavour)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run("separated")
    assert relative_l2(out, case.reference()) < TOLERANCE


@pytest.mark.parametrize("a_format", ["fp4", "bf16"])
@pytest.mark.parametrize("gate_mode", ["interleave", "separated"])
@pytest.mark.parametrize("both", [False, True])
def test_biases(emulate, gate_mode, both, a_format):
    case = MoeCase.random(9, 256, 128, 4, 2, "even", a_format, "fp4")
    g = torch.Generator().manual_seed(9)
    bias1 = torch.randn(4, 256, generator=g)
    bias2 = torch.randn(4, 256, generator=g) if both else None
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(gate_mode, activation=ActivationType.Swiglu, bias1=bias1, bias2=bias2)
    want = case.reference(activation=Activation("swiglu"), bias1=bias1, bias2=bias2)
    assert relative_l2(out, want) < TOLERANCE


@pytest.mark.parametrize("flavour", FLAVOURS, ids="x".join)
def test_route_weights_in_stage_1(emulate, flavour):
    case = MoeCase.random(9, 256, 128, 4, 2, "even", *flavour)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(doweight_stage1=True)
    assert relative_l2(out, case.reference(weight_in_stage1=True)) < TOLERANCE


@pytest.mark.parametrize("topk", [1, 16])
def test_extreme_top_k(emulate, topk):
    case = MoeCase.random(7, 256, 128, 18, topk)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run()
    assert relative_l2(out, case.reference()) < TOLERANCE


@pytest.mark.parametrize("a_format", ["fp8", "bf16"])
@pytest.mark.parametrize("force_reduce", ["0", "1"])
def test_experts_of_other_ranks_are_left_to_them(emulate, monkeypatch, force_reduce, a_format):
    monkeypatch.setenv("AITER_FLYDSL_FORCE_REDUCE", force_reduce)
    g = torch.Generator().manual_seed(4)
    case = MoeCase.random(21, 256, 128, 4, 3, a_format=a_format)
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 0], dtype=torch.int32)
    case.ids.copy_(routing(21, 3, 9, "even", g))
    case.ids[:, 2] = 9  # the slot that callers append for no expert
    case.ids[4] = torch.tensor([0, 3, 9])  # a token of other ranks only
    numbers = torch.where(mask == 1, mask.cumsum(0) - 1, -1)
    local = torch.where(case.ids < 9, numbers[case.ids.clamp(max=8).long()], -1)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(expert_mask=mask)
    assert (out[4] == 0).all()
    assert relative_l2(out, case.reference(ids=local)) < TOLERANCE


@pytest.mark.parametrize("flavour", FLAVOURS[:2] + FLAVOURS[3:], ids="x".join)
def test_padding_of_hidden_and_intermediate_columns(emulate, flavour):
    case = MoeCase.random(6, 512, 256, 3, 2, "even", *flavour)
    hidden_pad, inter_pad = 192, 64
    for weight, columns in ((case.w1, hidden_pad), (case.w2, inter_pad)):
        bytes_of_block = weight.data.shape[-1] // weight.scale.shape[-1]
        weight.data[..., -(columns // 32) * bytes_of_block :] = 0
        weight.scale[..., -columns // 32 :] = 127
    case.w2.data[:, -hidden_pad:] = 0
    for start in (256 - inter_pad, 512 - inter_pad):
        case.w1.data[:, start : start + inter_pad] = 0
    case.x[:, -hidden_pad:] = 0
    want = case.reference()
    case.x[:, -hidden_pad:] = float("nan")
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run("separated", hidden_pad=hidden_pad, intermediate_pad=inter_pad)
    assert torch.isfinite(out).all()
    assert relative_l2(out, want) < TOLERANCE


A4W4, A8W8, A16W4 = "afp4_wfp4_bf16", "afp8_wfp8_bf16", "abf16_wfp4_bf16"
NAMES = [
    # stage 1, stage 2, sort block, layout
    (f"moe1_{A4W4}_t32x64x256_w3_kb4_xcd4_fp4", f"moe2_{A4W4}_t32x128x256_reduce", 32, False),
    (
        f"moe1_{A4W4}_t32x64x256_w3_kb4_bnt0_go_xcd4_fp4",
        f"moe2_{A4W4}_t32x128x128_reduce_bnt2",
        32,
        False,
    ),
    (
        f"moe1_{A4W4}_t32x32x256_w3_kw2_fp4",
        f"moe2_layout_{A4W4}_t32x128x256_atomic_nt",
        32,
        False,
    ),
    (
        f"moe1_{A4W4}_t128x64x256_fp4",
        f"moe2_layout_{A4W4}_t64x256x256_reduce_persist_sbm128_bf16lds_sp801",
        128,
        False,
    ),
    (
        f"moe1_{A8W8}_t128x128x256_gui_fp8",
        f"moe2_layout_{A8W8}_t64x128x128_reduce_sbm128",
        128,
        True,
    ),
    # 96 columns: no number of waves but one has whole scale blocks of gate and up
    (f"moe1_{A8W8}_t32x192x256_gui_fp8", f"moe2_{A8W8}_t32x512x128_atomic", 32, True),
    ("mxmoe_g1_a4w4_16x256x256_f16in_nt", "mxmoe_g2_a4w4_16x256x256_atomic_nt", 16, True),
    ("mxmoe_g1_a4w4_128x256x256_xcd4", "mxmoe_g2_a4w4_128x256x256_f4out", 128, False),
    ("mxmoe_g1_a4w4_32x256x256", "mxmoe_g2_a4w4_32x256x256_cshuffle", 32, False),
    (f"moe1_{A16W4}_t16x64x256_w2_xcd1_kw2", f"moe2_{A16W4}_t16x128x128_atomic_bnt2", 16, False),
    (f"moe1_{A16W4}_t32x32x128_w4_kw4", f"moe2_{A16W4}_t16x256x256_reduce_sbm32", 32, False),
    (
        f"moe1_{A16W4}_t32x128x256_w4_xcd4",
        f"moe2_{A16W4}_t32x128x128_atomic_bnt2_xcd4_persist",
        32,
        False,
    ),
    (f"moe1_{A16W4}_t64x64x128_bnt0_gui_kw2", f"moe2_{A16W4}_t64x256x256_reduce", 64, True),
    (f"moe1_{A16W4}_t64x256x256_gui", f"moe2_{A16W4}_t64x128x128_atomic", 64, True),
    (f"moe1_{A16W4}_t128x128x128", f"moe2_{A16W4}_t128x128x256_atomic", 128, False),
    (f"moe1_{A16W4}_t128x256x256_gui", f"moe2_{A16W4}_t128x256x256_reduce", 128, True),
    (f"moe1_{A16W4}_t64x64x256_kb2", f"moe2_{A16W4}_t32x512x256_reduce_sbm64", 64, False),
    (f"moe1_{A16W4}_t32x128x256_kb4_go", f"moe2_{A16W4}_t32x128x256_atomic", 32, False),
]
# The types of a case's activations and weights.
TYPES = {"bf16": BF16, "fp8": FP8, "fp4": FP4}


def selector_of(case: MoeCase, stage1: str, stage2: str, block_m: int, gate_mode: str) -> Selector:
    """A selector whose one row serves `case` with the two kernels."""
    experts, rows, _ = case.w1.data.shape
    request = MoeRequest(
        target=GFX950,
        policy=Policy(False, True, False),
        tokens=case.x.shape[0],
        model_dim=case.x.shape[1],
        inter_dim=rows // 2,
        experts=experts,
        topk=case.ids.shape[1],
        dtype="bfloat16",
        a_dtype=TYPES[case.a_format],
        w_dtype=TYPES[case.w1.fmt],
        activation=ActivationType.Silu,
        quant_type=QuantType.per_1x32,
        use_g1u1=True,
        doweight_stage1=False,
        shuffled=True,
        caller=CallerVariant(GateMode(gate_mode)),
    )
    row = TunedRow(
        key=request.tuned_key(),
        block_m=block_m,
        ksplit=0,
        run_1stage=False,
        kernel1=stage1,
        kernel2=stage2,
        us=None,
        tag="",
        source=Source("tuned.csv", 2),
    )
    selector = Selector(FmoeTable((row,), (), ()))
    plan = selector.plan(request)
    assert plan.source is not None, plan.reasons
    return selector


@pytest.mark.parametrize("tile_k", [128, 256])
@pytest.mark.parametrize("flavour", FLAVOURS, ids="x".join)
def test_rows_of_activations_meet_in_no_bank(emulate, monkeypatch, flavour, tile_k):
    types = f"a{flavour[0]}_w{flavour[1]}_bf16"
    case = MoeCase.random(21, 512, 512, 4, 2, "skewed", *flavour)
    names = (f"flydsl_moe1_{types}_t64x64x{tile_k}", f"flydsl_moe2_{types}_t64x128x{tile_k}_reduce")
    selector = selector_of(case, *names, 64, "separated")
    monkeypatch.setattr(fused_moe_module, "_selector", lambda paths: selector)
    emulator = emulate(GFX950, detailed_stats=True)
    with pinned(GFX950):
        case.run("separated")
    stages = [stats for name, stats in emulator.stats.items() if "stage" in name]
    assert len(stages) == 2
    assert all(stats.lds_read_bytes and not stats.conflicts for stats in stages)


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_every_family_of_names(emulate, monkeypatch, names):
    stage1, stage2, block_m, interleaved = names
    flavour = next(
        (
            flavour
            for types, flavour in ((A8W8, FLAVOURS[2]), (A16W4, FLAVOURS[3]))
            if types in stage1
        ),
        FLAVOURS[1],
    )
    gate_mode = "interleave" if interleaved else "separated"
    case = MoeCase.random(21, 1024, 384 if "x192x" in stage1 else 512, 4, 2, "skewed", *flavour)
    selector = selector_of(case, f"flydsl_{stage1}", f"flydsl_{stage2}", block_m, gate_mode)
    monkeypatch.setattr(fused_moe_module, "_selector", lambda paths: selector)
    emulate(GFX950, order="random", seed=7)
    with pinned(GFX950):
        out = case.run(gate_mode)
    assert relative_l2(out, case.reference()) < TOLERANCE
