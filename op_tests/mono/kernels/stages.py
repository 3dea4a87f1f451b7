"""Standalone launchers of single stages, and the operands they are tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import flydsl.compiler as flyc
import flydsl.expr as fx
import torch

from aiter.ops.shuffle import shuffle_scale, shuffle_weight
from atom.mono.device.cta import Cta
from atom.mono.device.matvec import TILE_BYTES
from atom.mono.device.sync import WORD, Waits
from atom.mono.plan.execution import THREADS
from atom.mono.plan.trace import enter_stage
from op_tests.torch_moe import mx_quantise

ADDRESSES = 12

# What a stage's launcher runs: the workgroup, the addresses, a number and the waits.
Body = Callable[[Cta, list[fx.Int64], fx.Int32, Waits], None]


def stage_launcher(
    body: Body,
    blocks: int = 3,
    lds_bytes: int = 2 * TILE_BYTES,
    debug: bool = False,
    polls: int = 100,
) -> flyc.JitFunction:
    """Launcher (12 addresses, number, diag, stream) of a kernel that is `body` alone."""

    @flyc.kernel(known_block_size=[THREADS, 1, 1])
    def stage(
        a0: fx.Int64,
        a1: fx.Int64,
        a2: fx.Int64,
        a3: fx.Int64,
        a4: fx.Int64,
        a5: fx.Int64,
        a6: fx.Int64,
        a7: fx.Int64,
        a8: fx.Int64,
        a9: fx.Int64,
        a10: fx.Int64,
        a11: fx.Int64,
        number: fx.Int32,
        diag: fx.Int64,
    ):
        cta = Cta(blocks, lds_bytes)
        enter_stage("test")
        body(
            cta,
            [a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11],
            number,
            Waits(diag, debug, polls),
        )

    @flyc.jit
    def launch_stage(
        a0: fx.Int64,
        a1: fx.Int64,
        a2: fx.Int64,
        a3: fx.Int64,
        a4: fx.Int64,
        a5: fx.Int64,
        a6: fx.Int64,
        a7: fx.Int64,
        a8: fx.Int64,
        a9: fx.Int64,
        a10: fx.Int64,
        a11: fx.Int64,
        number: fx.Int32,
        diag: fx.Int64,
        stream: fx.Stream,
    ):
        stage(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, number, diag).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    return launch_stage


def run_stage(
    launcher: flyc.JitFunction,
    addresses: list[torch.Tensor | None],
    number: int = 1,
    diag: torch.Tensor | None = None,
) -> None:
    """Run a `stage_launcher` on up to 12 tensors."""
    padded = [*addresses, *[None] * (ADDRESSES - len(addresses))]
    launcher(*padded, number, diag, None)


def words_of(values: torch.Tensor, tag: int) -> torch.Tensor:
    """Mailbox words [..., 2] i32 of f32 or i32 values [...], or of bf16 pairs [..., 2]."""
    low = values.contiguous().view(torch.int32) if values.dtype != torch.int32 else values
    return torch.stack([low, torch.full_like(low, tag)], -1)


def empty_words(count: int) -> torch.Tensor:
    """`count` words as step begin leaves them."""
    return torch.zeros(count, WORD // 4, dtype=torch.int32)


def floats_in(words: torch.Tensor, tag: int) -> torch.Tensor:
    """The f32 values of words that must all have `tag`."""
    assert (words[:, 1] == tag).all()
    return words[:, 0].contiguous().view(torch.float32)


def pairs_in(words: torch.Tensor, tag: int) -> torch.Tensor:
    """The bf16 values, two a word, of words that must all have `tag`."""
    assert (words[:, 1] == tag).all()
    return words[:, 0].contiguous().view(torch.bfloat16)


@dataclass(frozen=True)
class StoredWeight:
    """A weight [..., N, K] as the kernels read it and as the reference does."""

    fmt: str
    data: torch.Tensor
    scale: torch.Tensor | None
    value: torch.Tensor  # f32

    @classmethod
    def of(cls, value: torch.Tensor, fmt: str) -> StoredWeight:
        """Round f32 values to `fmt` and lay them out."""
        if fmt == "bf16":
            rounded = value.to(torch.bfloat16)
            return cls(fmt, shuffle_weight(rounded), None, rounded.float())
        mx = mx_quantise(value, fmt)
        scale = shuffle_scale(mx.scale.reshape(-1, mx.scale.shape[-1]))
        return cls(fmt, shuffle_weight(mx.data), scale, mx.dequantised())
