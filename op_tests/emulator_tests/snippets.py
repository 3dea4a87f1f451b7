"""Single operations run through the emulator, from text in the lowered dialects."""

from __future__ import annotations

import numpy as np
import torch

from op_tests.emulator import emulated
from op_tests.emulator.lltypes import parse_type
from op_tests.emulator.lowering import parse_program

_MODULE = """
module attributes {{gpu.container_module}} {{
  gpu.module @kernels {{
    {shared}
    llvm.func @snippet({parameters}) attributes {{gpu.kernel, rocdl.kernel}} {{
{body}
      llvm.return
    }}
  }}
  llvm.func @host({parameters}) {{
    %one = llvm.mlir.constant(1 : i64) : i64
    %grid = llvm.mlir.constant({grid} : i64) : i64
    %cluster = llvm.mlir.constant({cluster} : i64) : i64
    %block = llvm.mlir.constant({block} : i64) : i64
    gpu.launch_func @kernels::@snippet {clusters}blocks in (%grid, %one, %one)
      threads in (%block, %one, %one) : i64 args({arguments})
    llvm.return
  }}
}}
"""
LDS = "llvm.mlir.global external @lds() {{addr_space = 3 : i32}} : !llvm.array<{} x i8>"


def module_text(
    body: str, pointers: int, block: int, grid: int = 1, lds: int = 0, cluster: int = 1
) -> str:
    """A module with kernel ``@snippet``; ``%arg0``, ... are global pointers, LDS is ``@lds``."""
    names = [f"%arg{n}" for n in range(pointers)]
    return _MODULE.format(
        body=body,
        parameters=", ".join(f"{n}: !llvm.ptr<1>" for n in names),
        arguments=", ".join(f"{n} : !llvm.ptr<1>" for n in names),
        block=block,
        grid=grid,
        clusters="clusters in (%cluster, %one, %one) " if cluster > 1 else "",
        cluster=cluster,
        shared=LDS.format(lds) if lds else "",
    )


def run_module(arch: str, text: str, tensors: list[torch.Tensor], **options: object) -> None:
    """Run the host function of ``text`` on ``tensors``; ``options`` are those of ``emulated``."""
    program = parse_program(text, arch, "host")
    with emulated(arch, **options) as emu:
        for tensor in tensors:
            emu.register(tensor)
        values = [np.array([t.data_ptr()], np.int64) for t in tensors]
        for _ in emu.program_rounds(program, values):
            pass


def apply_operation(
    arch: str,
    operation: str,
    operands: list[tuple[str, np.ndarray]],
    result: str,
    waves: int = 2,
    before: str = "%r",
    **options: object,
) -> np.ndarray:
    """The raw result of one operation, ``(lanes, size)`` uint8.

    ``operation``: text with ``{0}``, ``{1}``, ... for the operands. ``operands``: type and raw
    ``(lanes, size)`` uint8 content of each. ``before``: text that goes before the operation, with
    the same placeholders; it ends in ``%r``, the result's name.
    """
    width = 32 if arch == "gfx1250" else 64
    lines = ["%tid = rocdl.workitem.id.x : i32"]
    for n, (kind, _) in enumerate(operands):
        size = parse_type(kind).size
        lines.append(
            f"%p{n} = llvm.getelementptr %arg{n}[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, "
            f"!llvm.array<{size} x i8>"
        )
        lines.append(f"%v{n} = llvm.load %p{n} {{alignment = 1 : i64}} : !llvm.ptr<1> -> {kind}")
    size = parse_type(result).size
    names = [f"%v{n}" for n in range(len(operands))]
    lines.append(f"{before.format(*names)} = {operation.format(*names)}")
    last = len(operands)
    lines.append(
        f"%pr = llvm.getelementptr %arg{last}[%tid] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, "
        f"!llvm.array<{size} x i8>"
    )
    lines.append(f"llvm.store %r, %pr {{alignment = 1 : i64}} : {result}, !llvm.ptr<1>")
    lanes = waves * width
    tensors = [torch.from_numpy(np.ascontiguousarray(raw).copy()) for _, raw in operands]
    assert all(
        t.shape == (lanes, parse_type(k).size) for t, (k, _) in zip(tensors, operands, strict=True)
    )
    out = torch.zeros((lanes, size), dtype=torch.uint8)
    text = module_text("\n".join(lines), last + 1, lanes)
    run_module(arch, text, [*tensors, out], **options)
    return out.numpy()
