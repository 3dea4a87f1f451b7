"""Where tuned tables are: :data:`AITER_CONFIGS`.

Reading and merging them as text is in :mod:`aiter.jit.tables`, the typed rows of the fused
MoE in :mod:`aiter.jit.tuned`; both are re-exported here. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

from aiter import env
from aiter.jit.tables import (
    Conflict,
    Defect,
    RawRow,
    RawTable,
    TableError,
    merge_tables,
    read_table,
    to_csv,
)
from aiter.jit.tuned import FmoeTable, TunedKey, TunedRow, load_fmoe

__all__ = [
    "AITER_CONFIGS",
    "Conflict",
    "Defect",
    "FmoeTable",
    "RawRow",
    "RawTable",
    "TableError",
    "TunedKey",
    "TunedRow",
    "load_fmoe",
    "merge_tables",
    "read_table",
    "to_csv",
]

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"


class Configs:
    """The tables of each family, in the order they are merged.

    A family is the variable that overrides it, if set, else its default CSV and every model's
    table: ``model_configs/*<name>*.csv`` whose name does not hold "untuned". Evaluated at each
    access. A file that an override names need not exist here; reading it says so.
    """

    def __init__(self, folder: Path = CONFIG_DIR) -> None:
        self._folder = folder

    @property
    def fmoe(self) -> tuple[Path, ...]:
        """Fused MoE: two-stage and one-stage kernels."""
        return self._family("tuned_fmoe", env.AITER_CONFIG_FMOE)

    @property
    def fhmoe(self) -> tuple[Path, ...]:
        """Fused MoE with a shared expert of its own precision."""
        return self._family("tuned_fhmoe", env.AITER_CONFIG_FHMOE)

    @property
    def grouped_fmoe(self) -> tuple[Path, ...]:
        """Grouped MoE of gfx1250."""
        return self._family("tuned_grouped_fmoe", env.AITER_CONFIG_GROUPED_FMOE)

    def _family(self, name: str, override: env.EnvVar[tuple[str, ...]]) -> tuple[Path, ...]:
        named = override.get()
        if named:
            return tuple(Path(part).expanduser() for part in named)
        default = self._folder / f"{name}.csv"
        models = sorted((self._folder / "model_configs").glob(f"*{name}*.csv"))
        files = [default, *(path for path in models if "untuned" not in path.name)]
        return tuple(path for path in files if path.is_file())


AITER_CONFIGS = Configs()
