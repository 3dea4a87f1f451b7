"""The stream and the device that launches go to."""

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


def not_current(device: torch.device) -> str | None:
    """Why launches meant for `device` would go to another one; None where they do not.

    Kernels are launched, and peer memory is allocated, on the current device.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return None
    return f"tensors are on {device}, the current device is cuda:{torch.cuda.current_device()}"
