"""Reasons why a deployment cannot run mono kernels, whatever the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aiter.jit.utils.chip_info import Target
from atom.mono.plan.execution import BLOCKS

ARCHS = ("gfx950",)


@dataclass(frozen=True)
class Deployment:
    """How a model is served.

    `tensor_parallel` ranks share each layer; the other counts are 1 where that kind of parallelism
    is not used. `page` is tokens of a cache page, `context` the longest sequence in tokens.
    """

    target: Target
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel_attention: int = 1
    expert_parallel: int = 1
    kv_dtype: str = "fp8"
    page: int = 128
    context: int = 1 << 20
    lora: bool = False


def common_refusals(deployment: Deployment, supported_tp: Iterable[int]) -> Iterator[str]:
    """What the persistent grid and the in-kernel all-reduce do not do, one reason each."""
    d, tp = deployment, sorted(supported_tp)
    if d.target.gfx not in ARCHS:
        yield f"mono kernels are written for {', '.join(ARCHS)}, not {d.target.gfx}"
    elif d.target.cu_num != BLOCKS:
        yield (
            f"the grid is one workgroup on each of {BLOCKS} compute units, the device has "
            f"{d.target.cu_num}"
        )
    if d.tensor_parallel not in tp:
        yield f"tensor parallel {d.tensor_parallel} is none of {', '.join(map(str, tp))}"
    for count, what in (
        (d.pipeline_parallel, "pipeline parallel"),
        (d.data_parallel_attention, "data parallel attention"),
        (d.expert_parallel, "expert parallel"),
    ):
        if count != 1:
            yield f"{what} {count}: a step runs all layers, with all experts, on every rank"
    if d.lora:
        yield "LoRA adapters are not applied inside mono kernels"


def first_refusal(reasons: Iterable[str | None]) -> str | None:
    """The first reason there is, None if there is none."""
    return next((reason for reason in reasons if reason), None)
