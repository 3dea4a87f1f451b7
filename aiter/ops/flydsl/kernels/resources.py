"""What a compiled kernel takes of the machine, read out of its artifact."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flydsl.compiler.jit_function import JitFunction

from aiter.jit.utils.flydsl_private import compiled_texts

_METADATA = re.compile(r'#gpu\.kernel_metadata<"([^"]+)".*?metadata = \{(.*?)\}', re.DOTALL)
_FIELD = re.compile(r"(\w+) = (?:array<i32: )?(-?\d+)")


@dataclass(frozen=True)
class KernelResources:
    """Registers a lane (`vgprs` includes `agprs`), registers a wave (`sgprs`), spilled registers,
    scratch bytes a lane, LDS bytes and threads a workgroup."""

    kernel: str
    vgprs: int
    agprs: int
    sgprs: int
    spilled: int
    scratch_bytes: int
    lds_bytes: int
    threads: int


def launcher_resources(launcher: JitFunction) -> tuple[KernelResources, ...]:
    """The kernels of a launcher that this process has compiled or loaded.

    Raises RuntimeError if it has neither, or if the artifact holds no device code.
    """
    texts = compiled_texts(launcher)
    if not texts:
        raise RuntimeError(f"{launcher.func.__name__} is not compiled in this process")
    found = [_parse(name, body) for name, body in _METADATA.findall(texts[-1])]
    if not found:
        raise RuntimeError(f"{launcher.func.__name__}: the artifact holds no device code")
    return tuple(found)


def _parse(name: str, body: str) -> KernelResources:
    fields = {key: int(value) for key, value in _FIELD.findall(body)}
    return KernelResources(
        kernel=name,
        vgprs=fields["vgpr_count"],
        agprs=fields["agpr_count"],
        sgprs=fields["sgpr_count"],
        spilled=fields["vgpr_spill_count"] + fields["sgpr_spill_count"],
        scratch_bytes=fields["private_segment_fixed_size"],
        lds_bytes=fields["group_segment_fixed_size"],
        threads=fields["max_flat_workgroup_size"],
    )
