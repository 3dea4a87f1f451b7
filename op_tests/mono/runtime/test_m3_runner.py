"""MiniMax-M3's runner: its steps on the emulator, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from aiter.jit.utils.chip_info import Target
from aiter.ops.flydsl.kernels.tensor_shim import intercepted
from atom.mono.device.step_begin import STEP_BEGIN_ABI
from atom.mono.models.minimax_m3 import contract, execution
from atom.mono.models.minimax_m3 import runner as runner_module
from atom.mono.models.minimax_m3.builds import DENSE_POST_ABI, SPARSE_ABI
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.execution import Builders
from atom.mono.models.minimax_m3.layout import scratch_layout
from atom.mono.models.minimax_m3.runner import MiniMaxM3Runner, layer_builders
from atom.mono.models.minimax_m3.weights import bind_weights, expected_weights
from atom.mono.plan.trace import Record
from atom.mono.runtime import consensus, route
from atom.mono.runtime.compare import ResultsDiffer
from atom.mono.runtime.consensus import MonoUnsupported
from atom.mono.runtime.peer_memory import InProcessHeap
from atom.mono.runtime.route import LazyRunner
from op_tests.emulator import emulated
from op_tests.mono.runtime.stand_ins import (
    CPU,
    FEW,
    STAND_INS,
    allow,
    copy_attention,
    deployment_of,
    make_caches,
    make_runner,
    make_step,
    make_weights,
    small_config,
    words_of,
)


@pytest.mark.compile
@pytest.mark.emulated
@pytest.mark.parametrize("layers", [5, 6])
def test_a_step_passes_the_residual_stream_through_every_layer_in_order(gfx950, layers: int):
    config = small_config(**{**FEW, "layers": layers})
    peer_memory: list[torch.Tensor] = []
    runner = make_runner(config, InProcessHeap(1, peer_memory.append).allocator(0))
    assert runner.prepare(4)
    steps = [make_step(config, 4), make_step(config, 4, first=1000)]
    with emulated("gfx950") as emu:
        allow(emu, runner, *steps)
        emu.register(*peer_memory)
        for step in steps:
            came = words_of(step.hidden).clone()
            went = words_of(runner.forward(step))
            assert torch.equal(went, came + layers * (layers + 1) // 2)
            assert torch.equal(words_of(step.hidden), came), "the caller's tensor is only read"
    assert runner._mailboxes.state[0] == 2


def _launches(config: Config, rows: int) -> list[tuple[str, tuple]]:
    seen: list[tuple[str, tuple]] = []
    runner = make_runner(config)
    assert runner.prepare(rows)
    with intercepted(lambda exe, args: seen.append((exe.func.__name__, args))):
        runner.forward(make_step(config, rows))
    return seen


@pytest.mark.compile
def test_a_step_of_the_real_depth_is_64_launches_in_order(gfx950):
    config = small_config(reusing=frozenset(range(5, 60, 2)))
    names = [name for name, _ in _launches(config, 1)]
    assert names == [
        "launch_step_begin_tp1",
        *["launch_dense_pre", "launch_dense_post"] * 3,
        *["launch_sparse"] * 57,
    ]
    assert len(names) == config.launches == Config().launches == 64


@pytest.mark.compile
def test_layers_alternate_between_two_buffers_and_are_numbered(gfx950):
    launches = _launches(small_config(), 1)
    layers = [_named(SPARSE_ABI, args) for name, args in launches if name == "launch_sparse"]
    assert [args["layer"] for args in layers] == list(range(3, 60))
    first, second = ({args["h_in"] for args in layers[i::2]} for i in range(2))
    assert (len(first), len(second)) == (1, 1)
    assert all(a["h_out"] == b["h_in"] for a, b in pairwise(layers))


def _named(abi: tuple[str, ...], args: tuple) -> dict[str, int]:
    return dict(zip((*abi, "stream"), args, strict=True))


@pytest.mark.compile
def test_what_a_draft_model_needs_stays_in_buffers_of_its_own(gfx950):
    config = small_config(**FEW, aux_layers=(4, 0, 2))
    runner = make_runner(config)
    assert runner.prepare(1)
    seen = []
    with intercepted(lambda exe, args: seen.append((exe.func.__name__, args))):
        result = runner.forward(make_step(config, 1))
    posts = [_named(DENSE_POST_ABI, args) for name, args in seen if name == "launch_dense_post"]
    sparse = [_named(SPARSE_ABI, args) for name, args in seen if name == "launch_sparse"]
    layers = [*posts, *sparse]
    kept = [tensor.data_ptr() for tensor in runner.aux(1)]
    assert kept == [layers[i]["h_out"] for i in (4, 0, 2)]
    assert layers[1]["h_out"] == layers[3]["h_out"] not in kept
    assert len(set(kept)) == 3
    assert all(a["h_out"] == b["h_in"] for a, b in pairwise(layers))
    assert result.data_ptr() == layers[-1]["h_out"]
    with pytest.raises(ValueError, match=r"aux_layers \(5,\) of a model of 5 layers"):
        small_config(**FEW, aux_layers=(5,))


@pytest.mark.compile
def test_a_model_without_dense_layers_starts_from_the_steps_tensor(gfx950):
    config = small_config(layers=2, dense_layers=0)
    runner = make_runner(config)
    assert runner.prepare(1)
    step, seen = make_step(config, 1), []
    with intercepted(lambda exe, args: seen.append(args)):
        runner.forward(step)
    layers = [_named(SPARSE_ABI, args) for args in seen[1:]]
    assert layers[0]["h_in"] == step.hidden.data_ptr()
    assert layers[1]["h_in"] == layers[0]["h_out"]


@pytest.mark.compile
def test_step_begin_zeroes_what_the_width_uses(gfx950):
    config = small_config(**FEW)
    runner = make_runner(config)
    spans = {}
    for rows in (1, 16):
        assert runner.prepare(rows)
        with intercepted(lambda exe, args, rows=rows: spans.setdefault(rows, args)):
            runner.forward(make_step(config, rows))
    n0, fence = STEP_BEGIN_ABI.index("n0"), STEP_BEGIN_ABI.index("fence_off")
    most = scratch_layout(config.shape(16), config.sparse(16, select=True)).nbytes
    assert spans[16][n0] == runner._buffers.scratch.nbytes == most > 4 * spans[1][n0]
    assert spans[16][fence] == runner._peers.bytes == 16 * spans[1][fence]


@pytest.mark.compile
def test_a_timeline_traces_each_launcher_once(gfx950, monkeypatch: pytest.MonkeyPatch):
    """Not each of 63 launches: tracing a layer kernel takes the better part of a second."""
    traced: list[str] = []

    def trace(launcher, _abi) -> Record:
        traced.append(launcher.func.__name__)
        return Record(stages=["one", "two"])

    monkeypatch.setattr(execution, "trace", trace)
    runner = make_runner(small_config(timeline=True, reusing=frozenset({4})))
    assert runner.prepare(1)
    assert traced == ["launch_dense_pre", "launch_dense_post", "launch_sparse", "launch_sparse"]
    launched = runner.timeline(1).launches
    assert len(launched) == 63
    assert launched[4].name == "layer 2 launch_dense_pre"
    assert {launch.stages for launch in launched} == {("one", "two")}


@pytest.mark.compile
def test_reusing_layers_run_the_other_build(gfx950):
    config = small_config(**FEW)
    runner = make_runner(config)
    assert runner.prepare(1)
    seen = []
    with intercepted(lambda exe, args: seen.append(getattr(exe.build_ref.key, "select", None))):
        runner.forward(make_step(config, 1))
    assert [select for select in seen if select is not None] == [True, False, True]


@pytest.mark.compile
def test_a_width_must_be_prepared_and_tensors_must_fit(gfx950):
    config = small_config(**FEW)
    runner = make_runner(config)
    assert not runner.prepare(3)
    with pytest.raises(MonoUnsupported, match="width 4 is not prepared"):
        runner.forward(make_step(config, 4))
    assert runner.prepare(4)
    good = make_step(config, 4)
    for changed, said in (
        ({"positions": good.positions.long()}, "positions is torch.int64"),
        ({"slots": good.slots[:3]}, r"slots is torch.int32 \(3,\)"),
        ({"hidden": good.hidden.float()}, "hidden is torch.float32"),
        ({"block_table": torch.zeros(4, 6, dtype=torch.int32)[:, ::2]}, "block_table"),
        ({"block_table": torch.zeros(4, 17, dtype=torch.int32)}, r"block_table .* \(4, 17\)"),
    ):
        with pytest.raises(ValueError, match=said):
            runner.forward(replace(good, **changed))
    # An odd number of layers ends in the buffer that the next step's first layer writes.
    own = runner._buffers.residual[0][:4]
    with pytest.raises(ValueError, match="hidden is the buffer that the first layer writes"):
        runner.forward(replace(good, hidden=own))
    assert not runner.warm(4)
    runner.close()
    with pytest.raises(MonoUnsupported, match="closed"):
        runner.forward(good)


@pytest.mark.compile
def test_a_route_takes_the_runner_step_by_step(gfx950, monkeypatch: pytest.MonkeyPatch):
    config, capture = small_config(**FEW), [False]
    monkeypatch.setattr(route, "capturing", lambda: capture[0])
    lazy = LazyRunner(lambda: make_runner(config), "MiniMax-M3 mono")
    assert lazy.ready(4)
    assert not lazy.ready(3)
    capture[0] = True
    assert not lazy.ready(4), "a width that never ran would be compiled inside the capture"
    with intercepted(lambda exe, args: None):
        lazy.runner.forward(make_step(config, 4))
    assert lazy.ready(4)
    assert not lazy.ready(8)


def test_a_route_over_weights_that_do_not_fit_is_closed(caplog: pytest.LogCaptureFixture):
    config = small_config(**FEW)
    lazy = LazyRunner(lambda: bind_weights(config, make_weights(config), [], CPU), "M3")
    assert not lazy.ready(4)
    assert not lazy.enabled
    assert "M3 is not used: caches of 0 layers are given, the model has 5" in caplog.text


def test_a_build_that_fails_refuses_the_width(caplog: pytest.LogCaptureFixture):
    def broken(key: object):
        raise KeyError("no such stage")

    config = small_config(**FEW)
    runner = make_runner(config, builders=Builders(broken, broken, broken))
    assert not runner.prepare(4)
    assert "MiniMax-M3 mono: width 4 cannot be built" in caplog.text


def test_peer_memory_ends_with_the_runner():
    runner = make_runner(small_config(**FEW))
    peers = runner._peers
    assert peers.addresses
    del runner
    with pytest.raises(RuntimeError, match="closed"):
        _ = peers.addresses


# ---------------------------------------------------------------- refusals


def _refusal(weights=None, caches=None, deployment=None) -> str:
    config = small_config(**FEW)
    with pytest.raises(MonoUnsupported) as error:
        MiniMaxM3Runner(
            config,
            deployment or deployment_of(config),
            weights or make_weights(config),
            caches or make_caches(config),
            copy_attention,
            InProcessHeap(1).allocator(0),
            None,
            CPU,
            STAND_INS,
        )
    return str(error.value)


def _changed(layer: int, name: str, tensor: torch.Tensor | None):
    weights = make_weights(small_config(**FEW))
    if tensor is None:
        del weights.layers[layer][name]
    else:
        weights.layers[layer][name] = tensor
    return weights


def _shuffled(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_shuffled = True
    return tensor


@pytest.mark.parametrize(
    ("layer", "name", "tensor", "said"),
    [
        (2, "down_s", None, "layer 2: down_s is missing"),
        (0, "router_w", torch.zeros(1), "layer 0: router_w is not expected"),
        (1, "o_w", torch.zeros(128, 256), "layer 1: o_w is float32, not bfloat16"),
        (
            1,
            "o_w",
            _shuffled(torch.zeros(128, 128, dtype=torch.bfloat16)),
            "layer 1: o_w has shape (128, 128), not (128, 256)",
        ),
        (
            1,
            "o_w",
            torch.zeros(128, 256, dtype=torch.bfloat16),
            "layer 1: o_w is not in the order of aiter.ops.shuffle.shuffle_weight (`is_shuffled`)",
        ),
        (
            1,
            "o_w",
            _shuffled(torch.zeros(256, 128, dtype=torch.bfloat16).t()),
            "layer 1: o_w is not contiguous memory aligned to 16 bytes",
        ),
        (
            1,
            "norm1_w",
            torch.zeros(129, dtype=torch.bfloat16)[1:],
            "layer 1: norm1_w is not contiguous memory aligned to 16 bytes",
        ),
        (
            1,
            "norm1_w",
            torch.zeros(128, dtype=torch.bfloat16, device="meta"),
            "layer 1: norm1_w is on meta, not cpu",
        ),
        (
            2,
            "down_s",
            torch.full((17 * 128, 8), 255, dtype=torch.uint8),
            "layer 2: down_s has scales that are not numbers (255)",
        ),
        (
            2,
            "down_s",
            torch.zeros(17 * 128, 4, dtype=torch.uint8),
            "layer 2: down_s has shape (2176, 4), not (2176, 8)",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_layer_and_name(layer, name, tensor, said: str):
    assert _refusal(_changed(layer, name, tensor)) == said


def test_scales_padded_as_shuffle_scale_pads_them_are_taken():
    config = small_config(**FEW)
    weights = _changed(2, "down_s", torch.zeros(2304, 8, dtype=torch.uint8))
    assert bind_weights(config, weights, make_caches(config), CPU).layers[2].addresses["down_s"]


def test_absent_scales_are_address_zero():
    config = small_config(**FEW)
    bound = bind_weights(config, make_weights(config), make_caches(config), CPU)
    assert bound.layers[0].addresses["qkv_s"] == 0
    assert "qkv_s" not in expected_weights(config, 0)


def test_a_layer_that_reuses_a_selection_has_no_index_heads():
    config = small_config(**FEW)
    selecting, reusing = expected_weights(config, 2), expected_weights(config, 3)
    assert set(selecting) - set(reusing) == {"iq_norm_w", "ik_norm_w"}
    assert selecting["qkv_w"].shape[0] - reusing["qkv_w"].shape[0] == 2 * 128
    bound = bind_weights(config, make_weights(config), make_caches(config), CPU)
    absent = ("iq_norm_w", "ik_norm_w", "index_cache")
    assert [bound.layers[3].addresses[name] for name in absent] == [0, 0, 0]
    assert 0 not in [bound.layers[2].addresses[name] for name in absent]


def test_all_reasons_come_at_once_up_to_a_limit():
    config = small_config(**FEW)
    weights = make_weights(config)
    for layer in weights.layers:
        del layer["norm1_w"], layer["norm2_w"]
    message = _refusal(weights)
    assert message.count("is missing") == 8
    assert message.endswith("and 2 more")


def test_a_short_rotary_table_is_refused():
    config = small_config(**FEW)
    weights = replace(make_weights(config), cos_sin=torch.zeros(100, 64))
    assert "cos_sin has shape (100, 64), not (2048, 64)" in _refusal(weights)


def test_caches_of_different_sizes_are_refused():
    caches = make_caches(small_config(**FEW))
    caches[3]["v_cache"] = torch.zeros(3, 1, 128, 128, dtype=torch.float8_e4m3fn)
    assert "layer 3: v_cache has shape (3, 1, 128, 128), not (2, 1, 128, 128)" in _refusal(
        caches=caches
    )


def test_a_missing_layer_is_refused():
    weights = make_weights(small_config(**FEW))
    assert "weights of 4 layers are given, the model has 5" in _refusal(
        replace(weights, layers=weights.layers[:4])
    )


def test_a_device_that_cannot_hold_the_grid_is_refused():
    deployment = replace(deployment_of(small_config(**FEW)), target=Target("gfx950", 80))
    assert _refusal(deployment=deployment).endswith("256 compute units, the device has 80")


@pytest.mark.parametrize("failing", ["npes", "Buffers.allocate", "StepMailboxes"])
def test_a_rank_that_cannot_be_made_tells_the_others(monkeypatch: pytest.MonkeyPatch, failing: str):
    """One that raised before it voted would leave them waiting."""
    votes: list[bool] = []
    monkeypatch.setattr(consensus, "tp_agree", lambda ok, group: votes.append(ok) or ok)
    config, ranks = small_config(**FEW), 2 if failing == "npes" else 1

    def fail(*_args):
        raise MonoUnsupported("peer memory of 2 ranks, the model has 1")

    if failing != "npes":
        monkeypatch.setattr(f"{runner_module.__name__}.{failing}", fail)
    with pytest.raises(MonoUnsupported, match="peer memory of 2 ranks, the model has 1"):
        make_runner(config, InProcessHeap(ranks).allocator(0))
    assert votes[-1] is False


def test_a_device_is_the_one_its_tensors_name():
    config = small_config(**FEW)
    runner = make_runner(config, device=torch.device("cpu", 0))
    assert runner.device == CPU


def test_a_process_that_launches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMPILE_ONLY", "1")
    assert _refusal() == "COMPILE_ONLY is set: steps would launch nothing"


@pytest.mark.compile
def test_check_mode_refuses_a_width_whose_hand_offs_are_broken(
    gfx950, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = small_config(**FEW, check=True)
    runner = make_runner(config, builders=layer_builders())
    declared = contract.hand_offs
    without = lambda build: tuple(d for d in declared(build) if d.name != "activated")
    monkeypatch.setattr(contract, "hand_offs", without)
    assert not runner.prepare(1)
    assert "activated, which is not declared" in caplog.text


@pytest.mark.compile
def test_check_mode_looks_at_every_row_but_padding(gfx950, monkeypatch: pytest.MonkeyPatch):
    # The stand-ins hand nothing over.
    monkeypatch.setattr(runner_module, "check_width", lambda *_args: {})
    config = small_config(**FEW, check=True)
    runner, step = make_runner(config), make_step(config, 4)
    assert runner.prepare(4)
    with intercepted(lambda exe, args: None):
        runner.forward(step)[3] = torch.nan
    with pytest.raises(ResultsDiffer, match="rank 0 has 128 elements that are no numbers"):
        runner.finish_step()
    step.slots[3] = -1
    runner.finish_step()
    step.slots[:] = -1
    runner.finish_step()
