"""A deployment that mono kernels cannot serve is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiter.jit.utils.chip_info import Target
from atom.mono.runtime.deployment import Deployment, common_refusals, first_refusal

GOOD = Deployment(Target.of("gfx950"), tensor_parallel=4)


def test_a_deployment_that_can_be_served_has_no_refusal():
    assert list(common_refusals(GOOD, (1, 2, 4))) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": Target.of("gfx942")}, "written for gfx950, not gfx942"),
        ({"target": Target("gfx950", 128)}, "256 compute units, the device has 128"),
        ({"tensor_parallel": 8}, "tensor parallel 8 is none of 1, 2, 4"),
        ({"pipeline_parallel": 2}, "pipeline parallel 2"),
        ({"data_parallel_attention": 2}, "data parallel attention 2"),
        ({"expert_parallel": 4}, "expert parallel 4"),
        ({"lora": True}, "LoRA"),
    ],
)
def test_each_thing_that_is_not_served_is_named_alone(changes: dict, said: str):
    (reason,) = common_refusals(replace(GOOD, **changes), (4, 1, 2))
    assert said in reason


def test_the_first_reason_is_given():
    assert first_refusal([None, "a", "b"]) == "a"
    assert first_refusal([None]) is None
