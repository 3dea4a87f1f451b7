"""Parameters are named once; a kernel, a launcher or arguments that differ are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atom.mono.runtime.abi import KernelAbi
from op_tests.mono.runtime.kernels import COPY_ABI, CopyKey, build_copy, kernel_in

ABI = KernelAbi(("out", "x", "rows"))


def kernel(out, x, rows): ...
def launch(out, x, rows, stream): ...


def _kernel(function):
    return SimpleNamespace(_func=function)


def _launcher(function):
    return SimpleNamespace(func=function)


def test_a_kernel_and_launcher_with_the_declared_parameters_pass():
    ABI.check(_kernel(kernel), _launcher(launch))


def test_flydsls_own_objects_pass():
    launcher = build_copy(CopyKey())
    COPY_ABI.check(kernel_in(launcher), launcher)


@pytest.mark.parametrize(
    ("made_kernel", "made_launcher", "said"),
    [
        (lambda x, out, rows: 0, launch, "parameter 0 is x, declared is out"),
        (lambda out, x: 0, launch, "parameter 2 is nothing, declared is rows"),
        (lambda out, x, rows, more: 0, launch, "parameter 3 is more, declared is nothing"),
        (kernel, kernel, "parameter 3 is nothing, declared is stream"),
        (kernel, lambda stream, out, x, rows: 0, "parameter 0 is stream, declared is out"),
    ],
)
def test_another_parameter_list_is_refused_by_position(made_kernel, made_launcher, said):
    with pytest.raises(TypeError, match=said):
        ABI.check(_kernel(made_kernel), _launcher(made_launcher))


def test_what_is_not_a_kernel_object_is_refused():
    with pytest.raises(TypeError, match="keep the object its decorator made"):
        ABI.check(_kernel(kernel), launch)


def test_values_are_packed_in_the_declared_order():
    assert ABI.pack({"rows": 3, "out": 1, "x": 2}) == (1, 2, 3)
    assert ABI.zeros() == (0, 0, 0)


def test_packing_names_what_is_missing_and_what_is_unexpected():
    with pytest.raises(TypeError) as error:
        ABI.pack({"out": 1, "cols": 3, "eps": 0})
    assert str(error.value) == "ABI mismatch: missing [x, rows], unexpected [cols, eps]"


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a", "stream")])
def test_names_that_cannot_be_an_abi_are_refused(names: tuple[str, ...]):
    with pytest.raises(ValueError, match=names[-1]):
        KernelAbi(names)
    with pytest.raises(ValueError, match=names[-1]):
        KernelAbi(names[:-1], keyword_names=names[-1:])


def test_parameters_behind_the_stream_are_checked_but_not_packed():
    abi = KernelAbi(("out", "x"), keyword_names=("cache_args",))
    taken = lambda out, x, cache_args: 0
    abi.check(_kernel(taken), _launcher(lambda out, x, stream, cache_args=0: 0))
    assert (abi.pack({"x": 2, "out": 1}), abi.zeros()) == ((1, 2), (0, 0))
    with pytest.raises(TypeError, match="parameter 2 is cache_args, declared is stream"):
        abi.check(_kernel(taken), _launcher(lambda out, x, cache_args, stream: 0))
    with pytest.raises(TypeError, match="unexpected \\[cache_args\\]"):
        abi.pack({"x": 2, "out": 1, "cache_args": 3})


def test_binding_takes_exactly_the_names_that_a_step_does_not_bring():
    abi = KernelAbi(("w", "eps", "h", "pos"), step=("h", "pos"))
    assert abi.bind({"eps": 30, "w": 10}) == (10, 30)
    with pytest.raises(TypeError, match=r"missing \[eps\], unexpected \[h\]"):
        abi.bind({"w": 10, "h": 2})


def test_what_a_step_brings_must_come_last():
    with pytest.raises(ValueError, match="are not the last of"):
        KernelAbi(("h", "w"), step=("h",))
