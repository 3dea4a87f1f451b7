"""Parameters are named once; a kernel, a launcher or arguments that differ are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atom.mono.runtime.abi import KernelAbi, StepPack
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
    assert ABI.pack({"rows": 3, "out": 1, "x": 2}) == [1, 2, 3]
    assert ABI.zeros() == [0, 0, 0]


def test_packing_names_what_is_missing_and_what_is_unexpected():
    with pytest.raises(TypeError) as error:
        ABI.pack({"out": 1, "cols": 3, "eps": 0})
    assert str(error.value) == "ABI mismatch: missing [x, rows], unexpected [cols, eps]"


@pytest.mark.parametrize("names", [("a", "b", "a"), ("a", "stream")])
def test_names_that_cannot_be_an_abi_are_refused(names: tuple[str, ...]):
    with pytest.raises(ValueError, match=names[-1]):
        KernelAbi(names)


def test_a_steps_values_fall_between_the_bound_ones_in_abi_order():
    pack = StepPack(KernelAbi(("w", "h", "eps", "pos")), step=("pos", "h", "of_another_launcher"))
    bound = pack.bind({"eps": 30, "w": 10})
    assert pack.order((*bound, 40, 20, 99)) == (10, 20, 30, 40)
    assert pack.order((*bound, 41, 21, 98)) == (10, 21, 30, 41)


def test_a_pack_of_one_name_is_still_a_tuple():
    assert StepPack(KernelAbi(("h",)), step=("h",)).order((7,)) == (7,)


def test_binding_takes_exactly_the_names_that_are_not_fresh():
    pack = StepPack(ABI, step=("x",))
    with pytest.raises(TypeError, match=r"missing \[rows\], unexpected \[x\]"):
        pack.bind({"out": 1, "x": 2})
