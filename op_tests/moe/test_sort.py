"""The routing sort against a Python loop."""

import pytest
import torch

from aiter.ops.flydsl.kernels import moe_sort
from aiter.ops.flydsl.kernels.moe_sort import build_sort, sort_key
from aiter.ops.flydsl.kernels.tensor_shim import _run_compiled
from aiter.ops.flydsl.moe.sizes import sort_capacity, sort_chunks
from op_tests.moe.cases import routing
from op_tests.torch_moe import sort_reference

pytestmark = pytest.mark.emulated


def run_sort(ids, weights, experts, block_m, local_tokens=None, zero=None, mask=None):
    tokens, topk = ids.shape
    capacity = sort_capacity(tokens, topk, experts, block_m)
    chunks = sort_chunks(tokens, topk)
    result = {
        "sorted_ids": torch.full((capacity,), -7, dtype=torch.int32),
        "sorted_weights": torch.full((capacity,), -7.0),
        "expert_ids": torch.full((capacity // block_m,), -7, dtype=torch.int32),
        "num_valid": torch.empty(2, dtype=torch.int32),
        "route_rows": torch.full((tokens * topk,), -7, dtype=torch.int32),
    }
    phases = ("all",) if chunks == 1 else ("count", "offsets", "place")
    keys = [
        sort_key(
            phase,
            experts=experts,
            topk=topk,
            block_m=block_m,
            local_tokens=local_tokens is not None,
            masked=mask is not None,
            zero=zero is not None,
        )
        for phase in phases
    ]
    counts = torch.empty(chunks * keys[0].threads, dtype=torch.int32)
    for key in keys:
        _run_compiled(
            build_sort(key),
            ids,
            weights,
            *result.values(),
            counts,
            local_tokens,
            mask,
            zero,
            tokens,
            chunks,
            mask.numel() if mask is not None else 0,
            experts,
            zero.numel() * zero.element_size() // 16 if zero is not None else 0,
            None,
        )
    return result


def check(result, ids, weights, experts, block_m, real):
    want = sort_reference(ids, weights, experts, block_m, real)
    assert torch.equal(result["num_valid"], want["num_valid"])
    used = int(want["num_valid"][0])
    blocks = {"sorted_ids": used, "sorted_weights": used, "expert_ids": used // block_m}
    for name, length in blocks.items():
        assert torch.equal(result[name][:length], want[name]), name
    assert torch.equal(result["route_rows"], want["route_rows"])


@pytest.mark.parametrize("kind", ["even", "skewed", "idle", "one"])
@pytest.mark.parametrize(
    ("tokens", "topk", "experts", "block_m"), [(1, 6, 384, 32), (67, 3, 9, 16)]
)
def test_one_launch_sorts_every_routing(emulate, kind, tokens, topk, experts, block_m):
    g = torch.Generator().manual_seed(1)
    ids = routing(tokens, topk, experts, kind, g)
    weights = torch.rand(tokens, topk, generator=g)
    emulate("gfx950", order="random", seed=2)
    check(run_sort(ids, weights, experts, block_m), ids, weights, experts, block_m, tokens)


def test_three_launches_sort_more_routes_than_a_chunk_holds(emulate):
    tokens, topk, experts = moe_sort.CHUNK_ROUTES // 2 + 5, 3, 5
    g = torch.Generator().manual_seed(3)
    ids = routing(tokens, topk, experts, "skewed", g)
    weights = torch.rand(tokens, topk, generator=g)
    emulate("gfx950")
    assert sort_chunks(tokens, topk) > 1
    check(run_sort(ids, weights, experts, 64), ids, weights, experts, 64, tokens)


def test_local_tokens_end_within_a_chunk_of_many(emulate):
    tokens, topk, experts = moe_sort.CHUNK_ROUTES + 7, 2, 3
    g = torch.Generator().manual_seed(5)
    ids = routing(tokens, topk, experts, "even", g)
    weights = torch.rand(tokens, topk, generator=g)
    emulate("gfx950")
    local = torch.tensor([tokens // 3], dtype=torch.int32)
    check(run_sort(ids, weights, experts, 32, local), ids, weights, experts, 32, tokens // 3)


@pytest.mark.parametrize("real", [0, 1, 20])
def test_only_local_tokens_are_routed(emulate, real):
    g = torch.Generator().manual_seed(4)
    ids = routing(20, 2, 6, "even", g)
    weights = torch.rand(20, 2, generator=g)
    emulate("gfx950")
    local = torch.tensor([real], dtype=torch.int32)
    check(run_sort(ids, weights, 6, 32, local), ids, weights, 6, 32, real)


@pytest.mark.parametrize("global_experts", [12, 700])
def test_masked_experts_take_no_rows_and_the_others_are_renumbered(emulate, global_experts):
    g = torch.Generator().manual_seed(6)
    mask = (torch.rand(global_experts, generator=g) < 0.4).to(torch.int32)
    ids = routing(40, 3, global_experts, "even", g)
    ids[:, 2] = global_experts  # the slot that no rank serves
    ids[3, 1] = -1
    weights = torch.rand(40, 3, generator=g)
    numbers = torch.where(mask == 1, mask.cumsum(0) - 1, -1).to(torch.int32)
    known = (ids >= 0) & (ids < global_experts)
    local = torch.where(known, numbers[ids.clamp(0, global_experts - 1).long()], -1)
    experts = int(mask.sum())
    emulate("gfx950", order="random", seed=1)
    result = run_sort(ids, weights, experts, 32, mask=mask)
    check(result, local.to(torch.int32), weights, experts, 32, 40)


@pytest.mark.parametrize("tokens", [40, moe_sort.CHUNK_ROUTES // 2 + 5])
def test_routes_to_what_is_no_expert_go_nowhere(emulate, tokens):
    """Nor do they have rows, though threads are more than experts."""
    g = torch.Generator().manual_seed(8)
    ids = routing(tokens, 3, 5, "even", g)
    for i, stray in enumerate((-1, 5, 63, 64, (1 << 31) - 1, -(1 << 31))):
        ids[3 * i, i % 3] = stray
    weights = torch.rand(tokens, 3, generator=g)
    emulate("gfx950", order="random", seed=3)
    check(run_sort(ids, weights, 5, 32), ids, weights, 5, 32, tokens)


def test_a_mask_of_more_experts_than_there_are_and_a_count_beyond_the_tokens_do_no_harm(emulate):
    g = torch.Generator().manual_seed(9)
    ids = routing(20, 2, 12, "even", g)
    weights = torch.rand(20, 2, generator=g)
    mask = torch.ones(12, dtype=torch.int32)
    emulate("gfx950")
    local = torch.tensor([1 << 30], dtype=torch.int32)
    result = run_sort(ids, weights, 4, 32, local, mask=mask)
    check(result, torch.where(ids < 4, ids, -1), weights, 4, 32, 20)


def test_the_first_launch_clears_the_output_and_nothing_beyond(emulate):
    ids = torch.zeros(3, 1, dtype=torch.int32)
    buffer = torch.full((3 * 512 + 8,), 5.0, dtype=torch.bfloat16)
    emulate("gfx950")
    run_sort(ids, torch.rand(3, 1), 4, 32, zero=buffer[: 3 * 512])
    assert (buffer[: 3 * 512] == 0).all()
    assert (buffer[3 * 512 :] == 5).all()
