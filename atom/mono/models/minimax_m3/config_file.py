"""A deployment's configuration as a JSON object, for command lines."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

from .builds import MINIMAX_M3, Dims
from .config import Config

_JSON_NAMES = {
    bool: "truth value",
    int: "whole number",
    float: "number",
    str: "string",
    tuple: "list",
    frozenset: "list",
}


def config_of(values: object) -> Config:
    """The configuration that a JSON object describes: `Config` but for the fields it names.

    `dims` is an object of `Dims`' fields, sets and tuples are lists; `index_topk_freq` stands for
    `reusing`. Raises ValueError, which names the field, for what is no configuration.
    """
    given = _fields("configuration", values, {**_kinds(Config), "index_topk_freq": int})
    freq = given.pop("index_topk_freq", None)
    if "dims" in given:
        dims = _fields("dims", given["dims"], _kinds(Dims))
        given["dims"] = replace(MINIMAX_M3, **dims)
    config = replace(Config(), **given)
    if freq is None:
        return config
    if "reusing" in given or freq < 1:
        raise ValueError(f"index_topk_freq {freq}: from 1 on, and instead of reusing")
    return config.with_index_topk_freq(freq)


def _kinds(kind: type) -> dict[str, type]:
    """The type of each field's default, or int where it has none."""
    return {
        field.name: int if field.default is MISSING else type(field.default)
        for field in fields(kind)
    }


def _fields(what: str, values: object, kinds: dict[str, type]) -> dict[str, Any]:
    """`values` with lists made tuples and sets. Raises ValueError for other names and types."""
    if not isinstance(values, dict):
        raise ValueError(f"{what} is a JSON object, not {values!r}")
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"{what} has no field {name!r}; it has {', '.join(sorted(kinds))}")
        kind = kinds[name]
        if kind in (tuple, frozenset) and isinstance(value, list):
            if any(type(item) is not int for item in value):
                raise ValueError(f"{name} is a list of whole numbers, not {value!r}")
            value = kind(value)
        elif kind is float and type(value) is int:
            value = float(value)
        elif kind is not Dims and type(value) is not kind:
            raise ValueError(f"{name} is a {_JSON_NAMES[kind]}, not {value!r}")
        found[name] = value
    return found
