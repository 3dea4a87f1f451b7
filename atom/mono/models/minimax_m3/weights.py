"""What the kernels require of weights and caches, checked when they are bound.

Kernels take bare addresses: a wrong type or order of elements is not an error there but a wrong
number. So everything is checked once, and what does not fit is refused with all reasons.

Shapes are those of one rank and are written out in `builds`. In a layer's mapping the names are
those of the launchers' parameters, `norm1_w` being the norm before attention and `norm2_w` the
one before the FFN in dense layers too. Left out are scales (`*_s`) where the format is bf16,
`cache_scales` where all caches are, and what concerns the index heads (`iq_norm_w`, `ik_norm_w`,
`index_cache`) in layers that reuse a selection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from atom.mono.plan.execution import round_up
from atom.mono.runtime.consensus import MonoUnsupported

from .builds import HEAD_DIM, PAGE
from .config import Config

ALIGN = 16  # bytes: what a lane loads at once
SCALE_BLOCK = 32  # elements of K
_E8M0_NAN = 255
_REASONS_SHOWN = 8

_DATA = {
    "bf16": (torch.bfloat16,),
    "fp8": (torch.float8_e4m3fn,),
    "fp4": (torch.uint8, torch.float4_e2m1fn_x2),
}
_SCALE = (torch.uint8, torch.float8_e8m0fnu)
_CACHE = {"bf16": (torch.bfloat16,), "fp8": (torch.float8_e4m3fn,)}
_OPTIONAL = (
    "qkv_s",
    "o_s",
    "gate_up_s",
    "down_s",
    "iq_norm_w",
    "ik_norm_w",
    "index_cache",
    "cache_scales",
)

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Expected:
    """A tensor's shape and possible dtypes. `shuffled`: in the order of `shuffle_weight`.

    `scales` of a stack of matrices may have rows padded to 256, as `shuffle_scale` leaves them.
    `positive`: of finite numbers above zero.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shuffled: bool = False
    scales: bool = False
    positive: bool = False


@dataclass(frozen=True)
class Weights:
    """`layers[i]` are the tensors of layer i, `cos_sin` [positions, rotary] f32 is common."""

    cos_sin: torch.Tensor
    layers: Sequence[Tensors]


@dataclass(frozen=True)
class BoundLayer:
    """A layer's addresses by name, weights and caches; what is left out is 0.

    The tensors are held, and must stay where they are: an address is read once.
    """

    addresses: Mapping[str, int]
    held: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Bound:
    """Everything the layers of a rank are bound to."""

    cos_sin: int
    layers: tuple[BoundLayer, ...]
    held: torch.Tensor


def _vector(size: int) -> Expected:
    return Expected((size,), (torch.bfloat16,))


def _matrix(name: str, n: int, k: int, fmt: str, experts: int | None = None) -> dict[str, Expected]:
    stack = () if experts is None else (experts,)
    packed = k // 2 if fmt == "fp4" else k
    found = {f"{name}_w": Expected((*stack, n, packed), _DATA[fmt], shuffled=True)}
    if fmt != "bf16":
        columns = round_up(k // SCALE_BLOCK, 8)
        rows = n * math.prod(stack)
        found[f"{name}_s"] = Expected((rows, columns), _SCALE, scales=True)
    return found


def expected_weights(config: Config, layer: int) -> dict[str, Expected]:
    """What layer `layer` of a rank must have, by name."""
    shape, dims = config.shape(max(config.widths)), config.dims
    hidden, heads = dims.hidden, shape.heads * HEAD_DIM
    found = {
        "norm1_w": _vector(hidden),
        "norm2_w": _vector(hidden),
        "q_norm_w": _vector(HEAD_DIM),
        "k_norm_w": _vector(HEAD_DIM),
        **_matrix("o", hidden, heads, config.attn_format),
    }
    if layer < config.dense_layers:
        fmt, inter = config.dense_format, shape.dense_inter
        return {
            **found,
            **_matrix("qkv", shape.qkv_rows, hidden, config.attn_format),
            **_matrix("gate_up", 2 * inter, hidden, fmt, experts=1),
            **_matrix("down", hidden, inter, fmt, experts=1),
        }
    fmt, inter, stack = config.expert_format, shape.inter, dims.experts + 1
    select = config.selects(layer)
    rows = config.sparse(shape.tokens, select).qkv_rows
    index_norms = {"iq_norm_w": _vector(HEAD_DIM), "ik_norm_w": _vector(HEAD_DIM)}
    return {
        **found,
        **(index_norms if select else {}),
        **_matrix("qkv", rows, hidden, config.attn_format),
        **_matrix("router", round_up(dims.experts, 16), hidden, "bf16"),
        "router_bias": Expected((dims.experts,), (torch.float32,)),
        **_matrix("gate_up", 2 * inter, hidden, fmt, experts=stack),
        **_matrix("down", hidden, inter, fmt, experts=stack),
    }


def expected_caches(config: Config, layer: int, pages: int) -> dict[str, Expected]:
    """What the caches of layer `layer` must be with `pages` pages, by name."""
    kv, dtypes = config.shape(max(config.widths)).kv_heads, _CACHE[config.kv_format]
    found = {
        "k_cache": Expected((pages, kv, PAGE, HEAD_DIM), dtypes),
        "v_cache": Expected((pages, kv, HEAD_DIM, PAGE), dtypes),
    }
    if config.selects(layer):
        found["index_cache"] = Expected((pages, PAGE, HEAD_DIM), _CACHE[config.index_format])
    if config.scaled_caches:
        found["cache_scales"] = Expected((3,), (torch.float32,), positive=True)
    return found


def problems(
    where: str, given: Tensors, expected: Mapping[str, Expected], device: torch.device
) -> list[str]:
    """How the tensors `given` differ from what is expected on `device`, one line each."""
    found = [f"{where}: {name} is missing" for name in expected if name not in given]
    found += [f"{where}: {name} is not expected" for name in given if name not in expected]
    for name, want in expected.items():
        if name in given:
            found += [f"{where}: {name} {what}" for what in _tensor(given[name], want, device)]
    return found


def _tensor(tensor: torch.Tensor, want: Expected, device: torch.device) -> list[str]:
    if tensor.dtype not in want.dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in want.dtypes)
        return [f"is {str(tensor.dtype).removeprefix('torch.')}, not {names}"]
    if not _shape_fits(tuple(tensor.shape), want):
        return [f"has shape {tuple(tensor.shape)}, not {want.shape}"]
    if tensor.device != device:
        return [f"is on {tensor.device}, not {device}"]
    if tensor.is_meta or not tensor.is_contiguous() or tensor.data_ptr() % ALIGN:
        return [f"is not contiguous memory aligned to {ALIGN} bytes"]
    if want.shuffled and not getattr(tensor, "is_shuffled", False):
        return ["is not in the order of aiter.ops.shuffle.shuffle_weight (`is_shuffled`)"]
    if want.scales and bool((tensor.view(torch.uint8) == _E8M0_NAN).any()):
        return ["has scales that are not numbers (255)"]
    if want.positive and not bool((tensor.isfinite() & (tensor > 0)).all()):
        return [f"is {tensor.tolist()}, not finite numbers above zero"]
    return []


def _shape_fits(shape: tuple[int, ...], want: Expected) -> bool:
    if not want.scales:
        return shape == want.shape
    rows, columns = want.shape
    return shape in ((rows, columns), (round_up(rows, 256), columns))


def bind_weights(
    config: Config, weights: Weights, caches: Sequence[Tensors], device: torch.device
) -> Bound:
    """The addresses of everything, in layers. Raises MonoUnsupported with the reasons."""
    for what, count in (("weights", len(weights.layers)), ("caches", len(caches))):
        if count != config.layers:
            raise MonoUnsupported(
                f"{what} of {count} layers are given, the model has {config.layers}"
            )
    pages = caches[0]["k_cache"].shape[0] if caches and "k_cache" in caches[0] else 0
    rotary = Expected(
        (max(weights.cos_sin.shape[0], config.context), config.dims.rotary), (torch.float32,)
    )
    found = problems("model", {"cos_sin": weights.cos_sin}, {"cos_sin": rotary}, device)
    layers = []
    for layer, (tensors, cells) in enumerate(zip(weights.layers, caches, strict=True)):
        given = {**tensors, **cells}
        expected = expected_weights(config, layer) | expected_caches(config, layer, pages)
        found += problems(f"layer {layer}", given, expected, device)
        addresses = dict.fromkeys(_OPTIONAL, 0)
        addresses |= {name: tensor.data_ptr() for name, tensor in given.items()}
        layers.append(BoundLayer(addresses, tuple(given.values())))
    if found:
        more = len(found) - _REASONS_SHOWN
        raise MonoUnsupported(
            "; ".join(found[:_REASONS_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        )
    return Bound(weights.cos_sin.data_ptr(), tuple(layers), weights.cos_sin)
