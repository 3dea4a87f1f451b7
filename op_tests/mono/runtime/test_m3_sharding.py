"""Ranks' matrices are those the kernels' reference shards, and multiply to the model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiter.ops.shuffle import shuffle_weight
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.sharding import rank_matrices
from atom.mono.models.minimax_m3.weights import expected_weights
from op_tests.mono.kernels.layers import DIMS, LayerWeights

CONFIG = Config(
    dims=DIMS, layers=3, dense_layers=1, tp=2, reusing=frozenset({2}), expert_format="bf16"
)


def _model(w: LayerWeights) -> dict[str, torch.Tensor]:
    return {
        **{f"{name}_w": getattr(w, name).flatten(0, 1) for name in ("q", "k", "v", "iq", "ik")},
        "o_w": w.o,
        "gate_w": w.gate,
        "up_w": w.up,
        "down_w": w.down,
        "router_w": w.router,
    }


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layer", [0, 1, 2], ids=["dense", "selecting", "reusing"])
def test_a_rank_gets_what_the_reference_shards_for_it(tp: int, layer: int):
    config = replace(CONFIG, tp=tp)
    w = LayerWeights.random(DIMS, dense=layer == 0, seed=layer)
    for rank in range(tp):
        mine = rank_matrices(config, layer, _model(w), rank)
        theirs = w.shard(tp, rank, config.selects(layer), "bf16", "bf16")
        expected = expected_weights(config, layer)
        assert set(mine) == {name for name in expected if name in {f"{n}_w" for n in theirs}}
        for name, matrix in mine.items():
            stored = shuffle_weight(matrix.to(torch.bfloat16))
            assert torch.equal(stored, theirs[name.removesuffix("_w")].data)
            assert tuple(stored.shape) == expected[name].shape


def test_the_ranks_outputs_add_up_to_the_models():
    w = LayerWeights.random(DIMS, dense=False, seed=1)
    x = torch.randn(DIMS.heads * 128, generator=torch.Generator().manual_seed(0))
    parts = [rank_matrices(CONFIG, 1, _model(w), rank)["o_w"] for rank in range(2)]
    total = sum(part @ x.chunk(2)[rank] for rank, part in enumerate(parts))
    torch.testing.assert_close(total, w.o @ x)


def test_heads_that_do_not_divide_and_ranks_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="do not divide among 3 ranks"):
        replace(CONFIG, tp=3)
    model = _model(LayerWeights.random(DIMS, dense=False, seed=1))
    with pytest.raises(ValueError, match="there is no rank 2 of 2"):
        rank_matrices(CONFIG, 1, model, 2)
