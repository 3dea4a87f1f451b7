"""Real tuned tables to run against, where there are any: AITER_TEST_TABLES or ../shared/tables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DEFAULT = Path(__file__).resolve().parents[2].parent / "shared" / "tables"
FOLDER = Path(os.environ.get("AITER_TEST_TABLES") or _DEFAULT)
TABLES = sorted(FOLDER.glob("*.csv")) if FOLDER.is_dir() else []

needs_tables = pytest.mark.skipif(
    not TABLES, reason=f"no tuned tables in {FOLDER}; name a folder of them in AITER_TEST_TABLES"
)
