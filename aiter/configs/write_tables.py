"""Write the shipped tables: `python -m aiter.configs.write_tables`.

Until a shape is measured its rows hold the heuristic kernels, which is what the runtime would
choose without a row, and the measured columns are blank.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

from aiter.jit.utils.chip_info import Target
from aiter.ops.enum import ActivationType, GateMode, QuantType
from aiter.ops.flydsl.kernel_names import format_name
from aiter.ops.flydsl.moe.heuristics import heuristic_names
from aiter.ops.flydsl.moe.request import BF16, FP4, FP8, CallerVariant, MoeRequest, Policy
from aiter.ops.flydsl.moe.tiers import TIERS

FOLDER = Path(__file__).resolve().parent / "model_configs"
COLUMNS = (
    *("gfx", "cu_num", "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype"),
    *("q_dtype_a", "q_dtype_w", "q_type", "use_g1u1", "doweight_stage1", "block_m", "ksplit"),
    *("us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage"),
    *("tflops", "bw", "_tag"),
)
TOKENS = (*(1 << i for i in range(15)), *TIERS)


@dataclass(frozen=True)
class Shape:
    """A model's experts on one device: D, I, E and top-k, its types and activation."""

    model_dim: int
    inter_dim: int
    experts: int
    topk: int
    a_dtype: str = FP8
    w_dtype: str = FP4
    activation: ActivationType = ActivationType.Silu

    @property
    def gate_mode(self) -> GateMode:
        """Loaders interleave gate and up for fp8 activations."""
        return GateMode.INTERLEAVE if self.a_dtype == FP8 else GateMode.SEPARATED


# File -> the shapes its rows are for.
TABLES = {
    # DeepSeek-V4 with inter_dim split to 512 a device, and with experts split over eight devices.
    "dsv4_a8w4_tuned_fmoe.csv": (Shape(7168, 512, 384, 6), Shape(7168, 3072, 48, 6)),
    # GLM-5 with its shared expert as one more, over eight and over four devices.
    "glm5_a4w4_tuned_fmoe.csv": (
        Shape(6144, 256, 257, 9, FP4),
        Shape(6144, 512, 257, 9, FP4),
    ),
    "glm5_mxfp8_tuned_fmoe.csv": (Shape(6144, 256, 257, 9, FP8, FP8),),
    # GPT-OSS, on one device; its experts have biases. Few tokens are not quantised.
    "gptoss_a16w4_tuned_fmoe.csv": (Shape(3072, 3072, 128, 4, BF16, FP4, ActivationType.Swiglu),),
    "gptoss_a4w4_tuned_fmoe.csv": (Shape(3072, 3072, 128, 4, FP4, FP4, ActivationType.Swiglu),),
    # Kimi-K3, over eight devices; not quantised unless a server asks for it.
    "kimik3_a16w4_tuned_fmoe.csv": (Shape(3584, 384, 896, 16, BF16, FP4, ActivationType.Situv2),),
    "kimik3_a4w4_tuned_fmoe.csv": (Shape(3584, 384, 896, 16, FP4, FP4, ActivationType.Situv2),),
}


def _row(shape: Shape, tokens: int, target: Target) -> dict[str, object]:
    request = MoeRequest(
        target=target,
        policy=Policy(bypass_tables=True, use_heuristics=True, force_reduce=False),
        tokens=tokens,
        model_dim=shape.model_dim,
        inter_dim=shape.inter_dim,
        experts=shape.experts,
        topk=shape.topk,
        dtype="bfloat16",
        a_dtype=shape.a_dtype,
        w_dtype=shape.w_dtype,
        activation=shape.activation,
        quant_type=QuantType.per_1x32,
        use_g1u1=True,
        doweight_stage1=False,
        shuffled=True,
        caller=CallerVariant(shape.gate_mode),
    )
    stage1, stage2 = heuristic_names(request)
    return {
        "gfx": target.gfx,
        "cu_num": target.cu_num,
        "token": tokens,
        "model_dim": shape.model_dim,
        "inter_dim": shape.inter_dim,
        "expert": shape.experts,
        "topk": shape.topk,
        "act_type": request.activation.cell,
        "dtype": f"torch.{request.dtype}",
        "q_dtype_a": f"torch.{request.a_dtype}",
        "q_dtype_w": f"torch.{request.w_dtype}",
        "q_type": request.quant_type.cell,
        "use_g1u1": 1,
        "doweight_stage1": 0,
        "block_m": stage1.tile_m,
        "ksplit": 0,
        "kernelName1": format_name(stage1),
        "kernelName2": format_name(stage2),
        "run_1stage": 0,
    }


def table_text(shapes: tuple[Shape, ...]) -> str:
    """The CSV of `shapes` for gfx950."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    target = Target.of("gfx950")
    writer.writerows(_row(shape, tokens, target) for shape in shapes for tokens in TOKENS)
    return out.getvalue()


def main() -> None:
    for name, shapes in TABLES.items():
        path = FOLDER / name
        path.write_text(table_text(shapes))
        print(path)


if __name__ == "__main__":
    main()
