"""Instruction mix of the MX main loops, from their ISA: `python -m benchmarks.main_loop`.

Compiles a few representative stage 1 and stage 2 kernels for gfx950, finds the K loop in the
assembly and prints, per kernel: instructions of one pass, MFMA among them and their share of
issue slots, 16-byte LDS and global accesses per MFMA in bytes, registers, LDS and the waves a
SIMD then holds. Whole-program counts stand beside it, for comparison with other kernels.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from aiter import env
from aiter.jit.utils.chip_info import GFX_LDS_BYTES, Target, pinned
from aiter.jit.utils.toolkit import toolkit_env
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import parse
from aiter.ops.flydsl.kernels.moe_stage1 import build_stage1
from aiter.ops.flydsl.kernels.moe_stage2 import build_stage2
from aiter.ops.flydsl.kernels.resources import launcher_resources
from aiter.ops.flydsl.kernels.tensor_shim import compile_artifact
from aiter.ops.flydsl.moe.request import CallerVariant, MoeRequest, Policy
from aiter.ops.flydsl.moe.stages import FORMAT, stage1_key, stage2_key

TARGET = Target.of("gfx950")
REGISTERS = 512
LANES = 64

# (name, D, I, sort block) of each kernel; the layout follows the name.
KERNELS = (
    ("flydsl_moe1_afp8_wfp4_bf16_t64x128x256_w2_gui_fp8", 7168, 512, 64),
    ("flydsl_moe1_afp8_wfp4_bf16_t32x64x256_w4_gui_kw4_fp8", 7168, 512, 32),
    ("flydsl_moe1_afp8_wfp4_bf16_t128x256x256_gui_xcd4_fp8", 7168, 512, 128),
    ("flydsl_moe1_afp4_wfp4_bf16_t64x128x256_w2_fp4", 7168, 512, 64),
    ("flydsl_moe1_afp8_wfp8_bf16_t128x128x256_gui_fp8", 6144, 512, 128),
    ("flydsl_moe1_abf16_wfp4_bf16_t32x128x256_w4", 3584, 512, 32),
    ("flydsl_moe1_abf16_wfp4_bf16_t128x128x256", 3584, 512, 128),
    ("flydsl_moe2_afp8_wfp4_bf16_t32x128x256_atomic_bnt2", 7168, 3072, 32),
    ("flydsl_moe2_afp8_wfp4_bf16_t64x256x256_atomic", 7168, 3072, 64),
    ("flydsl_moe2_abf16_wfp4_bf16_t32x128x256_atomic_bnt2", 3072, 3072, 32),
)

_WIDTH = re.compile(r"_(dwordx4|dwordx3|dwordx2|dword|b128|b96|b64|b32)\b")
_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_BYTES |= {"b32": 4, "b64": 8, "b96": 12, "b128": 16}


@dataclass(frozen=True)
class Mix:
    """Counts over a run of instructions; bytes are those of a wave."""

    instructions: int
    mfma: int
    lds_bytes: int
    global_bytes: int
    kinds: Counter

    @classmethod
    def of(cls, lines: list[str]) -> Mix:
        names = [line.split()[0] for line in lines if _is_instruction(line)]
        lds = sum(_bytes(name) for name in names if name.startswith("ds_read"))
        read = sum(
            _bytes(name) for name in names if name.startswith(("buffer_load", "global_load"))
        )
        return cls(
            instructions=len(names),
            mfma=sum("mfma" in name for name in names),
            lds_bytes=lds * LANES,
            global_bytes=read * LANES,
            kinds=Counter(_kind(name) for name in names),
        )


def _is_instruction(line: str) -> bool:
    return line.startswith("\t") and not line.strip().startswith((".", ";")) and bool(line.strip())


def _bytes(name: str) -> int:
    found = _WIDTH.search(name)
    return _BYTES[found.group(1)] if found else 0


def _kind(name: str) -> str:
    if "mfma" in name:
        return "mfma"
    for prefix, kind in (
        ("ds_", "lds"),
        ("buffer_", "memory"),
        ("global_", "memory"),
        ("s_waitcnt", "wait"),
        ("s_barrier", "wait"),
        ("s_nop", "wait"),
        ("s_", "scalar"),
    ):
        if name.startswith(prefix):
            return kind
    return "vector"


def _kernel_lines(assembly: str, kernel: str) -> list[str]:
    lines = assembly.splitlines()
    start = lines.index(f"{kernel}:")
    end = next(i for i in range(start, len(lines)) if lines[i].startswith(".Lfunc_end"))
    return lines[start:end]


def _main_loop(lines: list[str]) -> list[str]:
    """The innermost loop with the most MFMA: from a label to the branch back to it."""
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".LBB")}
    loops = []
    for i, line in enumerate(lines):
        words = line.split()
        if words and words[0].startswith("s_cbranch") and labels.get(words[-1], i) < i:
            loops.append(lines[labels[words[-1]] : i + 1])
    with_mfma = [loop for loop in loops if any("mfma" in line for line in loop)]
    return min(with_mfma, key=len) if with_mfma else []


def _request(name: object, model_dim: int, inter_dim: int) -> MoeRequest:
    types = {text: dtype for dtype, text in FORMAT.items()}
    mode = getattr(name, "gate_mode", GateMode.INTERLEAVE)
    return MoeRequest(
        target=TARGET,
        policy=Policy(False, True, False),
        tokens=1,
        model_dim=model_dim,
        inter_dim=inter_dim,
        experts=256,
        topk=8,
        dtype="bfloat16",
        a_dtype=types[name.a_dtype],
        w_dtype=types[name.w_dtype],
        activation=ActivationType.Silu,
        quant_type=QuantType.per_1x32,
        use_g1u1=True,
        doweight_stage1=False,
        shuffled=True,
        caller=CallerVariant(mode),
    )


def _row(text: str, model_dim: int, inter_dim: int, block_m: int) -> str:
    name = parse(text)
    request = _request(name, model_dim, inter_dim)
    stage1 = text.startswith("flydsl_moe1")
    key = (stage1_key if stage1 else stage2_key)(request, name, block_m)
    launcher = (build_stage1 if stage1 else build_stage2)(key)
    with tempfile.TemporaryDirectory() as folder, pinned(TARGET), toolkit_env():
        settings = {
            "FLYDSL_DEBUG_DUMP_ASM": "1",
            "FLYDSL_DUMP_DIR": folder,
            "FLYDSL_RUNTIME_CACHE_DIR": f"{folder}/cache",
        }
        with env.overlay(settings), contextlib.redirect_stdout(io.StringIO()):
            compile_artifact(launcher)
        assembly = next(Path(folder).glob("*/*final_isa.s")).read_text()
    resources = launcher_resources(launcher)[0]
    lines = _kernel_lines(assembly, resources.kernel)
    loop, whole = Mix.of(_main_loop(lines)), Mix.of(lines)
    waves_by_registers = REGISTERS // (-(-resources.vgprs // 8) * 8)
    groups = min(
        GFX_LDS_BYTES[TARGET.gfx] // resources.lds_bytes,
        4 * waves_by_registers * LANES // resources.threads,
    )
    waves = max(1, groups) * resources.threads // LANES / 4
    share = loop.mfma / loop.instructions if loop.instructions else 0
    per = max(loop.mfma, 1)
    return (
        f"| {text.removeprefix('flydsl_')} | {loop.instructions} | {loop.mfma} | {share:.0%} | "
        f"{loop.lds_bytes / per:.0f} | {loop.global_bytes / per:.0f} | {resources.vgprs} | "
        f"{resources.agprs} | {resources.lds_bytes >> 10} | {resources.threads} | {waves:g} | "
        f"{whole.mfma}/{whole.instructions} | {resources.spilled + resources.scratch_bytes} |"
    )


def main() -> None:
    print(
        "| kernel | loop | MFMA | share | LDS B/MFMA | global B/MFMA | VGPR | AGPR | LDS KiB | "
        "threads | waves/SIMD | program MFMA/all | spills |"
    )
    print("|---" * 13 + "|")
    for kernel in KERNELS:
        print(_row(*kernel), flush=True)


if __name__ == "__main__":
    main()
