"""The real layer kernels: they hand over as declared, and the runner's ABI is theirs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atom.mono.models.minimax_m3 import contract
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.contract import check_width
from atom.mono.models.minimax_m3.execution import width_kernels
from atom.mono.models.minimax_m3.runner import layer_builders
from atom.mono.plan.check import ContractError
from atom.mono.plan.execution import THREADS
from atom.mono.runtime.compile import LDS_BYTES, launcher_resources
from atom.mono.runtime.step_begin import ABI
from atom.mono.runtime.widths import WidthBuilds
from op_tests.mono.runtime.kernels import kernel_in
from op_tests.mono.runtime.stand_ins import small_config

CONFIG = small_config(layers=6, reusing=frozenset({4}))


def test_every_kernel_of_a_width_keeps_its_contract(gfx950):
    records = check_width(CONFIG, 4, layer_builders())
    assert len(records) == 4
    reusing = next(record for name, record in records.items() if "reusing" in name)
    full = next(r for n, r in records.items() if "sparse" in n and "reusing" not in n)
    assert set(full.stages) - set(reusing.stages) == {"index_scores", "select"}


def test_a_region_nobody_declared_fails_the_check(gfx950, monkeypatch: pytest.MonkeyPatch):
    declared = contract.hand_offs
    without = lambda build: tuple(d for d in declared(build) if d.name != "activated")
    monkeypatch.setattr(contract, "hand_offs", without)
    with pytest.raises(ContractError, match="activated, which is not declared") as error:
        check_width(CONFIG, 4, layer_builders())
    assert any("(reusing)" in line for line in error.value.violations)


def test_kernels_and_launchers_have_the_declared_parameters(gfx950):
    for launcher, abi in width_kernels(CONFIG, 4, layer_builders()).pairs():
        abi.check(kernel_in(launcher), launcher)
    from atom.mono.device.step_begin import build_step_begin

    begin = build_step_begin(CONFIG.step_begin())
    ABI.check(kernel_in(begin), begin)


def test_debug_and_plain_builds_are_different_launchers():
    plain = width_kernels(CONFIG, 4, layer_builders())
    debug = width_kernels(replace(CONFIG, debug=True), 4, layer_builders())
    again = width_kernels(replace(CONFIG), 4, layer_builders())
    assert plain == again
    pairs = zip(plain.pairs(), debug.pairs(), strict=True)
    assert all(a is not b for (a, _), (b, _) in pairs)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("rows", Config().widths)
def test_the_model_as_shipped_is_prepared_without_scratch(gfx950, rows: int):
    config = Config(reusing=frozenset(range(5, 60, 2)))
    assert config.launches == 64
    builds = WidthBuilds(
        lambda rows: width_kernels(config, rows, layer_builders()),
        lambda kernels: kernels.pairs(),
        None,
        "MiniMax-M3 mono",
    )
    assert builds.prepare(rows)
    for launcher, _ in builds[rows].pairs():
        (resources,) = launcher_resources(launcher)
        assert resources.threads == THREADS
        assert resources.lds_bytes <= LDS_BYTES
