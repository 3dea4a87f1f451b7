"""Register Python functions as ``torch.ops.aiter`` operators, so torch.compile sees one node.

The schema is derived from the function's annotations, and a fake must take exactly the
function's parameters: a fake that lags behind its op otherwise fails only when somebody
traces it, with a TypeError far from its cause.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from aiter.jit.utils.host_scalars import host_scalar_ops_run, run_host_scalar_ops_for_real

__all__ = ["run_host_scalar_ops_for_real", "torch_compile_guard"]

P = ParamSpec("P")
R = TypeVar("R")

_NAMESPACE = "aiter"
_SCALARS = frozenset({"SymInt", "float", "bool", "Scalar"})
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def torch_compile_guard(
    mutates_args: Sequence[str] = (), gen_fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function to be called as the operator ``torch.ops.aiter.<its name>``.

    mutates_args names the tensors it writes. gen_fake computes the shape of the result from
    the same parameters; it may be left out where nothing is returned, and where a number is,
    whose value a trace gets only inside :func:`run_host_scalar_ops_for_real`. Parameters and
    result must be annotated with what torch's schemas know: tensors, numbers, strings, and
    optionals and lists of them. No parameter needs to be a tensor.

    Raises TypeError for a fake that is missing or whose parameters are not the function's,
    ValueError for annotations that have no schema.
    """

    def decorate(func: Callable[P, R]) -> Callable[P, R]:
        name = func.__name__
        schema = torch.library.infer_schema(func, mutates_args=tuple(mutates_args))
        fake = _fake_of(func, schema.rpartition("->")[2].strip(), gen_fake)
        _library.define(name + schema)
        _library.impl(name, func, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
        op = getattr(getattr(torch.ops, _NAMESPACE), name).default

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return op(*args, **kwargs)

        return call

    return decorate


def _fake_of(
    func: Callable[..., Any], returns: str, gen_fake: Callable[..., Any] | None
) -> Callable[..., Any]:
    op = f"{_NAMESPACE}::{func.__name__}"
    if gen_fake is not None:
        _require_same_parameters(op, func, gen_fake)
    if returns in _SCALARS:
        return _scalar_fake(op, func, gen_fake)
    if gen_fake is not None:
        return gen_fake
    if returns == "()":
        return lambda *args, **kwargs: None
    raise TypeError(f"{op} returns {returns}, so it needs gen_fake to tell the result's shape")


def _scalar_fake(
    op: str, func: Callable[..., Any], gen_fake: Callable[..., Any] | None
) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        if host_scalar_ops_run():
            return func(*args, **kwargs)
        if gen_fake is not None:
            return gen_fake(*args, **kwargs)
        raise NotImplementedError(
            f"{op} returns a number, which fake tensors do not have; trace it inside "
            "run_host_scalar_ops_for_real()"
        )

    return fake


def _require_same_parameters(op: str, func: Callable[..., Any], fake: Callable[..., Any]) -> None:
    wanted = _parameters(func)
    given = _parameters(fake)
    if given != wanted:
        raise TypeError(
            f"the fake of {op} takes ({', '.join(given)}), but the op takes ({', '.join(wanted)})"
        )


def _parameters(func: Callable[..., Any]) -> list[str]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(func).parameters.values()
    return [stars.get(parameter.kind, "") + parameter.name for parameter in parameters]
