"""Gated activations of MoE stage 1, elementwise on f32.

    silu    g * sigmoid(g) * u after g = min(g, L), u = clamp(u, -L, L); no limit is L infinite

Written with the native exp2 and reciprocal: no device library, so the code does not depend on
which one is installed.
"""

from __future__ import annotations

import math

import flydsl.expr as fx

from .device import exp2, reciprocal

LOG2_E = math.log2(math.e)
SUPPORTED = ("silu",)


def gated(activation: str, gate: fx.Float32, up: fx.Float32, limit: fx.Float32) -> fx.Float32:
    """activation(gate) * up, both clamped at `limit` first."""
    if activation not in SUPPORTED:
        raise NotImplementedError(f"activation {activation}")
    gate = fx.min(gate, limit)
    up = fx.max(fx.min(up, limit), -limit)
    return gate * _sigmoid(gate) * up


def _sigmoid(x: fx.Float32) -> fx.Float32:
    return reciprocal(exp2(x * -LOG2_E) + 1.0)
