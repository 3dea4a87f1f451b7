"""A rank's matrices out of the model's: what is stored (quantised, shuffled) before it is bound.

The model's tensors of a layer, natural order, any floating type, [rows, columns]:

    q_w [heads * 128, hidden]   k_w, v_w [kv heads * 128, hidden]   o_w [hidden, heads * 128]
    iq_w [index heads * 128, hidden]   ik_w [128, hidden]           where the layer selects
    gate_w, up_w [experts + 1, inter, hidden]   down_w [experts + 1, hidden, inter]
    router_w [experts, hidden]                                      sparse layers
    with one expert of the dense inner size in dense layers

A rank takes whole heads of q, k, v and index q, with the columns of o that belong to them, and its
part of the inner dimension of every expert; the index k head and the router are on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from atom.mono.plan.execution import round_up
from atom.mono.plan.shard import shard

from .builds import HEAD_DIM
from .config import Config


def rank_matrices(
    config: Config, layer: int, model: Mapping[str, torch.Tensor], rank: int
) -> dict[str, torch.Tensor]:
    """`qkv_w`, `o_w`, `gate_up_w`, `down_w` and, in sparse layers, `router_w` of `rank`.

    Natural order, contiguous, in the model's types; the router's rows are padded with zeros to a
    multiple of 16. Raises KeyError for a tensor that is missing and ValueError for a rank that is
    not there.
    """
    d = config.dims
    sparse = layer >= config.dense_layers
    inner = shard(d.inter if sparse else d.dense_inter, config.tp, rank, "inner dimension")
    heads = lambda count, what: _rows(shard(count, config.tp, rank, what))
    q = heads(d.heads, "query heads")
    kv = heads(d.kv_heads, "kv heads")
    rows = [model["q_w"][q], model["k_w"][kv], model["v_w"][kv]]
    if config.selects(layer):
        rows += [model["iq_w"][heads(d.index_heads, "index heads")], model["ik_w"]]
    part = slice(inner.start, inner.stop)
    found = {
        "qkv_w": torch.cat(rows),
        "o_w": model["o_w"][:, q].contiguous(),
        "gate_up_w": torch.cat([model["gate_w"][:, part], model["up_w"][:, part]], 1),
        "down_w": model["down_w"][:, :, part].contiguous(),
    }
    if sparse:
        router = model["router_w"]
        found["router_w"] = router.new_zeros(round_up(d.experts, 16), d.hidden)
        found["router_w"][: d.experts] = router
    return found


def _rows(heads: range) -> slice:
    return slice(heads.start * HEAD_DIM, heads.stop * HEAD_DIM)
