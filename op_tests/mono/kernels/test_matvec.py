"""Weights of every format times few tokens, against torch on the same rounded operands."""

from __future__ import annotations

import flydsl.expr as fx
import pytest
import torch

from aiter.ops.flydsl.kernels.device import global_pointer
from atom.mono.device.matvec import PlainRows, Weight, WordRows, matvec
from atom.mono.device.sync import Words
from atom.mono.plan.trace import Space
from op_tests.moe.cases import spread
from op_tests.torch_moe import relative_l2

from .stages import StoredWeight, empty_words, floats_in, run_stage, stage_launcher, words_of

pytestmark = pytest.mark.emulated


def matvec_launcher(fmt: str, rows: int, k: int, tokens: int, plain: bool):
    """y [tokens, rows] f32 words tagged `number`; x is plain rows or words of the same tag."""

    def body(cta, addresses, number, waits):
        y, w, scale, x = addresses[:4]
        out = Words("test", Space.SCRATCH, y, number, waits)
        source = (
            PlainRows(x, k)
            if plain
            else WordRows(Words("test", Space.SCRATCH, x, number, waits), k)
        )

        def emit(row, token, low, high):
            out.push_float(token * rows + row, low)
            out.push_float(token * rows + row + 1, high)

        matvec(cta, Weight(fmt, w, scale, rows, k), source, tokens, emit)

    return stage_launcher(body)


@pytest.mark.parametrize(
    ("fmt", "rows", "k", "tokens", "plain", "order"),
    [
        ("bf16", 64, 384, 1, True, "lockstep"),
        ("bf16", 48, 2304, 16, False, "random"),
        ("fp8", 64, 384, 4, False, "lockstep"),
        ("fp8", 32, 1280, 16, True, "lockstep"),
        ("fp4", 64, 384, 8, True, "lockstep"),
        ("fp4", 96, 1280, 16, False, "lockstep"),
    ],
)
def test_products_match_torch(emulate, fmt, rows, k, tokens, plain, order):
    g = torch.Generator().manual_seed(rows + tokens)
    weight = StoredWeight.of(spread(rows, k, generator=g), fmt)
    x = torch.randn(tokens, k, generator=g).to(torch.bfloat16)
    y = empty_words(tokens * rows)
    emulate("gfx950", order=order, poison=True)
    given = x if plain else words_of(x, 7)
    launcher = matvec_launcher(fmt, rows, k, tokens, plain)
    run_stage(launcher, [y, weight.data, weight.scale, given], 7)
    want = x.double() @ weight.value.double().T
    assert relative_l2(floats_in(y, 7).view(tokens, rows), want) < 1e-6


def test_a_weight_of_partial_tiles_is_refused():
    with pytest.raises(ValueError, match="multiples of 16 x 128"):
        Weight("bf16", fx.Int64, fx.Int64, 24, 128)
    with pytest.raises(ValueError, match="groups of 32"):
        Weight("fp4", fx.Int64, fx.Int64, 48, 128)


def test_an_expert_is_found_in_its_stack(emulate):
    g = torch.Generator().manual_seed(3)
    weight = StoredWeight.of(spread(3, 32, 256, generator=g), "fp4")
    x = torch.randn(1, 256, generator=g).to(torch.bfloat16)
    y = empty_words(32)

    def body(cta, addresses, number, waits):
        out = Words("test", Space.SCRATCH, addresses[0], number, waits)

        def emit(row, token, low, high):
            out.push_float(row, low)
            out.push_float(row + 1, high)

        stack = Weight("fp4", addresses[1], addresses[2], 32, 256)
        expert = global_pointer(fx.Int32, addresses[4])[0]
        matvec(cta, stack.of_expert(expert), PlainRows(addresses[3], 256), 1, emit)

    emulate("gfx950")
    expert = torch.tensor([2], dtype=torch.int32)
    run_stage(stage_launcher(body), [y, weight.data, weight.scale, x, expert])
    assert relative_l2(floats_in(y, 1), x.double()[0] @ weight.value[2].double().T) < 1e-6
