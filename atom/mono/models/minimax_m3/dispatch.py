"""Which deployments and which steps take the mono path."""

from __future__ import annotations

from collections.abc import Iterator

from atom.mono.runtime.deployment import Deployment, common_refusals

from .builds import PAGE
from .config import Config

SUPPORTED_TP = (1, 2, 4)


def refusals(config: Config, deployment: Deployment) -> Iterator[str]:
    """Why `deployment` cannot run this model's kernels, one reason each."""
    yield from common_refusals(deployment, SUPPORTED_TP)
    if deployment.tensor_parallel != config.tp:
        yield f"built for tensor parallel {config.tp}, deployed with {deployment.tensor_parallel}"
    if deployment.kv_dtype != config.kv_format:
        yield f"built for caches in {config.kv_format}, deployed with {deployment.kv_dtype}"
    if deployment.page != PAGE:
        yield f"a cache page is a block of the selection, {PAGE} tokens, not {deployment.page}"
    if deployment.context > config.context:
        yield (f"sequences of {deployment.context} tokens: the selection covers {config.context}")


def width_for(config: Config, rows: int) -> int | None:
    """The width that a decode step of `rows` rows is padded to; None if it has too many or none."""
    return min((width for width in config.widths if 0 < rows <= width), default=None)
