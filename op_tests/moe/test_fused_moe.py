"""`fused_moe` end to end on the CPU against the torch reference."""

import dataclasses
import importlib
from contextlib import contextmanager

import pytest
import torch

from aiter.jit.utils.chip_info import pinned
from aiter.ops.enum import ActivationType
from aiter.ops.flydsl.kernels.tensor_shim import intercepted, launch_of
from aiter.ops.flydsl.moe.selection import Selector
from op_tests.moe.cases import GFX950, MoeCase
from op_tests.moe.test_mx_family import selector_of
from op_tests.torch_moe import Activation, relative_l2

fused_moe_module = importlib.import_module("aiter.fused_moe")

pytestmark = pytest.mark.emulated
TOLERANCE = 1e-2


@pytest.mark.parametrize("gate_mode", ["interleave", "separated"])
@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, "even"), (3, "idle"), (32, "skewed"), (65, "one"), (65, "even")]
)
def test_a8w4_agrees_with_the_reference(emulate, gate_mode, tokens, kind):
    case = MoeCase.random(tokens, 512, 256, 8, 2, kind)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(gate_mode)
    assert relative_l2(out, case.reference()) < TOLERANCE


def test_waves_in_any_order_agree_with_lock_step(emulate):
    case = MoeCase.random(17, 512, 256, 4, 2)
    emulate(GFX950, order="random", seed=11)
    with pinned(GFX950):
        out = case.run()
    assert relative_l2(out, case.reference()) < TOLERANCE


def test_inter_dim_that_is_no_multiple_of_a_scale_word_is_served(emulate):
    case = MoeCase.random(9, 256, 384, 3, 2)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run()
    assert relative_l2(out, case.reference()) < TOLERANCE


def test_a_limit_clamps_gate_and_up(emulate):
    case = MoeCase.random(5, 256, 128, 3, 2)
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(swiglu_limit=0.25)
    want = case.reference(activation=Activation(limit=0.25))
    assert relative_l2(out, want) < TOLERANCE
    assert relative_l2(case.reference(), want) > 10 * TOLERANCE


@pytest.mark.parametrize("a_format", ["fp8", "bf16"])
def test_rows_beyond_the_local_tokens_do_not_matter(emulate, a_format):
    case = MoeCase.random(12, 256, 128, 3, 2, a_format=a_format)
    case.x[7:] = float("nan")
    emulate(GFX950)
    with pinned(GFX950):
        out = case.run(num_local_tokens=torch.tensor([7], dtype=torch.int32))
    want = case.reference()[:7]
    assert relative_l2(out[:7], want) < TOLERANCE


@pytest.mark.parametrize("reduce", ["0", "1"])
def test_a_route_to_no_expert_adds_nothing(emulate, monkeypatch, reduce):
    monkeypatch.setenv("AITER_FLYDSL_FORCE_REDUCE", reduce)
    case = MoeCase.random(12, 256, 128, 3, 2)
    case.ids[0, 0], case.ids[5, 1] = -1, 3
    case.ids[7] = 200
    emulate(GFX950, poison=True)
    with pinned(GFX950):
        out = case.run()
    assert relative_l2(out, case.reference()) < TOLERANCE
    assert not out[7].any()


@pytest.mark.parametrize("a_format", ["fp8", "bf16"])
def test_padding_rows_never_reach_a_result(emulate, a_format):
    """Poison: no kernel may use what nothing wrote, and no NaN comes of it."""
    case = MoeCase.random(5, 256, 128, 4, 2, "idle", a_format)
    emulate(GFX950, poison=True)
    with pinned(GFX950):
        out = case.run()
    assert torch.isfinite(out).all()
    assert relative_l2(out, case.reference()) < TOLERANCE


TUNED = [
    ("t32x64x256_w4_gui_kw2_fp8", "t32x128x128_reduce_bnt2", 32),
    ("t32x64x256_bnt0_gui_kw4", "t16x128x256_atomic_bnt2_sbm32", 32),
    ("t16x128x256_w3_gui_fp8", "t16x256x256_atomic", 16),
    ("t32x128x256_w3_gui_xcd4", "t32x256x256_atomic_bnt2_xcd4_persist", 32),
    ("t64x256x256_w4_bnt0_gui_xcd4_fp8", "t64x128x256_reduce_persist", 64),
    ("t128x256x256_gui_xcd4_fp8", "t64x256x256_reduce_xcd4_persist_sbm128", 128),
    ("t128x128x256_w2_gui_fp8", "t128x128x256_atomic_persist_async_w4_cumul3", 128),
]


def tuned(case: MoeCase, names: tuple[str, str, int]) -> Selector:
    prefix = "fp8_wfp4_bf16"
    return selector_of(
        case,
        f"flydsl_moe1_a{prefix}_{names[0]}",
        f"flydsl_moe2_a{prefix}_{names[1]}",
        names[2],
        "interleave",
    )


@pytest.mark.parametrize("names", TUNED, ids=lambda names: names[0])
def test_the_parameters_of_a_name_change_code_but_not_results(emulate, monkeypatch, names):
    case = MoeCase.random(37, 1024, 512, 5, 3, "skewed")
    selector = tuned(case, names)
    monkeypatch.setattr(fused_moe_module, "_selector", lambda paths: selector)
    emulate(GFX950, order="random", seed=5)
    with pinned(GFX950):
        out = case.run()
    assert selector.plan.cache_info().currsize == 1
    want = case.reference(bf16_between=not names[0].endswith("_fp8"))
    assert relative_l2(out, want) < TOLERANCE


def launched(case: MoeCase, **options: object) -> dict[str, list[object]]:
    """Builders that a run of `case` launches, each with its keys."""
    found: dict[str, list[object]] = {}

    def note(launcher, args) -> None:
        build = launch_of(launcher).build
        found.setdefault(build.qualname, []).append(build.key)

    with pinned(GFX950), intercepted(note):
        case.run(**options)
    return found


def test_bf16_activations_are_never_quantised():
    case = MoeCase.random(37, 1024, 512, 5, 3, a_format="bf16")
    assert set(launched(case)) == {"build_sort", "build_stage1", "build_stage2"}


@pytest.mark.parametrize(
    ("activation", "gate_mode", "tokens", "variables", "a_format"),
    [
        (ActivationType.Swiglu, "separated", 255, {}, "bf16"),
        (ActivationType.Swiglu, "separated", 256, {}, "fp4"),
        (ActivationType.Swiglu, "separated", 8, {"GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "8"}, "fp4"),
        (ActivationType.Swiglu, "interleave", 255, {}, "bf16"),
        (ActivationType.Swiglu, "interleave", 256, {}, "fp8"),
        (ActivationType.Silu, "interleave", 7, {"AITER_BF16_FP8_MOE_BOUND": "8"}, "bf16"),
        (ActivationType.Silu, "interleave", 8, {"AITER_BF16_FP8_MOE_BOUND": "8"}, "fp8"),
        (ActivationType.Silu, "separated", 1, {}, "fp4"),
        (ActivationType.Situv2, "separated", 600, {}, "bf16"),
        (ActivationType.Situv2, "interleave", 600, {}, "bf16"),
        (ActivationType.Situv2, "separated", 1, {"AITER_SITUV2_A8W4": "1"}, "fp8"),
        (ActivationType.Situv2, "separated", 1, {"AITER_SITUV2_A4W4": "1"}, "fp4"),
    ],
)
def test_activations_that_no_caller_pins(
    monkeypatch, activation, gate_mode, tokens, variables, a_format
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    case = MoeCase.random(1, 256, 128, 4, 2)
    many = dataclasses.replace(
        case,
        x=case.x.expand(tokens, -1),
        ids=case.ids.expand(tokens, -1),
        weights=case.weights.expand(tokens, -1),
    )
    keys = launched(many, gate_mode=gate_mode, activation=activation, quant_dtype_a=None)
    assert keys["build_stage1"][0].tile.a_format == a_format
    assert keys["build_stage2"][0].tile.a_format == a_format


def test_the_row_of_a_table_is_what_runs(monkeypatch):
    case = MoeCase.random(37, 1024, 512, 5, 3)
    selector = tuned(case, TUNED[0])
    monkeypatch.setattr(fused_moe_module, "_selector", lambda paths: selector)
    launches = []
    with pinned(GFX950), intercepted(lambda exe, args: launches.append(launch_of(exe))):
        case.run()
    keys = {type(launch.build.key).__name__: launch.build.key for launch in launches}
    assert keys["Stage1Key"].tile.k_waves == 2
    assert keys["Stage2Key"].epilogue == "reduce"
    assert "ReduceKey" in keys


def test_tensors_in_another_order_give_the_same_result(emulate):
    case = MoeCase.random(6, 256, 128, 3, 2)
    other = MoeCase(
        case.x.T.contiguous().T, case.w1, case.w2, case.ids.T.contiguous().T, case.weights, "fp8"
    )
    assert not other.x.is_contiguous()
    emulate(GFX950)
    with pinned(GFX950):
        out = other.run()
    assert relative_l2(out, case.reference()) < TOLERANCE


@pytest.mark.parametrize(
    ("field", "dtype"), [("x", torch.float16), ("ids", torch.int64), ("weights", torch.bfloat16)]
)
def test_tensors_of_another_type_are_refused_before_any_launch(field, dtype):
    case = MoeCase.random(2, 256, 128, 3, 2)
    wrong = dataclasses.replace(case, **{field: getattr(case, field).to(dtype)})
    options = {"dtype": torch.bfloat16} if field == "x" else {}
    with pinned(GFX950), nothing_launched(), pytest.raises(ValueError, match=str(dtype)):
        wrong.run(**options)


def test_the_call_runs_on_the_device_of_its_tensors(monkeypatch):
    """Streams and loaded code belong to the current device."""
    case, current = MoeCase.random(2, 256, 128, 3, 2), []

    @contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.clear()

    def impl(hidden_states, *arguments, **options):
        assert current == [hidden_states]
        return torch.ones(2, 256)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(fused_moe_module, "_fused_moe_impl", impl)
    assert (case.run() == 1).all()
    assert current == []


def test_no_tokens_give_no_rows():
    case = MoeCase.random(1, 256, 128, 3, 2)
    with pinned(GFX950), nothing_launched():
        out = MoeCase(case.x[:0], case.w1, case.w2, case.ids[:0], case.weights[:0], "fp8").run()
    assert out.shape == (0, 256)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias2": torch.zeros(3, 256)}, "bias on stage 2 alone"),
        ({"activation": ActivationType.No}, "No"),
        ({"hidden_pad": 256}, "padding"),
        ({"a1_scale": torch.ones(1)}, "quantised by the caller"),
        ({"shared_w1": torch.ones(1)}, "shared_w1"),
        ({"dtype": torch.float16}, "float16"),
        ({"block_size_M": 48}, "blocks of 48"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_the_reason(options, reason):
    case = MoeCase.random(2, 256, 128, 3, 2)
    with pinned(GFX950), nothing_launched(), pytest.raises(NotImplementedError, match=reason):
        case.run(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bias1": torch.zeros(3, 128)}, "bias1"),
        ({"bias1": torch.zeros(3, 256, dtype=torch.float16)}, "bias1"),
        ({"expert_mask": torch.ones(3)}, "expert_mask"),
        ({"gate_mode": "sideways"}, "sideways"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_launch(options, reason):
    case = MoeCase.random(2, 256, 128, 3, 2)
    with pinned(GFX950), nothing_launched(), pytest.raises(ValueError, match=reason):
        case.run(**options)


def nothing_launched():
    return intercepted(lambda exe, args: pytest.fail(f"{launch_of(exe)} was launched"))


def test_scales_that_were_not_shuffled_are_refused():
    case = MoeCase.random(2, 512, 128, 3, 2)
    arguments = case.arguments() | {"w1_scale": case.w1.scale[:1], "w2_scale": case.w2.scale[:1]}
    with pinned(GFX950), nothing_launched(), pytest.raises(ValueError, match="shuffle_scale"):
        fused_moe_module.fused_moe(**arguments)


def strided(x):
    """`x` with a gap after every element."""
    view = torch.stack([x, x], -1)[..., 0]
    view.is_shuffled = getattr(x, "is_shuffled", False)
    return view


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("w1", strided, "w1 .* strides"),
        ("w2", strided, "w2 .* strides"),
        ("w1_scale", strided, "w1_scale .* strides"),
        ("w2_scale", torch.t, "w2_scale .* strides"),
        ("w1_scale", lambda scale: scale.float(), "w1_scale is torch.float32"),
        ("w2_scale", lambda scale: None, "need w2_scale"),
        ("w2", lambda w: w.view(torch.int8), "w1 is torch.uint8, w2 is torch.int8"),
        ("topk_weight", lambda weights: weights[:, :1], "topk_weight"),
        ("topk_weight", lambda weights: weights[:1], "topk_weight"),
        ("num_local_tokens", lambda none: torch.tensor([1]), "num_local_tokens is torch.int64"),
        ("num_local_tokens", lambda none: torch.zeros(2, dtype=torch.int32), "num_local_tokens"),
        ("expert_mask", lambda none: torch.ones(2, dtype=torch.int32), "3 to 4096 experts"),
        ("block_size_M", lambda none: 0, "block_size_M is 0"),
        ("hidden_states", lambda x: x[None], "two dimensions"),
        ("topk_ids", lambda ids: ids[:, 0], "two dimensions"),
        ("w1", lambda w: w[0], "three"),
    ],
)
def test_what_the_kernels_would_misread_is_refused_before_any_launch(name, change, reason):
    arguments = MoeCase.random(2, 256, 128, 3, 2).arguments()
    arguments[name] = change(arguments.get(name))
    with pinned(GFX950), nothing_launched(), pytest.raises(ValueError, match=reason):
        fused_moe_module.fused_moe(**arguments)


@pytest.mark.parametrize("name", ["w1", "w2_scale", "topk_ids", "topk_weight"])
def test_tensors_on_another_device_are_refused_before_any_launch(name):
    arguments = MoeCase.random(2, 256, 128, 3, 2).arguments()
    arguments["_q_dtype_a"] = arguments.pop("quant_dtype_a")
    arguments[name] = arguments[name].to("meta")
    with pinned(GFX950), nothing_launched(), pytest.raises(ValueError, match=f"{name} is on meta"):
        fused_moe_module._fused_moe_impl(**arguments)


def test_biases_and_masks_in_another_order_give_the_same_result(emulate):
    case = MoeCase.random(5, 256, 128, 3, 2)
    bias1, bias2 = torch.randn(3, 256), torch.randn(3, 256)
    mask = torch.tensor([1, 1, 1, 0], dtype=torch.int32)
    emulate(GFX950)
    with pinned(GFX950):
        plain = case.run(bias1=bias1, bias2=bias2, expert_mask=mask)
        out = case.run(
            bias1=strided(bias1), bias2=bias2.T.contiguous().T, expert_mask=strided(mask)
        )
    assert torch.equal(out, plain)
