"""Custom ops: schema from annotations, fakes held to the op's parameters, scalar results."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aiter.jit.utils.torch_guard import run_host_scalar_ops_for_real, torch_compile_guard

_serial = itertools.count()


def _named(func: Callable[..., Any]) -> Callable[..., Any]:
    """An op can be defined once a process; give each test's op a name of its own."""
    func.__name__ = f"test_{func.__name__}_{next(_serial)}"
    return func


def _scaled() -> Callable[..., torch.Tensor]:
    def fake(x: torch.Tensor, factor: int, bias: torch.Tensor | None, negate: bool = False):
        return torch.empty_like(x)

    @torch_compile_guard(gen_fake=fake)
    @_named
    def scaled(
        x: torch.Tensor, factor: int, bias: torch.Tensor | None, negate: bool = False
    ) -> torch.Tensor:
        y = x * factor if bias is None else x * factor + bias
        return -y if negate else y

    return scaled


def test_an_op_computes_like_the_function_it_wraps():
    op = _scaled()
    x = torch.arange(4.0)
    assert torch.equal(op(x, 3, None), x * 3)
    assert torch.equal(op(x, factor=2, bias=torch.ones(4), negate=True), -(x * 2 + 1))


def test_an_op_gives_fake_results_under_fake_tensor_mode():
    op = _scaled()
    with FakeTensorMode():
        assert op(torch.empty(5, 7), 3, None).shape == (5, 7)


def test_compile_sees_one_node():
    op = _scaled()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: op(x, 3, None) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 4.0))
    calls = [n for n in graphs[0].graph.nodes if "aiter" in str(n.target)]
    assert len(calls) == 1


def test_mutated_arguments_are_in_the_schema():
    @torch_compile_guard(mutates_args=("out",))
    @_named
    def fill(out: torch.Tensor, value: float) -> None:
        out.fill_(value)

    out = torch.zeros(3)
    fill(out, 2.0)
    assert torch.equal(out, torch.full((3,), 2.0))
    schema = getattr(torch.ops.aiter, fill.__name__).default._schema
    assert [a.alias_info is not None for a in schema.arguments] == [True, False]
    with FakeTensorMode():
        fill(torch.empty(3), 1.0)


@pytest.mark.parametrize(
    ("fake", "shown"),
    [
        (lambda x: x, r"takes \(x\)"),
        (lambda x, factor, extra: x, r"takes \(x, factor, extra\)"),
        (lambda factor, x: x, r"takes \(factor, x\)"),
        (lambda x, *rest: x, r"takes \(x, \*rest\)"),
        (lambda x, **rest: x, r"takes \(x, \*\*rest\)"),
    ],
)
def test_a_fake_with_other_parameters_is_refused_at_decoration(
    fake: Callable[..., Any], shown: str
):
    def op(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    with pytest.raises(TypeError, match=shown + r", but the op takes \(x, factor\)"):
        torch_compile_guard(gen_fake=fake)(_named(op))
    assert not hasattr(torch.ops.aiter, op.__name__)


def test_an_op_that_returns_a_tensor_needs_a_fake():
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(TypeError, match="needs gen_fake"):
        torch_compile_guard()(_named(op))


def test_an_op_needs_annotations():
    def op(x, n):
        return None

    with pytest.raises(ValueError, match="annotation"):
        torch_compile_guard()(_named(op))


def _count() -> Callable[[int], int]:
    @torch_compile_guard()
    @_named
    def count(tokens: int, scale: float = 2.0) -> int:
        return int(tokens * scale)

    return count


def test_a_scalar_op_needs_no_tensor():
    assert _count()(21) == 42


def test_a_scalar_op_has_no_value_under_fake_tensors_unless_it_may_run():
    op = _count()
    with FakeTensorMode():
        with pytest.raises(NotImplementedError, match="run_host_scalar_ops_for_real"):
            op(21)
        with run_host_scalar_ops_for_real():
            with run_host_scalar_ops_for_real():
                pass
            assert op(21) == 42
        with pytest.raises(NotImplementedError):
            op(21)


def test_the_scalar_switch_is_one_even_if_the_module_is_loaded_twice():
    import importlib.util
    import sys

    from aiter.jit.utils import host_scalars, torch_guard

    spec = importlib.util.spec_from_file_location("other_name.torch_guard", torch_guard.__file__)
    twin = importlib.util.module_from_spec(spec)
    sys.modules["other_name.torch_guard"] = twin
    try:
        spec.loader.exec_module(twin)
        with twin.run_host_scalar_ops_for_real():
            assert torch_guard.host_scalar_ops_run()
        assert not host_scalars.host_scalar_ops_run()
    finally:
        del sys.modules["other_name.torch_guard"]
