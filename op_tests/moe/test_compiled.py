"""Kernels through LLVM: what the emulator cannot show."""

import pytest

from aiter.jit.core import AITER_CONFIGS, load_fmoe
from aiter.jit.utils.chip_info import pinned
from aiter.ops.flydsl.kernels.moe_activate import ActivateKey, build_activate
from aiter.ops.flydsl.kernels.moe_reduce import ReduceKey, build_reduce
from aiter.ops.flydsl.kernels.moe_sort import PHASES, build_sort, sort_key
from aiter.ops.flydsl.kernels.mx_quant_rows import QuantKey, build_quant_rows
from aiter.ops.flydsl.kernels.resources import launcher_resources
from aiter.ops.flydsl.kernels.tensor_shim import compile_artifact
from op_tests.host.shared_tables import FOLDER, needs_tables
from op_tests.moe.cases import GFX950
from op_tests.moe.stage_names import NAMES, launchers_of

pytestmark = [pytest.mark.compile, pytest.mark.slow]

LDS_BYTES = 160 << 10


def check(launcher) -> None:
    with pinned(GFX950):
        compile_artifact(launcher)
    for resources in launcher_resources(launcher):
        assert resources.scratch_bytes == 0
        assert resources.spilled == 0
        assert resources.lds_bytes <= LDS_BYTES
        assert resources.vgprs <= 512


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[0])
def test_stages_of_every_tile_neither_spill_nor_use_scratch(flydsl_cache, names):
    for launcher in launchers_of(*names):
        check(launcher)


@needs_tables
def test_every_kernel_of_a_table_of_bf16_activations_neither_spills_nor_uses_scratch(flydsl_cache):
    names = set()
    for row in load_fmoe((FOLDER / "kimik3_fp4_tuned_fmoe.csv",)).rows:
        for kernel in (row.kernel1, row.kernel2):
            names.add((kernel, row.key.model_dim, row.key.inter_dim, row.block_m))
    launchers = {launcher for name in names for launcher in launchers_of(*name)}
    assert len(launchers) > 20
    for launcher in launchers:
        check(launcher)


def test_the_kernels_around_the_stages_neither_spill_nor_use_scratch(flydsl_cache):
    for phase in PHASES:
        for masked in (False, True):
            check(
                build_sort(
                    sort_key(
                        phase,
                        experts=896,
                        topk=16,
                        block_m=32,
                        local_tokens=True,
                        masked=masked,
                        zero=True,
                    )
                )
            )
    for fmt in ("fp4", "fp8"):
        check(build_quant_rows(QuantKey(7168, fmt, 16)))
        check(build_quant_rows(QuantKey(384, fmt, None)))
        check(build_activate(ActivateKey(384, 4, 32, "situv2", True, True, fmt)))
    check(build_activate(ActivateKey(768, 4, 32, "gelu", False, False, None)))
    check(build_reduce(ReduceKey(7168, 16)))
    assert load_fmoe(AITER_CONFIGS.fmoe).rows
