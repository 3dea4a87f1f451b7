"""The torch reference itself, against scalar arithmetic on Python floats."""

import math
import struct

import pytest
import torch

from op_tests.torch_moe import (
    FP4_VALUES,
    Activation,
    moe_reference,
    mx_quantise,
    relative_l2,
    unpack_fp4,
)

FP8_VALUES = sorted(
    {
        (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def nearest(value: float, table: list[float]) -> float:
    """The nearest table value, of two equally near the one with the even code."""
    size = min(abs(value), table[-1])
    best = min(range(len(table)), key=lambda i: (abs(table[i] - size), i % 2))
    return math.copysign(table[best], value)


def scalar_scale_exponent(amax: float, largest: float) -> int:
    """The smallest e with amax <= largest * 2^e, from -127 up."""
    exponent = -127
    while amax > largest * 2.0**exponent:
        exponent += 1
    return exponent


@pytest.mark.parametrize(("fmt", "table"), [("fp4", list(FP4_VALUES)), ("fp8", FP8_VALUES)])
def test_blocks_are_quantised_as_scalar_arithmetic_does(fmt, table):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=g) * torch.exp2(torch.arange(-6.0, 6.0, 2)).unsqueeze(1)
    x[0, :32] = 0
    x[1, :4] = torch.tensor([6.0, 5.0, 2.5, 0.25])
    x[1, 4:32] = 0
    got = mx_quantise(x, fmt)
    values = got.dequantised()
    for row in range(6):
        for block in range(2):
            elements = x[row, 32 * block : 32 * block + 32].tolist()
            amax = max(map(abs, elements))
            exponent = scalar_scale_exponent(amax, table[-1])
            assert got.scale[row, block] == exponent + 127
            for i, element in enumerate(elements):
                want = nearest(element / 2.0**exponent, table) * 2.0**exponent
                assert values[row, 32 * block + i].item() == want


def test_packed_fp4_has_the_even_element_in_the_low_nibble():
    assert unpack_fp4(torch.tensor([0x71, 0x9F], dtype=torch.uint8)).tolist() == [0.5, 6, -6, -0.5]


def test_blocks_that_are_not_finite_dequantise_to_nan():
    x = torch.ones(1, 64)
    x[0, 3] = float("inf")
    values = mx_quantise(x, "fp8").dequantised()
    assert values[0, :32].isnan().all()
    assert (values[0, 32:] == 1).all()


def scalar_activation(activation: Activation, g: float, u: float) -> float:
    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    if activation.kind == "gelu":
        return g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u
    if activation.kind == "situv2":
        b, c = activation.beta, activation.linear_beta
        return b * math.tanh(g / b) * sigmoid(g) * c * math.tanh(u / c)
    limit = activation.limit or (7.0 if activation.kind == "swiglu" else math.inf)
    g, u = min(g, limit), max(-limit, min(u, limit))
    if activation.kind == "swiglu":
        return g * sigmoid(1.702 * g) * (u + 1)
    return g * sigmoid(g) * u


@pytest.mark.parametrize(
    "activation",
    [
        Activation(),
        Activation(limit=0.5),
        Activation("gelu"),
        Activation("swiglu"),
        Activation("situv2", beta=4.0, linear_beta=25.0),
    ],
)
@pytest.mark.parametrize("weight_in_stage1", [False, True])
def test_the_whole_reference_agrees_with_scalar_loops(activation, weight_in_stage1):
    g = torch.Generator().manual_seed(1)
    tokens, dim, inter, experts, topk = 3, 8, 4, 3, 2
    a = torch.randn(tokens, dim, generator=g) * 3
    w1 = torch.randn(experts, 2 * inter, dim, generator=g)
    w2 = torch.randn(experts, dim, inter, generator=g)
    bias1 = torch.randn(experts, 2 * inter, generator=g)
    bias2 = torch.randn(experts, dim, generator=g)
    ids = torch.tensor([[0, 2], [1, -1], [2, 0]], dtype=torch.int32)
    weights = torch.rand(tokens, topk, generator=g)
    want = torch.zeros(tokens, dim)
    for t in range(tokens):
        for s in range(topk):
            e, w = ids[t, s].item(), weights[t, s].item()
            if e < 0:
                continue
            both = [
                sum(a[t, k].item() * w1[e, n, k].item() for k in range(dim)) + bias1[e, n].item()
                for n in range(2 * inter)
            ]
            hidden = [scalar_activation(activation, both[i], both[inter + i]) for i in range(inter)]
            first, second = (w, 1.0) if weight_in_stage1 else (1.0, w)
            for d in range(dim):
                row = sum(first * hidden[i] * w2[e, d, i].item() for i in range(inter))
                want[t, d] += second * (row + bias2[e, d].item())
    got = moe_reference(
        a, w1, w2, ids, weights, None, activation, bias1, bias2, weight_in_stage1=weight_in_stage1
    )
    assert relative_l2(got, want) < 1e-5


def test_a_result_that_is_not_finite_is_infinitely_wrong():
    assert relative_l2(
        torch.tensor([1.0, struct.unpack("f", b"\0\0\xc0\x7f")[0]]), torch.ones(2)
    ) == (math.inf)
