"""Kernels that compile in a moment, builders that misbehave, and small tables."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import flydsl.compiler as flyc

from aiter.aot.flydsl.common import LaunchRequest
from aiter.aot.flydsl.engine import BuildOptions
from aiter.jit.utils.toolkit import find_toolkit
from aiter.ops.flydsl.kernels.tensor_shim import BuildRef, Launch, kernel_builder, launch_of
from op_tests.host.sample_kernels import (
    make_device_library,
    make_failing,
    make_hungry,
    make_scale,
)

CONTEXTS = {gfx: {"target": gfx, "kernel sources": "0"} for gfx in ("gfx942", "gfx950")}
_SIGNATURE = ("i64", "i64", "i32", "stream")


@dataclass(frozen=True)
class ScaleKey:
    """`label` changes no code."""

    factor: float
    label: str = ""


@kernel_builder
def build_scale(key: ScaleKey) -> flyc.JitFunction:
    return make_scale(key.factor)


@dataclass(frozen=True)
class FailKey:
    number: int = 0


@kernel_builder
def build_failing(key: FailKey) -> flyc.JitFunction:
    return make_failing()


@dataclass(frozen=True)
class HungryKey:
    """Bytes of LDS."""

    lds_bytes: int


@kernel_builder
def build_hungry(key: HungryKey) -> flyc.JitFunction:
    return make_hungry(key.lds_bytes)


@dataclass(frozen=True)
class ErfKey:
    """Traces, but does not compile: it needs ROCm's device library."""


@kernel_builder
def build_erf(key: ErfKey) -> flyc.JitFunction:
    return make_device_library()


@dataclass(frozen=True)
class DeadlyKey:
    """Kills the process that builds it, as often as `times`; `folder` counts."""

    folder: str
    times: int
    factor: float = 7.0


@kernel_builder
def build_deadly(key: DeadlyKey) -> flyc.JitFunction:
    marks = Path(key.folder)
    seen = len(list(marks.glob("death*")))
    if seen < key.times:
        (marks / f"death{seen}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return make_scale(key.factor)


@dataclass(frozen=True)
class SlowKey:
    seconds: float
    factor: float = 5.0


@kernel_builder
def build_slow(key: SlowKey) -> flyc.JitFunction:
    time.sleep(key.seconds)
    return make_scale(key.factor)


def scale_request(factor: float, gfx: str = "gfx950", label: str = "") -> LaunchRequest:
    launch = launch_of(build_scale(ScaleKey(factor, label)))
    return LaunchRequest(gfx, launch, (f"t.csv:{int(factor)}",))


def unbuilt_request(builder: str, key: object) -> LaunchRequest:
    """A request whose builder is not run here."""
    launch = Launch(BuildRef(__name__, builder, key), _SIGNATURE)
    return LaunchRequest("gfx950", launch, ("t.csv:2",))


def build_options(cache: Path, **changes: object) -> BuildOptions:
    options = {"workers": 2, "timeout": 60.0, "retries": 1, "tables": ("t.csv",), **changes}
    return BuildOptions(cache=cache, toolkit=find_toolkit(), **options)  # type: ignore[arg-type]


def quiet(line: str) -> None:
    """A log nobody reads."""


# ---------------------------------------------------------------- tables

ROW = {
    "gfx": "gfx950",
    "cu_num": "256",
    "token": "16",
    "model_dim": "512",
    "inter_dim": "256",
    "expert": "8",
    "topk": "2",
    "act_type": "ActivationType.Silu",
    "dtype": "torch.bfloat16",
    "q_dtype_a": "torch.float8_e4m3fn",
    "q_dtype_w": "torch.float4_e2m1fn_x2",
    "q_type": "QuantType.per_1x32",
    "use_g1u1": "1",
    "doweight_stage1": "0",
    "block_m": "32",
    "kernelName1": "flydsl_moe1_afp8_wfp4_bf16_t32x128x256_w2_gui_fp8",
    "kernelName2": "flydsl_moe2_afp8_wfp4_bf16_t32x128x256_atomic_bnt2",
    "us": "",
    "_tag": "",
}


def write_table(path: Path, *changes: dict[str, str]) -> Path:
    """A table of one row per argument, each ROW with those cells changed."""
    rows = [{**ROW, **change} for change in changes]
    lines = [",".join(ROW)] + [",".join(row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path
