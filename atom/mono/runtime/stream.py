"""The stream that launches go to."""

from __future__ import annotations

import torch


def current_stream(device: torch.device) -> int | None:
    """The handle of torch's current stream on `device`; None where there is none, on a CPU.

    Asked for at every step: a launch on any other stream is not part of a graph capture.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def capturing() -> bool:
    """Whether the current stream is being captured, when nothing may be compiled or allocated."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
