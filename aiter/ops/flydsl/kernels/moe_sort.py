"""Routing sort: group the (token, slot) routes by expert, each run padded to whole row blocks.

    sorted_ids      (capacity) i32   token | slot << 24 in ascending (token, slot) per expert;
                                     padding is tokens | topk << 24
    sorted_weights  (capacity) f32   the route's weight; padding 0
    expert_ids      (capacity / block_m) i32
    num_valid       (2) i32          rows in use, padding included; tokens
    route_rows      (tokens * topk) i32   where each route went, -1 for those that went nowhere
    capacity: whole blocks for any routing, `sizes.sort_capacity`

An expert is one thread: it walks over the routes of a chunk, held in LDS, and takes those that
name it, so the order inside an expert is that of the routes without any sorting network. Few
routes are one chunk and one launch, "all". More of them take three launches over `chunks`
chunks: "count" leaves each chunk's count of each expert in `counts`, "offsets" turns counts
into first rows and writes padding and block owners, "place" writes the routes.

Tokens from `num_local_tokens` on are not real, and with an `expert_mask` over the experts of all
ranks only those with 1 are here, numbered in order. Other routes go nowhere, and so do routes to an
id that is no expert's: callers mark slots that way.

The first launch also zeroes `zero_chunks` times 16 bytes at `zero`, which stage 2 accumulates
into, in workgroups of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx

from .device import LANES, div, global_pointer, load_word, mod, traced
from .moe_routes import SLOT_SHIFT
from .tensor_shim import kernel_builder

MAX_EXPERTS = 1024
MAX_GLOBAL_EXPERTS = 4096
CHUNK_ROUTES = 4096
ZERO_GROUPS = 512
PHASES = ("all", "count", "offsets", "place")


@dataclass(frozen=True)
class SortKey:
    """Everything that decides the code of one phase of the sort. Made by `sort_key`."""

    phase: str
    threads: int  # one an expert, in whole waves
    topk: int
    block_m: int  # 0 where the phase does not ask
    local_tokens: bool  # the number of real tokens is read from the device
    masked: bool  # expert ids are global and masked
    zero: bool


def sort_key(
    phase: str,
    *,
    experts: int,
    topk: int,
    block_m: int,
    local_tokens: bool = False,
    masked: bool = False,
    zero: bool = False,
) -> SortKey:
    """The key of a phase; what reaches no code of that phase is left out of it.

    Raises ValueError for an unknown phase or more experts than a workgroup has threads.
    """
    if phase not in PHASES or not 0 < experts <= MAX_EXPERTS:
        raise ValueError(f"phase {phase!r} of {PHASES}, {experts} experts of {MAX_EXPERTS}")
    pads, reads = phase in ("all", "offsets"), phase != "offsets"
    return SortKey(
        phase=phase,
        threads=max(256, -(-experts // LANES) * LANES),
        topk=topk,
        block_m=block_m if pads else 0,
        local_tokens=local_tokens,
        masked=masked and reads,
        zero=zero and phase in ("all", "count"),
    )


@kernel_builder
def build_sort(key: SortKey) -> flyc.JitFunction:
    """Launcher (topk_ids, topk_weights, sorted_ids, sorted_weights, expert_ids, num_valid,
    route_rows, counts, num_local_tokens, expert_mask, zero, tokens, chunks, global_experts,
    experts, zero_chunks, stream)."""

    @flyc.kernel(known_block_size=[key.threads, 1, 1])
    def moe_sort(
        topk_ids: fx.Int64,
        topk_weights: fx.Int64,
        sorted_ids: fx.Int64,
        sorted_weights: fx.Int64,
        expert_ids: fx.Int64,
        num_valid: fx.Int64,
        route_rows: fx.Int64,
        counts: fx.Int64,
        num_local_tokens: fx.Int64,
        expert_mask: fx.Int64,
        zero: fx.Int64,
        tokens: fx.Int32,
        chunks: fx.Int32,
        global_experts: fx.Int32,
        experts: fx.Int32,
        zero_chunks: fx.Int32,
    ):
        thread = fx.Int32(fx.thread_idx.x)
        group = fx.Int32(fx.block_idx.x)
        shared = fx.SharedAllocator()
        storage = shared.allocate(fx.Array[fx.Int32, CHUNK_ROUTES, 16]).peek().ptr
        sums = shared.allocate(fx.Array[fx.Int32, key.threads, 16]).peek().ptr
        local = sums
        if fx.const_expr(key.masked):
            local = shared.allocate(fx.Array[fx.Int32, MAX_GLOBAL_EXPERTS, 16]).peek().ptr
        if group >= chunks:
            if fx.const_expr(key.zero):
                _zero(key, zero, zero_chunks, group - chunks, thread)
        else:
            real = tokens
            if fx.const_expr(key.local_tokens):
                real = fx.min(load_word(num_local_tokens, 0), tokens)
            first_route = group * CHUNK_ROUTES
            routes = fx.max(
                fx.min(real * key.topk - first_route, fx.Int32(CHUNK_ROUTES)), fx.Int32(0)
            )
            quads = div(routes + 3, 4)
            counted = global_pointer(fx.Int32, counts) + (group * key.threads + thread)
            if fx.const_expr(key.phase != "offsets"):
                if fx.const_expr(key.masked):
                    _local_ids(key, local, sums, expert_mask, global_experts, thread)
                _load_routes(
                    key,
                    storage,
                    local,
                    topk_ids,
                    first_route,
                    routes,
                    quads * 4,
                    global_experts,
                    experts,
                    thread,
                )
                fx.gpu.barrier()
            row = fx.Int32(0)
            if fx.const_expr(key.phase == "count"):
                counted.store(_count(storage, quads, thread))
            if fx.const_expr(key.phase == "place"):
                row = counted.load()
            if fx.const_expr(key.phase == "all"):
                row = _first_row(
                    key,
                    sums,
                    _count(storage, quads, thread),
                    thread,
                    tokens,
                    real,
                    sorted_ids,
                    sorted_weights,
                    expert_ids,
                    num_valid,
                )
            if fx.const_expr(key.phase == "offsets"):
                _chunk_rows(
                    key,
                    sums,
                    counts,
                    chunks,
                    thread,
                    tokens,
                    real,
                    sorted_ids,
                    sorted_weights,
                    expert_ids,
                    num_valid,
                )
            if fx.const_expr(key.phase in ("all", "place")):
                _place(
                    key,
                    storage,
                    row,
                    first_route,
                    routes,
                    tokens,
                    thread,
                    topk_weights,
                    sorted_ids,
                    sorted_weights,
                    route_rows,
                )

    @flyc.jit
    def launch_moe_sort(
        topk_ids: fx.Int64,
        topk_weights: fx.Int64,
        sorted_ids: fx.Int64,
        sorted_weights: fx.Int64,
        expert_ids: fx.Int64,
        num_valid: fx.Int64,
        route_rows: fx.Int64,
        counts: fx.Int64,
        num_local_tokens: fx.Int64,
        expert_mask: fx.Int64,
        zero: fx.Int64,
        tokens: fx.Int32,
        chunks: fx.Int32,
        global_experts: fx.Int32,
        experts: fx.Int32,
        zero_chunks: fx.Int32,
        stream: fx.Stream,
    ):
        # One workgroup finds the offsets of all chunks; elsewhere a workgroup is a chunk.
        groups = chunks + ZERO_GROUPS if key.zero else chunks
        if key.phase == "offsets":
            groups = fx.Int32(1)
        moe_sort(
            topk_ids,
            topk_weights,
            sorted_ids,
            sorted_weights,
            expert_ids,
            num_valid,
            route_rows,
            counts,
            num_local_tokens,
            expert_mask,
            zero,
            tokens,
            chunks,
            global_experts,
            experts,
            zero_chunks,
        ).launch(grid=(groups, 1, 1), block=(key.threads, 1, 1), stream=stream)

    return launch_moe_sort


@traced
def _zero(
    key: SortKey, zero: fx.Int64, zero_chunks: fx.Int32, group: fx.Int32, thread: fx.Int32
) -> None:
    first = group * key.threads + thread
    for i in range(first, zero_chunks, fx.Int32(ZERO_GROUPS * key.threads)):
        at = global_pointer(fx.Int32, zero + fx.Int64(i) * 16, 16)
        fx.generic_store(at, fx.Vector.filled(4, 0, fx.Int32))


@traced
def _load_routes(
    key: SortKey,
    storage: fx.Pointer,
    local: fx.Pointer,
    topk_ids: fx.Int64,
    first_route: fx.Int32,
    routes: fx.Int32,
    padded: fx.Int32,
    global_experts: fx.Int32,
    experts: fx.Int32,
    thread: fx.Int32,
) -> None:
    """Expert of each of the chunk's routes into LDS, -1 for none and up to `padded`."""
    ids = global_pointer(fx.Int32, topk_ids)
    for i in range(thread, padded, fx.Int32(key.threads)):
        expert = fx.Int32(-1)
        if i < routes:
            expert = ids[first_route + i]
            if fx.const_expr(key.masked):
                known = expert
                expert = fx.Int32(-1)
                if fx.Uint32(known) < fx.Uint32(global_experts):
                    expert = local[known]
            here = fx.Uint32(expert) < fx.Uint32(experts)
            expert = here.select(expert, fx.Int32(-1))
        storage[i] = expert


@traced
def _local_ids(
    key: SortKey,
    local: fx.Pointer,
    sums: fx.Pointer,
    expert_mask: fx.Int64,
    global_experts: fx.Int32,
    thread: fx.Int32,
) -> None:
    """Number of each expert among those of the mask into LDS, -1 for the others."""
    mask = global_pointer(fx.Int32, expert_mask)
    before = fx.Int32(0)
    for first in range(fx.Int32(0), global_experts, fx.Int32(key.threads)):
        here = fx.Int32(0)
        if first + thread < global_experts:
            here = (mask[first + thread] != 0).select(fx.Int32(1), fx.Int32(0))
        total = before + _inclusive_sum(key, sums, here, thread)
        if first + thread < global_experts:
            local[first + thread] = (here != 0).select(total - 1, fx.Int32(-1))
        fx.gpu.barrier()
        sums[thread] = total
        fx.gpu.barrier()
        before = sums[fx.Int32(key.threads - 1)]
        fx.gpu.barrier()


def _quads(storage: fx.Pointer) -> fx.Tensor:
    """The chunk's routes, four at a time."""
    layout = fx.make_layout((4, CHUNK_ROUTES // 4), (1, 4))
    return fx.make_view(storage, layout)


@traced
def _count(storage: fx.Pointer, quads: fx.Int32, expert: fx.Int32) -> fx.Int32:
    """Routes of the chunk that go to `expert`."""
    held = _quads(storage)
    count = fx.Int32(0)
    for i in range(fx.Int32(0), quads):
        four = held[None, i].load()
        for j in fx.range_constexpr(4):
            count = count + (four[j] == expert).select(fx.Int32(1), fx.Int32(0))
    return count


@traced
def _first_row(
    key: SortKey,
    sums: fx.Pointer,
    count: fx.Int32,
    expert: fx.Int32,
    tokens: fx.Int32,
    real: fx.Int32,
    sorted_ids: fx.Int64,
    sorted_weights: fx.Int64,
    expert_ids: fx.Int64,
    num_valid: fx.Int64,
) -> fx.Int32:
    """The expert's first row; also writes its padding, its blocks' owner and the totals."""
    blocks = div(count + (key.block_m - 1), key.block_m)
    total = _inclusive_sum(key, sums, blocks, expert)
    first_block = total - blocks
    first = first_block * key.block_m
    ids = global_pointer(fx.Int32, sorted_ids)
    weights = global_pointer(fx.Float32, sorted_weights)
    owners = global_pointer(fx.Int32, expert_ids)
    for row in range(first + count, first + blocks * key.block_m):
        ids[row] = tokens | (key.topk << SLOT_SHIFT)
        weights[row] = fx.Float32(0.0)
    for block in range(first_block, first_block + blocks):
        owners[block] = expert
    if expert == key.threads - 1:
        used = global_pointer(fx.Int32, num_valid)
        used[0] = total * key.block_m
        used[1] = real
    return first


@traced
def _inclusive_sum(key: SortKey, sums: fx.Pointer, value: fx.Int32, thread: fx.Int32) -> fx.Int32:
    """Sum of `value` over this thread and all before it."""
    sums[thread] = value
    fx.gpu.barrier()
    rounds = (key.threads - 1).bit_length()
    for i in fx.range_constexpr(rounds):
        before = fx.Int32(0)
        if thread >= 1 << i:
            before = sums[thread - (1 << i)]
        value = value + before
        if fx.const_expr(i + 1 < rounds):
            fx.gpu.barrier()
            sums[thread] = value
            fx.gpu.barrier()
    return value


@traced
def _chunk_rows(
    key: SortKey,
    sums: fx.Pointer,
    counts: fx.Int64,
    chunks: fx.Int32,
    expert: fx.Int32,
    tokens: fx.Int32,
    real: fx.Int32,
    sorted_ids: fx.Int64,
    sorted_weights: fx.Int64,
    expert_ids: fx.Int64,
    num_valid: fx.Int64,
) -> None:
    """Replace each chunk's count of the expert by the row its first such route goes to."""
    table = global_pointer(fx.Int32, counts)
    count = fx.Int32(0)
    for chunk in range(fx.Int32(0), chunks):
        count = count + table[chunk * key.threads + expert]
    row = _first_row(
        key,
        sums,
        count,
        expert,
        tokens,
        real,
        sorted_ids,
        sorted_weights,
        expert_ids,
        num_valid,
    )
    for chunk in range(fx.Int32(0), chunks):
        here = table[chunk * key.threads + expert]
        table[chunk * key.threads + expert] = row
        row = row + here


@traced
def _place(
    key: SortKey,
    storage: fx.Pointer,
    row: fx.Int32,
    first_route: fx.Int32,
    routes: fx.Int32,
    tokens: fx.Int32,
    expert: fx.Int32,
    topk_weights: fx.Int64,
    sorted_ids: fx.Int64,
    sorted_weights: fx.Int64,
    route_rows: fx.Int64,
) -> None:
    """Write the chunk's routes of the expert from `row` on."""
    quads = div(routes + 3, 4)
    held = _quads(storage)
    given = global_pointer(fx.Float32, topk_weights)
    ids = global_pointer(fx.Int32, sorted_ids)
    weights = global_pointer(fx.Float32, sorted_weights)
    rows = global_pointer(fx.Int32, route_rows)
    given_routes = fx.min(tokens * key.topk - first_route, fx.Int32(CHUNK_ROUTES))
    for i in range(expert, given_routes, fx.Int32(key.threads)):
        nowhere = i >= routes
        if i < routes:
            nowhere = storage[i] < 0
        if nowhere:
            rows[first_route + i] = fx.Int32(-1)
    for i in range(fx.Int32(0), quads):
        four = held[None, i].load()
        for j in fx.range_constexpr(4):
            if four[j] == expert:
                route = first_route + i * 4 + j
                token = div(route, key.topk)
                ids[row] = token | (mod(route, key.topk) << SLOT_SHIFT)
                weights[row] = given[route]
                rows[route] = row
                row = row + 1
