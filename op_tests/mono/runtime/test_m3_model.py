"""The runner with the real kernels: a small model on ranks that share memory, against torch."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from atom.mono.models.minimax_m3.builds import HEAD_DIM, PAGE, LayerShape, SparseBuild
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.execution import Step
from atom.mono.models.minimax_m3.runner import MiniMaxM3Runner, layer_builders
from atom.mono.models.minimax_m3.weights import Tensors, Weights
from atom.mono.runtime.debug import WaitGivenUp
from atom.mono.runtime.peer_memory import InProcessHeap
from op_tests.emulator import emulated
from op_tests.emulator.session import Emulator
from op_tests.mono import torch_m3
from op_tests.mono.kernels.layers import (
    DIMS,
    POSITIONS,
    LayerWeights,
    Reference,
    Sequences,
)
from op_tests.mono.runtime.stand_ins import CPU, allow, deployment_of
from op_tests.torch_moe import relative_l2

pytestmark = [pytest.mark.compile, pytest.mark.emulated]

# Layer 0 is dense, 1 selects, 2 reuses.
CONFIG = Config(
    dims=DIMS,
    layers=3,
    dense_layers=1,
    tp=2,
    reusing=frozenset({2}),
    index_topk=3,
    max_blocks=8,
    eps=1e-5,
    widths=(2, 4),
    blocks=2,
    polls=30,
)
SEED = 23
CLOSE = 2e-2  # three layers of bf16 roundings; a wrong element of a row is far above it


def _layer_weights(config: Config) -> list[LayerWeights]:
    dense = [layer < config.dense_layers for layer in range(config.layers)]
    return [LayerWeights.random(DIMS, d, SEED + layer) for layer, d in enumerate(dense)]


def _tensors(config: Config, w: LayerWeights, layer: int, rank: int) -> Tensors:
    """What a rank binds for a layer."""
    indexed, dense = config.selects(layer), layer < config.dense_layers
    fmt = config.dense_format if dense else config.expert_format
    found = {
        "norm1_w": w.norm1,
        "norm2_w": w.norm2,
        **dict(zip(("q_norm_w", "k_norm_w"), w.norms[:2], strict=True)),
    }
    if indexed:
        found |= dict(zip(("iq_norm_w", "ik_norm_w"), w.norms[2:], strict=True))
    for name, stored in w.shard(config.tp, rank, indexed, config.attn_format, fmt).items():
        if name == "router" and dense:
            continue
        found[f"{name}_w"] = stored.data
        if stored.scale is not None:
            found[f"{name}_s"] = stored.scale
    return found if dense else found | {"router_bias": w.bias}


class Rank:
    """A rank's caches, attention of its dense layers, and runner."""

    def __init__(
        self,
        config: Config,
        rank: int,
        heap: InProcessHeap,
        weights: list[LayerWeights],
        sequences: list[Sequences],
    ) -> None:
        part = lambda x: x.chunk(config.tp, 1)[rank].clone().contiguous()
        self.caches = []
        for layer, held in enumerate(sequences):
            cache = {"k_cache": part(held.k), "v_cache": part(held.v)}
            cache["cache_scales"] = held.scales
            if config.selects(layer):
                cache["index_cache"] = held.index.clone()
            self.caches.append(cache)
        table = torch_m3.cos_sin_table(POSITIONS, DIMS.rotary)
        layers = [_tensors(config, w, layer, rank) for layer, w in enumerate(weights)]
        self.runner = MiniMaxM3Runner(
            config,
            deployment_of(config),
            Weights(table, layers),
            self.caches,
            self.attend,
            heap.allocator(rank),
            None,
            CPU,
            layer_builders(),
        )

    def attend(self, layer: int, q: torch.Tensor, step: Step, out: torch.Tensor) -> None:
        """Attention over everything, head by head."""
        k, v = self.caches[layer]["k_cache"], self.caches[layer]["v_cache"]
        k_scale, v_scale, _ = self.caches[layer]["cache_scales"].tolist()
        group = DIMS.heads // DIMS.kv_heads
        heads, result = q.float().view(q.shape[0], -1, HEAD_DIM), out.view(q.shape[0], -1, HEAD_DIM)
        for token, position in enumerate(step.positions.tolist()):
            pages = step.block_table[token]
            for kv in range(k.shape[1]):
                keys = torch_m3.paged_rows(k[:, kv], pages, position + 1, k_scale)
                values = v[:, kv].transpose(1, 2)
                values = torch_m3.paged_rows(values, pages, position + 1, v_scale)
                blocks = list(range(-(-keys.shape[0] // PAGE)))
                own = slice(kv * group, (kv + 1) * group)
                scale = HEAD_DIM**-0.5
                result[token, own] = torch_m3.attend(
                    heads[token, own], keys, values, blocks, scale
                ).to(torch.bfloat16)


class Model:
    """All ranks of a model, and what torch makes of it."""

    def __init__(self, config: Config = CONFIG) -> None:
        weights = _layer_weights(config)
        # One set of positions, caches of each layer's own.
        sequences = [
            Sequences.random(
                DIMS, [3, 140, 600, 601], 8, seed, (config.kv_format, config.index_format)
            )
            for seed in range(config.layers)
        ]
        for held in sequences[1:]:
            held.table, held.slots = sequences[0].table, sequences[0].slots
        self.peer_memory: list[torch.Tensor] = []
        heap = InProcessHeap(config.tp, self.peer_memory.append)
        self.ranks = [Rank(config, r, heap, weights, sequences) for r in range(config.tp)]
        for rank in self.ranks:
            assert all(rank.runner.prepare(rows) for rows in config.widths)
        shape = LayerShape(DIMS, config.tp, 4, config.eps, config.blocks)
        sparse = SparseBuild(shape, index_topk=config.index_topk, max_blocks=config.max_blocks)
        table = torch_m3.cos_sin_table(POSITIONS, DIMS.rotary)
        self.references = [Reference(shape, sparse, held.clone(), table) for held in sequences]
        self.exact = [
            w.rounded(config.attn_format, config.expert_format if w.experts else "bf16")
            for w in weights
        ]

    def step(self, seed: int, later: int, rows: int = 4) -> Step:
        """Random rows at the last `rows` sequences' positions and `later` more tokens."""
        held = self.references[0].sequences
        hidden = torch.randn(rows, DIMS.hidden, generator=torch.Generator().manual_seed(seed))
        positions, table = (held.positions + later)[-rows:], held.table[-rows:].clone()
        page = table[torch.arange(rows), positions.long() // PAGE]
        slots = page * PAGE + positions % PAGE
        if rows == 4:
            slots[0] = -1
        return Step(hidden.to(torch.bfloat16), positions.clone(), slots, table)

    def allow(self, emu: Emulator, *steps: Step) -> None:
        for tensor in self.peer_memory:
            emu.register(tensor)
        for rank in self.ranks:
            allow(emu, rank.runner, *steps)

    def expected(self, step: Step) -> torch.Tensor:
        """The residual stream after all layers, in torch."""
        h = step.hidden.float()
        for layer, (ref, w) in enumerate(zip(self.references, self.exact, strict=True)):
            held = ref.sequences
            held.positions, held.slots, held.table = step.positions, step.slots, step.block_table
            q, iq = ref.heads(w, h)
            if CONFIG.selects(layer):
                ref.choose(iq)
            elif layer in CONFIG.reusing:
                ref.chosen = self.references[layer - 1].chosen
            h = ref.finish(w, h, ref.attend(q, dense=layer < CONFIG.dense_layers))
        return h


def _require_match(results: list[torch.Tensor], want: torch.Tensor) -> None:
    assert torch.equal(*results), "ranks differ"
    got = results[0].float()
    assert relative_l2(got, want) < CLOSE
    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 2 * CLOSE


@pytest.mark.slow
def test_steps_of_two_ranks_match_torch_and_each_other_bit_for_bit(gfx950):
    model = Model()
    steps = [model.step(7, later=0), model.step(8, later=1, rows=2), model.step(9, later=2)]
    with emulated("gfx950") as emu:
        model.allow(emu, *steps)
        for step in steps:
            results = emu.run_ranks([lambda r=r, s=step: r.runner.forward(s) for r in model.ranks])
            _require_match(results, model.expected(step))


def test_a_dense_layer_matches_and_then_a_rank_that_does_not_come_is_named(gfx950):
    model = Model(replace(CONFIG, debug=True, layers=1, reusing=frozenset(), check=True))
    step = model.step(7, later=0)
    first = model.ranks[0].runner
    with emulated("gfx950") as emu:
        model.allow(emu, step)
        results = emu.run_ranks([lambda r=r: r.runner.forward(step) for r in model.ranks])
        _require_match(results, model.expected(step))
        first.finish_step()
        first.forward(step)
    with pytest.raises(WaitGivenUp) as error:
        first.finish_step()
    assert error.value.missing == {1}
    lines = str(error.value).splitlines()[1:]
    assert lines[0] == "  rank 1 did not come to the step, it was last seen at step 1"
    assert any("layer 0: attn_sums" in line and "of rank 1 did not come" in line for line in lines)


def test_a_timeline_build_stamps_every_stage_of_every_launch(gfx950, tmp_path):
    config = replace(
        CONFIG, timeline=True, layers=1, reusing=frozenset(), tp=1, widths=(4,), aux_layers=(0,)
    )
    model = Model(config)
    step, runner = model.step(7, later=0), model.ranks[0].runner
    timeline = runner.timeline(4)
    assert [len(launch.stages) for launch in timeline.launches] == [3, 5]
    with pytest.raises(RuntimeError, match="no step has run: layer 0 launch_m3_dense_pre"):
        timeline.spans()
    with emulated("gfx950") as emu:
        model.allow(emu, step)
        result = runner.forward(step)
    assert torch.equal(runner.aux(4)[0], result)
    spans = timeline.spans()
    assert [span.stage for span in spans] == [
        *("norm1", "qkv", "heads"),
        *("o_proj", "reduce_attn", "gate_up", "down", "reduce_ffn"),
    ]
    assert spans[0].first == 0.0
    assert all(0 < span.busy < span.end - span.first + 1e-6 for span in spans)
    assert all(a.first <= b.first and a.end <= b.end for a, b in pairwise(spans))
    timeline.write_chrome_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert len(events) == 8 * config.blocks
    assert min(event["ts"] for event in events) == 0
    assert all(event["dur"] > 0 for event in events)
