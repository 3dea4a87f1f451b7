"""Gated activations of MoE stage 1, elementwise on f32: g the gate, u the up projection.

    silu     g' sigmoid(g') u'                                g' = min(g, L), u' = clamp(u, -L, L)
    gelu     g Phi(g) u                                       Phi the normal distribution function
    swiglu   g' sigmoid(1.702 g') (u' + 1)
    situv2   b tanh(g / b) sigmoid(g) c tanh(u / c)

L is infinite for no limit. Written with the native exp2 and reciprocal: no device library, so
the code does not depend on which one is installed. The error function behind Phi is formula
7.1.26 of Abramowitz and Stegun, absolute error 1.5e-7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import flydsl.expr as fx

from .device import exp2, reciprocal

LOG2_E = math.log2(math.e)
SWIGLU_SLOPE = 1.702
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_T = 0.3275911


@dataclass(frozen=True)
class ActivationScalars:
    """Runtime scalars: the limit L, and b and c of situv2."""

    limit: fx.Float32
    beta: fx.Float32
    linear_beta: fx.Float32


def gated(
    activation: str, gate: fx.Float32, up: fx.Float32, scalars: ActivationScalars
) -> fx.Float32:
    """activation(gate, up). Raises KeyError for a name that is none of the module's."""
    return _FORMULAS[activation](gate, up, scalars)


def _clamped(gate: fx.Float32, up: fx.Float32, limit: fx.Float32) -> tuple[fx.Float32, fx.Float32]:
    return fx.min(gate, limit), fx.max(fx.min(up, limit), -limit)


def _silu(gate: fx.Float32, up: fx.Float32, scalars: ActivationScalars) -> fx.Float32:
    gate, up = _clamped(gate, up, scalars.limit)
    return gate * _sigmoid(gate) * up


def _gelu(gate: fx.Float32, up: fx.Float32, scalars: ActivationScalars) -> fx.Float32:
    return gate * (_erf(gate * math.sqrt(0.5)) + 1.0) * 0.5 * up


def _swiglu(gate: fx.Float32, up: fx.Float32, scalars: ActivationScalars) -> fx.Float32:
    gate, up = _clamped(gate, up, scalars.limit)
    return gate * _sigmoid(gate * SWIGLU_SLOPE) * (up + 1.0)


def _situv2(gate: fx.Float32, up: fx.Float32, scalars: ActivationScalars) -> fx.Float32:
    bounded_gate = scalars.beta * _tanh(gate * reciprocal(scalars.beta))
    bounded_up = scalars.linear_beta * _tanh(up * reciprocal(scalars.linear_beta))
    return bounded_gate * _sigmoid(gate) * bounded_up


_FORMULAS = {"silu": _silu, "gelu": _gelu, "swiglu": _swiglu, "situv2": _situv2}


def _sigmoid(x: fx.Float32) -> fx.Float32:
    return reciprocal(exp2(x * -LOG2_E) + 1.0)


def _tanh(x: fx.Float32) -> fx.Float32:
    return _sigmoid(x * 2.0) * 2.0 - 1.0


def _erf(x: fx.Float32) -> fx.Float32:
    size = fx.math.absf(x)
    t = reciprocal(size * _ERF_T + 1.0)
    polynomial = fx.Float32(_ERF[4])
    for coefficient in _ERF[3::-1]:
        polynomial = polynomial * t + coefficient
    value = 1.0 - polynomial * t * exp2(size * size * -LOG2_E)
    return (x < 0.0).select(-value, value)
