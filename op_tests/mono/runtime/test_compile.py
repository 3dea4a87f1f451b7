"""Launchers are compiled without dispatch, inspected and traced through the JIT objects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from atom.mono.plan.check import ContractError, RegionDecl
from atom.mono.plan.trace import Space
from atom.mono.runtime.abi import KernelAbi
from atom.mono.runtime.compile import (
    check_traced,
    compile_kernels,
    compile_only,
    launcher_resources,
    scratch_bytes,
    trace,
)
from op_tests.hip_stub import Driver, HipStub
from op_tests.mono.runtime.kernels import (
    COPY_ABI,
    SPILL_ABI,
    CopyKey,
    build_copy,
    build_spilling,
)

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_compile_only_puts_back_what_was_there(monkeypatch: pytest.MonkeyPatch, before: str | None):
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    if before is not None:
        monkeypatch.setenv("COMPILE_ONLY", before)
    with pytest.raises(ZeroDivisionError), compile_only():
        assert os.environ["COMPILE_ONLY"] == "1"
        raise ZeroDivisionError
    assert os.environ.get("COMPILE_ONLY") == before


def test_binaries_tell_what_they_take(gfx950, flydsl_cache: Path):
    pairs = [(build_copy(CopyKey(3)), COPY_ABI), (build_spilling(CopyKey(3)), SPILL_ABI)]
    copy, spilling = compile_kernels(pairs)
    assert len(list(flydsl_cache.rglob("*.pkl"))) == 2
    assert scratch_bytes(copy) == 0
    assert scratch_bytes(spilling) >= 64 * 4
    (resources,) = launcher_resources(copy)
    assert resources.threads == 64
    assert resources.vgprs > 0


def test_a_launcher_that_is_not_compiled_has_no_scratch_to_tell(gfx950):
    with pytest.raises(RuntimeError, match="launch_copy is not compiled"):
        scratch_bytes(build_copy(CopyKey(17)))


def test_a_launcher_with_another_abi_is_not_compiled(gfx950, flydsl_cache: Path):
    with pytest.raises(TypeError, match="parameter 2 is rows, declared is cols"):
        compile_kernels([(build_copy(CopyKey()), KernelAbi(("out", "x", "cols")))])
    assert not list(flydsl_cache.rglob("*.pkl"))


def test_tracing_records_stages_and_lowers_nothing(gfx950, flydsl_cache: Path):
    record = trace(build_copy(CopyKey()), COPY_ABI)
    assert record.stages == ["copy"]
    assert [(event.stage, event.region) for event in record.hand_offs] == [("copy", "out")]
    assert not list(flydsl_cache.rglob("*.pkl"))
    # A warm cache does not hide the body from a second trace.
    compile_kernels([(build_copy(CopyKey()), COPY_ABI)])
    assert trace(build_copy(CopyKey()), COPY_ABI) == record


def test_a_traced_kernel_is_checked_against_its_regions(gfx950):
    launcher = build_copy(CopyKey())
    check_traced(launcher, COPY_ABI, [RegionDecl("out", Space.SCRATCH, "copy")])
    with pytest.raises(ContractError, match="out is peer memory"):
        check_traced(launcher, COPY_ABI, [RegionDecl("out", Space.PEER, "copy")])


def preload_then_run(driver: Driver) -> tuple[dict[str, int], int, int, int]:
    launcher = build_copy(CopyKey())
    compile_kernels([(launcher, COPY_ABI)])
    preloaded = driver.counts()
    _run_compiled(launcher, 0x1000, 0x2000, 1, 0x77)
    scratch = scratch_bytes(launcher)
    with compile_only():
        _run_compiled(launcher, *COPY_ABI.zeros(), None)
    compile_kernels([(launcher, COPY_ABI)])
    loads = driver.count("hipModuleLoadData")
    return preloaded, loads, driver.count("hipModuleLaunchKernel"), scratch


def test_preloading_launches_and_loads_nothing_cold_or_warm(hip_stub: HipStub):
    assert hip_stub.run(preload_then_run) == ({}, 1, 1, 0)
