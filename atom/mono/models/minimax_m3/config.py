"""Dimensions, parallelism and options of one deployment, and the build keys they give."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aiter import env
from atom.mono.device.step_begin import StepBeginBuild

from .builds import (
    MINIMAX_M3,
    PAGE,
    WIDTHS,
    DensePostBuild,
    DensePreBuild,
    Dims,
    LayerShape,
    SparseBuild,
)


@dataclass(frozen=True)
class Config:
    """A model and how it is run.

    `reusing` are the layers that attend to the blocks the last selecting layer chose. Behind the
    layers in `aux_layers` the residual stream is kept for a draft model. `widths` are the numbers
    of rows a step may have; a step is padded to one of them. `blocks` and `polls` are for tests on
    small grids and for debug builds, as in `LayerShape`; `check` has the runner check itself.
    Raises ValueError for layers that are not there or cannot be in that order, and for what no
    kernel serves.
    """

    dims: Dims = MINIMAX_M3
    layers: int = 60
    dense_layers: int = 3
    tp: int = 4
    reusing: frozenset[int] = frozenset()
    aux_layers: tuple[int, ...] = ()
    attn_format: str = DensePreBuild.attn_format
    dense_format: str = DensePostBuild.ffn_format
    expert_format: str = SparseBuild.ffn_format
    kv_format: str = SparseBuild.kv_format
    index_format: str = SparseBuild.index_format
    index_topk: int = SparseBuild.index_topk
    init_blocks: int = SparseBuild.init_blocks
    local_blocks: int = SparseBuild.local_blocks
    max_blocks: int = SparseBuild.max_blocks
    eps: float = LayerShape.eps
    route_scale: float = SparseBuild.route_scale
    shared_weight: float = SparseBuild.shared_weight
    swiglu_limit: float = SparseBuild.swiglu_limit
    widths: tuple[int, ...] = WIDTHS
    blocks: int = LayerShape.blocks
    debug: bool = False
    polls: int = LayerShape.polls
    timeline: bool = False
    check: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"{self.dense_layers} of {self.layers} layers are dense")
        outside = sorted(i for i in self.reusing if not self.dense_layers < i < self.layers)
        if outside:
            raise ValueError(
                f"layers {outside} cannot reuse a selection: sparse layers "
                f"{self.dense_layers + 1} to {self.layers - 1} can"
            )
        if not set(self.aux_layers) <= set(range(self.layers)):
            raise ValueError(f"aux_layers {self.aux_layers} of a model of {self.layers} layers")
        if not self.widths:
            raise ValueError("a configuration without widths serves no step")
        self.builds()  # what no kernel serves is refused here, not when a width is prepared

    def with_index_topk_freq(self, freq: int) -> Config:
        """With the first of every `freq` sparse layers selecting and the others reusing.

        The meaning of a checkpoint's `index_topk_freq` where `use_index_cache` is set.
        """
        reusing = (i for i in self.sparse_layers if (i - self.dense_layers) % freq)
        return replace(self, reusing=frozenset(reusing))

    def with_env(self) -> Config:
        """With what the environment asks for besides: ATOM_MONO_DEBUG, _TIMELINE and _CHECK."""
        return replace(
            self,
            debug=self.debug or env.ATOM_MONO_DEBUG.get(),
            timeline=self.timeline or env.ATOM_MONO_TIMELINE.get(),
            check=self.check or env.ATOM_MONO_CHECK.get(),
        )

    @property
    def sparse_layers(self) -> range:
        """The indices of the sparse layers."""
        return range(self.dense_layers, self.layers)

    def selects(self, layer: int) -> bool:
        """Whether `layer` chooses the blocks it attends to."""
        return layer >= self.dense_layers and layer not in self.reusing

    @property
    def context(self) -> int:
        """The longest sequence in tokens."""
        return self.max_blocks * PAGE

    @property
    def launches(self) -> int:
        """Launches of a step, without those of the dense layers' attention."""
        return 1 + 2 * self.dense_layers + len(self.sparse_layers)

    @property
    def scaled_caches(self) -> bool:
        """Whether elements of any cache stand for a multiple of themselves."""
        return "fp8" in (self.kv_format, self.index_format)

    def shape(self, rows: int) -> LayerShape:
        """What every layer kernel of width `rows` is built for."""
        return LayerShape(
            self.dims,
            tp=self.tp,
            tokens=rows,
            eps=self.eps,
            blocks=self.blocks,
            debug=self.debug,
            polls=self.polls,
            timeline=self.timeline,
        )

    def builds(self) -> list[StepBeginBuild | DensePreBuild | DensePostBuild | SparseBuild]:
        """The keys of every kernel of every width, whether a layer needs it or not."""
        found: list[StepBeginBuild | DensePreBuild | DensePostBuild | SparseBuild]
        found = [self.step_begin()]
        for rows in self.widths:
            found += [self.dense_pre(rows), self.dense_post(rows)]
            found += [self.sparse(rows, select) for select in (True, False)]
        return found

    def step_begin(self) -> StepBeginBuild:
        """Key of step-begin."""
        return StepBeginBuild(self.tp, self.debug, self.blocks, self.polls)

    def dense_pre(self, rows: int) -> DensePreBuild:
        """Key of what a dense layer does before its attention."""
        return DensePreBuild(self.shape(rows), self.attn_format, self.kv_format)

    def dense_post(self, rows: int) -> DensePostBuild:
        """Key of what it does after it."""
        return DensePostBuild(
            self.shape(rows), self.attn_format, self.dense_format, self.swiglu_limit
        )

    def sparse(self, rows: int, select: bool) -> SparseBuild:
        """Key of a sparse layer that chooses its blocks, or reuses the last choice."""
        return SparseBuild(
            self.shape(rows),
            select=select,
            attn_format=self.attn_format,
            ffn_format=self.expert_format,
            kv_format=self.kv_format,
            index_format=self.index_format,
            index_topk=self.index_topk,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
            max_blocks=self.max_blocks,
            route_scale=self.route_scale,
            shared_weight=self.shared_weight,
            swiglu_limit=self.swiglu_limit,
        )
