"""Choose the launches of a request: the tuned row's kernels, or the heuristic ones.

`select` is pure. `Selector` keeps the plans of one set of tables, so that a request seen before
costs a dictionary read, and logs once per reason why a tuned row was passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from aiter.jit.tuned import FmoeTable, TunedRow
from aiter.ops.flydsl.kernel_names import KernelName, backend_of, parse
from aiter.ops.flydsl.kernels.moe_activate import ActivateKey, build_activate
from aiter.ops.flydsl.kernels.moe_reduce import ReduceKey
from aiter.ops.flydsl.kernels.moe_sort import SortKey, sort_key
from aiter.ops.flydsl.kernels.moe_stage1 import Stage1Key, build_stage1
from aiter.ops.flydsl.kernels.moe_stage2 import Stage2Key, build_stage2
from aiter.ops.flydsl.kernels.mx_quant_rows import QuantKey
from aiter.ops.flydsl.kernels.tensor_shim import Launch, launch_of

from .heuristics import heuristic_names
from .request import MoeRequest
from .sizes import sort_capacity, sort_chunks, stage2_groups
from .stages import activate_key, ignored, stage1_key, stage2_key, stage2_name, unsupported
from .tiers import MAX_TOKENS, TIERS

_log = logging.getLogger("aiter")


@dataclass(frozen=True)
class Plan:
    """The launches of a request, in order: sort, quantise, stage 1, activate or requantise,
    stage 2, reduce.

    activate: finishes a stage 1 whose K is split over workgroups, else None.
    quant: None for bf16 activations, which stage 1 reads as they are.
    requant: quantises stage 1's bf16 result; None if stage 1 or `activate` does that itself, and
        where stage 2 reads bf16.
    reduce: adds the route rows of stage 2; None if stage 2 accumulates.
    capacity: sorted rows to allocate. stage1_groups, stage2_groups: workgroups.
    source: the tuned row, file:line, or None for the heuristic kernels.
    reasons: why a tuned row was passed over. notes: what of the names has no effect.
    """

    sort: tuple[SortKey, ...]
    quant: QuantKey | None
    stage1: Stage1Key
    activate: ActivateKey | None
    requant: QuantKey | None
    stage2: Stage2Key
    reduce: ReduceKey | None
    capacity: int
    stage1_groups: int
    stage2_groups: int
    source: str | None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def select(request: MoeRequest, tables: FmoeTable) -> Plan:
    """The plan of `request`: its tuned row's kernels if they can serve it, else the heuristics.

    Raises NotImplementedError, with the reason, where neither can.
    """
    reason = unsupported(request)
    if reason is not None:
        raise NotImplementedError(reason)
    if request.tokens > MAX_TOKENS:
        raise NotImplementedError(f"{request.tokens} tokens, a sorted id holds {MAX_TOKENS}")
    row = None if request.policy.bypass_tables else find_row(request, tables)
    reasons: tuple[str, ...] = ()
    if row is not None:
        try:
            stage1, stage2 = _row_names(row, request)
            return _plan(request, stage1, stage2, row.block_m, str(row.source))
        except NotImplementedError as refusal:
            reasons = (f"{row.source}: {refusal}",)
    if not request.policy.use_heuristics:
        raise NotImplementedError("; ".join((*reasons, "AITER_FLYDSL_FORCE=0 bars heuristics")))
    stage1, stage2 = heuristic_names(request)
    return _plan(request, stage1, stage2, request.block_m or stage1.tile_m, None, reasons)


def find_row(request: MoeRequest, tables: FmoeTable) -> TunedRow | None:
    """The tuned row for `request`; the highest tier falls back to the one below it."""
    key = request.tuned_key()
    row = tables.lookup(key)
    if row is None and key.token == TIERS[1]:
        row = tables.lookup(replace(key, token=TIERS[0]))
    return row


def mixed_row_launches(request: MoeRequest, row: TunedRow) -> tuple[Launch, ...]:
    """The FlyDSL stage of a row whose other stage is another backend's; () for other rows.

    `fused_moe` here serves such a row by the heuristic pair, other runtimes by both stages of
    the row, so the FlyDSL one is built as well. Raises NotImplementedError with the reason.
    """
    backends = (backend_of(row.kernel1), backend_of(row.kernel2))
    if backends.count("flydsl") != 1:
        return ()
    reason = unsupported(request)
    if reason is not None:
        raise NotImplementedError(reason)
    if backends[1] == "flydsl":
        return (launch_of(build_stage2(stage2_key(request, parse(row.kernel2), row.block_m))),)
    stage1 = stage1_key(request, parse(row.kernel1), row.block_m)
    activate = activate_key(request, stage1)
    finish = () if activate is None else (launch_of(build_activate(activate)),)
    return (launch_of(build_stage1(stage1)), *finish)


def _row_names(row: TunedRow, request: MoeRequest) -> tuple[KernelName, KernelName]:
    foreign = [
        f"stage {stage} is {backend}'s {name}" if name else f"stage {stage} has no kernel"
        for stage, name in ((1, row.kernel1), (2, row.kernel2))
        if (backend := backend_of(name)) != "flydsl"
    ]
    if foreign:
        raise NotImplementedError("; ".join(foreign))
    if request.block_m not in (None, row.block_m):
        raise NotImplementedError(
            f"the row sorts in blocks of {row.block_m}, the caller in {request.block_m}"
        )
    return parse(row.kernel1), parse(row.kernel2)


def _sort_keys(request: MoeRequest, block_m: int, zero: bool) -> Iterator[SortKey]:
    one = sort_chunks(request.tokens, request.topk) == 1
    for phase in ("all",) if one else ("count", "offsets", "place"):
        yield sort_key(
            phase,
            experts=request.experts,
            topk=request.topk,
            block_m=block_m,
            local_tokens=request.caller.local_tokens,
            masked=request.caller.expert_parallel,
            zero=zero,
        )


def _plan(
    request: MoeRequest,
    name1: KernelName,
    name2: KernelName,
    block_m: int,
    source: str | None,
    reasons: tuple[str, ...] = (),
) -> Plan:
    stage1 = stage1_key(request, name1, block_m)
    stage2 = stage2_key(request, name2, block_m)
    activate = activate_key(request, stage1)
    a_format = stage2.tile.a_format
    if stage1.requant not in (None, a_format):
        raise NotImplementedError(
            f"stage 1 quantises to {stage1.requant}, stage 2 reads {a_format}"
        )
    widened = stage2.tile.widened
    ready = widened or activate is not None or stage1.requant is not None
    reduced = stage2.epilogue == "reduce"
    capacity = sort_capacity(request.tokens, request.topk, request.experts, block_m)
    m_blocks2 = capacity // stage2.tile.tile_m
    grid = stage2_name(name2)
    return Plan(
        sort=tuple(_sort_keys(request, block_m, zero=not reduced)),
        quant=None if widened else QuantKey(request.model_dim, a_format, request.topk),
        stage1=stage1,
        activate=activate,
        requant=None if ready else QuantKey(request.inter_dim, a_format, None),
        stage2=stage2,
        reduce=(ReduceKey(request.model_dim, request.topk) if reduced else None),
        capacity=capacity,
        stage1_groups=capacity // stage1.tile.tile_m * stage1.groups_of_row_block,
        stage2_groups=stage2_groups(
            m_blocks2 * stage2.n_blocks,
            m_blocks2,
            stage2.tile,
            grid.persist,
            request.target.cu_num,
            grid.cu_num_mul if grid.cu_num_mul > 1 else None,
        ),
        source=source,
        reasons=reasons,
        notes=(*ignored(name1), *ignored(name2)),
    )


class Selector:
    """Plans of one set of tables, each made once."""

    def __init__(self, tables: FmoeTable) -> None:
        self.tables = tables
        self._told: set[str] = set()
        self.plan = lru_cache(maxsize=8192)(self._select)

    def _select(self, request: MoeRequest) -> Plan:
        plan = select(request, self.tables)
        for reason in plan.reasons:
            if reason not in self._told:
                self._told.add(reason)
                _log.warning("tuned row passed over for the heuristic kernels: %s", reason)
        return plan
