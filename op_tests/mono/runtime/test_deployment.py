"""A deployment that mono kernels cannot serve is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aiter.jit.utils.chip_info import Target
from atom.mono.runtime.deployment import Deployment, common_refusals, first_refusal
from atom.mono.runtime.stream import not_current

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


def test_tensors_on_another_device_than_the_current_one_are_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not_current(torch.device("cpu")) is None
    assert not_current(torch.device("cuda", 1)) is None
    said = "tensors are on cuda:0, the current device is cuda:1"
    assert not_current(torch.device("cuda", 0)) == said
