"""What a deployment's options decide: build keys, what ranks must share, refusals, widths."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from aiter.jit.utils.chip_info import Target
from atom.mono.models.minimax_m3.config import Config
from atom.mono.models.minimax_m3.dispatch import refusals, width_for
from atom.mono.models.minimax_m3.runner import identity
from atom.mono.runtime.deployment import Deployment
from op_tests.mono.runtime.stand_ins import DIMS, FEW, make_runner, small_config


def test_ranks_that_differ_in_anything_that_changes_code_differ_in_identity():
    base = small_config(**FEW)
    others = [
        replace(base, eps=1e-5),
        replace(base, expert_format="fp8"),
        replace(base, reusing=frozenset()),
        replace(base, widths=(1, 4)),
        replace(base, debug=True),
        replace(base, check=True),
        replace(base, dims=replace(DIMS, topk=3)),
    ]
    assert len({identity(config) for config in (base, *others)}) == 1 + len(others)


def test_every_option_reaches_the_kernels_it_concerns():
    config = Config(
        tp=2,
        attn_format="fp8",
        dense_format="fp4",
        expert_format="bf16",
        kv_format="bf16",
        index_format="bf16",
        index_topk=8,
        init_blocks=2,
        local_blocks=3,
        max_blocks=64,
        eps=1e-4,
        route_scale=1.5,
        shared_weight=0.5,
        swiglu_limit=6.0,
        blocks=8,
        debug=True,
        polls=7,
        timeline=True,
    )
    options = {field.name for field in fields(Config)}
    renamed = {"DensePostBuild": "dense_format", "SparseBuild": "expert_format"}
    seen = set()
    for key in (
        config.shape(4),
        config.step_begin(),
        config.dense_pre(4),
        config.dense_post(4),
        config.sparse(4, select=True),
    ):
        for field in fields(key):
            kind = type(key).__name__
            name = renamed[kind] if field.name == "ffn_format" else field.name
            if name in options:
                assert getattr(key, field.name) == getattr(config, name), (kind, name)
                seen.add(name)
    assert options - seen == {
        *("layers", "dense_layers", "reusing", "aux_layers"),  # which kernels a step is
        *("widths", "check"),
    }
    assert all(
        getattr(config, name) != getattr(Config(), name) for name in seen - {"dims"}
    ), "a default would hide that an option is lost"


def test_one_sparse_layer_of_so_many_selects():
    every, fourth = Config().with_index_topk_freq(1), Config().with_index_topk_freq(4)
    assert every == Config()
    assert [i for i in range(60) if fourth.selects(i)] == list(range(3, 60, 4))
    assert fourth.launches == 64


@pytest.mark.parametrize("option", ["debug", "timeline", "check"])
def test_the_environment_asks_for_what_the_configuration_does_not(
    monkeypatch: pytest.MonkeyPatch, option: str
):
    base = small_config(**FEW)
    assert base.with_env() == base
    monkeypatch.setenv(f"ATOM_MONO_{option.upper()}", "1")
    assert base.with_env() == make_runner(base).config == replace(base, **{option: True})
    monkeypatch.setenv(f"ATOM_MONO_{option.upper()}", "0")
    asked = replace(base, **{option: True})
    assert asked.with_env() == asked


@pytest.mark.parametrize("reusing", [{2}, {5}, {1}])
def test_a_layer_with_nothing_to_reuse_is_refused(reusing: set[int]):
    with pytest.raises(ValueError, match="cannot reuse a selection"):
        small_config(**{**FEW, "reusing": frozenset(reusing)})


def test_a_deployment_is_refused_by_what_this_model_needs():
    config = Config()
    good = Deployment(Target.of("gfx950"), tensor_parallel=4)
    assert list(refusals(config, good)) == []
    bad = replace(good, tensor_parallel=2, kv_dtype="bf16", page=64, context=(1 << 20) + 1)
    assert len(list(refusals(config, bad))) == 4


def test_a_step_is_padded_to_the_narrowest_width():
    widths = [width_for(Config(), rows) for rows in (0, 1, 2, 4, 5, 16, 17)]
    assert widths == [None, 1, 4, 4, 8, 16, None]
