"""Cache keys of this project's launches do not depend on the ROCm a host has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import flydsl.expr as fx
import pytest
from flydsl.compiler.backends import get_backend

from aiter.jit.utils import backend, flydsl_private
from aiter.jit.utils.backend import (
    OWN_FINGERPRINT,
    DeviceLibraryError,
    artifact_key,
    in_own_launch,
    own_launch,
    require_no_device_library,
)
from aiter.jit.utils.chip_info import Target, TargetError, pinned
from aiter.jit.utils.toolkit import toolkit_env
from op_tests.host.sample_kernels import make_device_library, make_failing, make_scale

STREAM = fx.Stream(None)
ARGS = (0, 0, 1, STREAM)


@pytest.fixture
def gfx950() -> Iterator[None]:
    with pinned(Target.of("gfx950")):
        yield


@pytest.fixture
def compile_only(gfx950: None, flydsl_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPILE_ONLY", "1")
    return flydsl_cache


def _rocm(folder: Path, *bitcode: str) -> Path:
    (folder / "amdgcn/bitcode").mkdir(parents=True)
    for name in bitcode:
        (folder / "amdgcn/bitcode" / name).write_text(name)
    return folder


def _files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.pkl"))


@pytest.mark.compile
@pytest.mark.parametrize("gfx", ["gfx942", "gfx950", "gfx1250"])
def test_kernels_link_and_land_where_the_key_says(compile_only: Path, gfx: str):
    with pinned(Target.of(gfx)):
        key = artifact_key(make_scale(2.0), ARGS)
        assert _files(compile_only) == []
        with toolkit_env(), own_launch():
            make_scale(2.0)(*ARGS)
    assert _files(compile_only) == [key.path()]
    assert gfx in key.parts["target"]


@pytest.mark.compile
def test_a_cache_built_with_no_rocm_is_found_with_bitcode_present(
    compile_only: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ROCM_PATH", str(_rocm(tmp_path / "none")))
    with toolkit_env(), own_launch():
        make_scale(2.0)(*ARGS)
    monkeypatch.setenv("ROCM_PATH", str(_rocm(tmp_path / "rocm", "ocml.bc", "ockl.bc")))
    monkeypatch.setenv("FLYDSL_RUNTIME_RUN_ONLY", "1")
    with own_launch():
        make_scale(2.0)(*ARGS)
    assert artifact_key(make_scale(2.0), ARGS).path().is_file()
    with pytest.raises(RuntimeError, match="no usable AOT cache"):
        make_scale(2.0)(*ARGS)


@pytest.mark.compile
def test_checking_before_device_code_does_not_change_it(
    compile_only: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with toolkit_env():
        with own_launch():
            make_scale(2.0)(*ARGS)
        (own,) = _files(compile_only)
        monkeypatch.setenv("FLYDSL_RUNTIME_CACHE_DIR", str(tmp_path / "other"))
        make_scale(2.0)(*ARGS)
    (foreign,) = _files(tmp_path / "other")
    assert own.name != foreign.name
    assert own.read_bytes() == foreign.read_bytes()


@pytest.mark.compile
def test_a_kernel_that_calls_a_device_library_is_refused_and_not_cached(compile_only: Path):
    with toolkit_env():
        with own_launch(), pytest.raises(DeviceLibraryError, match="__ocml_erf_f32.*exp2"):
            make_device_library()(0, 0, STREAM)
        assert _files(compile_only) == []
        with own_launch():
            make_scale(2.0)(*ARGS)
    assert len(_files(compile_only)) == 1


def test_text_that_names_a_device_library_is_refused():
    require_no_device_library("llvm.call @llvm.exp2.f32(%0)")
    with pytest.raises(DeviceLibraryError, match=r"\(__ockl_wfred_add, __ocml_exp_f32\)"):
        require_no_device_library("call @__ocml_exp_f32 call @__ockl_wfred_add @__ocml_exp_f32")


@pytest.mark.usefixtures("gfx950")
class TestScope:
    def test_the_fingerprint_is_constant_inside_and_flydsls_own_outside(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("ROCM_PATH", str(_rocm(tmp_path / "a", "a.bc")))
        backend.install()
        first = get_backend().toolkit_fingerprint()
        with own_launch():
            assert get_backend().toolkit_fingerprint() == OWN_FINGERPRINT
        assert get_backend().toolkit_fingerprint() == first
        monkeypatch.setenv("ROCM_PATH", str(_rocm(tmp_path / "b", "b.bc")))
        assert get_backend().toolkit_fingerprint() not in (first, OWN_FINGERPRINT)

    def test_the_toolchain_hash_is_not_shared_between_the_two_kinds(self):
        outside = [flydsl_private._jit._flydsl_key()]
        with own_launch():
            inside = flydsl_private._jit._flydsl_key()
        outside.append(flydsl_private._jit._flydsl_key())
        assert outside[0] == outside[1] != inside
        assert OWN_FINGERPRINT in inside

    def test_the_scope_ends_on_an_exception_and_nests(self):
        with pytest.raises(RuntimeError), own_launch():
            with own_launch():
                pass
            assert in_own_launch()
            raise RuntimeError
        assert not in_own_launch()

    def test_the_scope_is_of_one_thread(self):
        seen = []
        with own_launch():
            thread = threading.Thread(target=lambda: seen.append(in_own_launch()))
            thread.start()
            thread.join()
        assert seen == [False]

    def test_installing_twice_registers_one_class(self):
        backend.install()
        held = flydsl_private.registered_backend("rocm")
        run = flydsl_private._jit._run_pipeline
        backend.install()
        assert flydsl_private.registered_backend("rocm") is held
        assert flydsl_private._jit._run_pipeline is run

    def test_a_backend_registered_later_is_extended_in_turn(self):
        from flydsl.compiler.backends.rocm import RocmBackend

        backend.install()
        held = flydsl_private.registered_backend("rocm")
        run = flydsl_private._jit._run_pipeline

        class Extension(RocmBackend):
            def hash(self) -> str:
                return "extension"

        try:
            flydsl_private.replace_backend("rocm", Extension)
            with own_launch():
                assert get_backend().toolkit_fingerprint() == OWN_FINGERPRINT
                assert get_backend().hash() == "extension"
            assert flydsl_private._jit._run_pipeline is run
        finally:
            flydsl_private.replace_backend("rocm", held)


def test_an_own_launch_needs_a_target(monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("AITER_AOT_REPLAY", raising=False)
    with pytest.raises(TargetError), own_launch():
        pass
    assert not in_own_launch()


@pytest.mark.usefixtures("gfx950")
class TestKey:
    def test_values_do_not_reach_the_key_and_code_does(self):
        key = artifact_key(make_scale(2.0), ARGS)
        assert artifact_key(make_scale(2.0), (4096, 64, 7, STREAM)) == key
        other = artifact_key(make_scale(3.0), ARGS)
        assert other.sha256 != key.sha256
        assert list(other.differs_from(key.parts)) == ["mlir"]

    def test_a_difference_is_named(self, monkeypatch: pytest.MonkeyPatch):
        key = artifact_key(make_scale(2.0), ARGS)
        monkeypatch.setenv("FLYDSL_COMPILE_OPT_LEVEL", "3")
        other = artifact_key(make_scale(2.0), ARGS)
        assert other.sha256 != key.sha256
        assert other.differs_from(key.parts) == {"env.FLYDSL_COMPILE_OPT_LEVEL": ("3", "")}
        monkeypatch.delenv("FLYDSL_COMPILE_OPT_LEVEL")
        with pinned(Target.of("gfx942")):
            moved = artifact_key(make_scale(2.0), ARGS).differs_from(key.parts)
        assert {"backend", "target"} <= moved.keys()
        assert "mlir" not in moved

    def test_asking_for_a_key_writes_nothing_and_needs_no_linker(
        self, flydsl_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv("ROCM_PATH", str(tmp_path / "nowhere"))
        artifact_key(make_scale(2.0), ARGS)
        assert list(flydsl_cache.iterdir()) == []

    def test_a_failed_trace_leaves_no_scope_and_no_context(self):
        from flydsl._mlir import ir

        with pytest.raises(ZeroDivisionError):
            artifact_key(make_failing(), (0, STREAM))
        assert not in_own_launch()
        assert ir.Context.current is None
        assert artifact_key(make_scale(2.0), ARGS).function_name == "launch_scale"

    def test_the_path_follows_the_cache_folder(self, flydsl_cache: Path):
        key = artifact_key(make_scale(2.0), ARGS)
        assert key.path() == flydsl_cache / "launch_scale" / f"{key.sha256}.pkl"
        assert key.path(Path("/x")) == Path("/x/launch_scale") / key.path().name


def test_another_flydsl_version_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flydsl_private, "version", lambda name: "0.6.1")
    with pytest.raises(flydsl_private.FlydslVersionError, match=r"0\.6\.1.*'flydsl==0\.5\.\*'"):
        flydsl_private.require_version()
