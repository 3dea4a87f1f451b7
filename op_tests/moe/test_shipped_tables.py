"""The shipped tables are what their writer writes, and the runtime serves every row of them."""

import pytest

from aiter.configs.write_tables import FOLDER, TABLES, table_text
from aiter.jit.core import AITER_CONFIGS, load_fmoe
from aiter.jit.utils.chip_info import Target
from aiter.ops.flydsl.moe.request import MoeRequest, Policy, caller_variants
from aiter.ops.flydsl.moe.selection import select
from aiter.ops.flydsl.moe.tiers import served_range


@pytest.mark.parametrize("name", TABLES)
def test_a_shipped_table_is_what_its_writer_writes(name):
    assert (FOLDER / name).read_text() == table_text(TABLES[name])


def test_every_shipped_row_is_served_by_its_own_kernels():
    tables = load_fmoe(AITER_CONFIGS.fmoe)
    assert tables.rows
    assert not tables.defects
    assert not tables.conflicts
    for row in tables.rows:
        key = row.key
        low, high = served_range(key.token, cap=200000)
        for variant in caller_variants(row):
            for tokens in (low, high):
                request = MoeRequest(
                    target=Target(key.gfx, key.cu_num),
                    policy=Policy(False, True, False),
                    tokens=tokens,
                    model_dim=key.model_dim,
                    inter_dim=key.inter_dim,
                    experts=key.expert,
                    topk=key.topk + variant.expert_parallel,
                    dtype=key.dtype,
                    a_dtype=key.q_dtype_a,
                    w_dtype=key.q_dtype_w,
                    activation=key.act_type,
                    quant_type=key.q_type,
                    use_g1u1=key.use_g1u1,
                    doweight_stage1=key.doweight_stage1,
                    shuffled=True,
                    caller=variant,
                )
                plan = select(request, tables)
                assert plan.source == str(row.source)
                assert not plan.reasons
