"""Build keys of the MiniMax-M3 layer kernels, and the order of their launchers' arguments.

    builder              module                          arguments
    build_dense_pre      kernels/dense_pre.py            DENSE_PRE_ABI, then the stream
    build_dense_post     kernels/dense_post.py           DENSE_POST_ABI, then the stream
    build_sparse_layer   kernels/sparse_layer.py         SPARSE_ABI, then the stream

Every argument is an `fx.Int64` address but those of `I32_NAMES`. The arguments that a step brings
(`*_STEP`) come behind those that are bound for good, so that a launch only joins two tuples; the
last bound one is `h_in`, which a step brings to its first layer.
Sizes are those of one rank: "local" counts are the model's divided by `tp`. A matrix [N, K] is
stored as `atom.mono.device.matvec` says for its format: bf16, fp8 and fp4, the latter two with
e8m0 scales of 32 elements in the byte order of `shuffle_scale`. Addresses of scales are 0 for bf16.

    h_in, h_out       [tokens, hidden] bf16      residual stream; not the same buffer
    norm*_w           [hidden] bf16              the factor itself (1 + w where a model stores w)
    qkv_w, qkv_s      [qkv rows, hidden]         rows: q heads, k heads, v heads; where a layer
                                                 selects then index q heads, one index k head
    q_norm_w, ...     [head_dim] bf16            per-head norm factors
    cos_sin           [positions, rotary] f32    rotary / 2 cosines, then as many sines
    positions         [tokens] i32               from 0; also the row of cos_sin
    slots             [tokens] i32               cache cell: page * PAGE + place; -1: a padding row,
                                                 which has a position and pages like any other, but
                                                 enters no cache and takes no routed expert: what
                                                 comes out of it means nothing
    k_cache           [pages, local kv heads, PAGE, head_dim] in the build's kv_format
    v_cache           [pages, local kv heads, head_dim, PAGE] in kv_format
    index_cache       [pages, PAGE, head_dim] in index_format
    cache_scales      [3] f32                    what an fp8 element of k, v and index k is
                                                 multiplied by; 0 where all caches are bf16
    block_table       [tokens, table_stride] i32 page of each PAGE-token block of the row's sequence
    selection         [tokens, local kv heads, index_topk] i32  blocks attended to, -1 for none;
                      written by a full layer, read by one that reuses
    q_out, attn_in    [tokens, local heads * head_dim] bf16
    o_w, o_s          [hidden, local heads * head_dim]
    router_w          [experts rounded up to 16, hidden] bf16
    router_bias       [experts] f32              added to the scores that experts are chosen by
    gate_up_w, _s     [experts + 1, 2 * local inter, hidden]  gate rows, then up rows; the shared
                      expert is the last. Dense: one expert of 2 * local dense_inter rows
    down_w, down_s    [experts + 1, hidden, local inter]; dense [1, hidden, local dense_inter]
    scratch           this rank's scratch, zeroed by step begin; `layout.scratch_layout`
    peers             [tp] i64: address of each rank's peer buffer; `layout.peer_layout`
    rank              i32
    layer             i32 from 0; no two layers of a step may have the same
    table_stride      i32 entries of a block_table row
    diag              debug builds: `atom.mono.device.sync.DIAG_BYTES` of wait records, else 0
    stamps            timeline builds: this launch's part of `atom.mono.device.stamps`, else 0

A layer that reuses the last selection has no index heads: its index arguments are 0. What the
caches hold beyond a row's position does not matter to it, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.mono.plan.execution import BLOCKS, THREADS, WAVES, rounds

PAGE = 128  # tokens of a cache page, and of a block of the sparse selection
QUARTERS = 4  # of a block, what a wave attends to at once
HEAD_DIM = 128
WIDTHS = (1, 4, 8, 16)
FORMATS = ("bf16", "fp8", "fp4")
CACHE_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True)
class Dims:
    """A model's dimensions over all ranks. `index_heads` divide among the kv heads."""

    hidden: int
    heads: int
    kv_heads: int
    index_heads: int
    dense_inter: int
    inter: int
    experts: int
    topk: int
    rotary: int = 64

    def __post_init__(self) -> None:
        if self.hidden % 128 or self.rotary not in (8, 16, 32, 64, 128):
            raise ValueError(f"{self}: hidden is a multiple of 128, rotary a power of two from 8")
        if self.heads % self.kv_heads or self.heads // self.kv_heads > 16:
            raise ValueError(f"{self}: at most 16 query heads share a kv head")
        if self.index_heads % self.kv_heads or not 0 < self.index_heads // self.kv_heads <= 16:
            raise ValueError(f"{self}: each kv head has 1 to 16 index heads")
        if not 0 < self.topk <= self.experts <= 1024:
            raise ValueError(f"{self}: topk of at most 1024 experts")


MINIMAX_M3 = Dims(
    hidden=6144,
    heads=64,
    kv_heads=4,
    index_heads=4,
    dense_inter=12288,
    inter=3072,
    experts=128,
    topk=4,
)


@dataclass(frozen=True)
class LayerShape:
    """What every layer kernel is built for: the model, its split over `tp` ranks and the width.

    `blocks` is the grid, one workgroup a compute unit, all of them resident at once. With `debug`
    waits give up after `polls` tries and leave a record; otherwise both are without effect. With
    `timeline` every workgroup notes when it enters a stage.
    """

    dims: Dims
    tp: int
    tokens: int
    eps: float = 1e-6
    blocks: int = BLOCKS
    debug: bool = False
    polls: int = 10_000_000
    timeline: bool = False

    def __post_init__(self) -> None:
        d = self.dims
        if not 1 <= self.tokens <= 16:
            raise ValueError(f"{self.tokens} tokens: a kernel takes 1 to 16")
        if not 1 <= self.tp <= 8 or any(n % self.tp for n in (d.heads, d.kv_heads)):
            raise ValueError(f"heads of {d} do not divide among {self.tp} ranks")
        if any(n % (128 * self.tp) for n in (d.dense_inter, d.inter)):
            raise ValueError(f"{d}: a rank's part of an inner dimension is a multiple of 128")

    @property
    def heads(self) -> int:
        return self.dims.heads // self.tp

    @property
    def kv_heads(self) -> int:
        return self.dims.kv_heads // self.tp

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.dims.heads // self.dims.kv_heads

    @property
    def index_group(self) -> int:
        """Index heads of a kv head."""
        return self.dims.index_heads // self.dims.kv_heads

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def index_rows(self) -> int:
        return (self.kv_heads * self.index_group + 1) * HEAD_DIM

    @property
    def inter(self) -> int:
        return self.dims.inter // self.tp

    @property
    def dense_inter(self) -> int:
        return self.dims.dense_inter // self.tp

    def symbol(self, stem: str, *parts: str) -> str:
        """A kernel's name in profilers: its stem, what it is built for and `parts`."""
        flags = [name for name in ("debug", "timeline") if getattr(self, name)]
        return "_".join((f"m3_{stem}", f"tp{self.tp}", f"t{self.tokens}", *parts, *flags))


def _require_format(what: str, known: tuple[str, ...], *formats: str) -> None:
    for fmt in formats:
        if fmt not in known:
            raise ValueError(f"{what} format {fmt!r} is none of {', '.join(known)}")


@dataclass(frozen=True)
class DensePreBuild:
    """Norm, QKV projection, per-head norm, rotary embedding, cache insert."""

    shape: LayerShape
    attn_format: str = "bf16"
    kv_format: str = "fp8"

    def __post_init__(self) -> None:
        _require_format("weight", FORMATS, self.attn_format)
        _require_format("cache", CACHE_FORMATS, self.kv_format)

    @property
    def symbol(self) -> str:
        return self.shape.symbol("dense_pre", self.attn_format, f"kv_{self.kv_format}")


@dataclass(frozen=True)
class DensePostBuild:
    """Output projection, all-reduce, norm, dense FFN, all-reduce."""

    shape: LayerShape
    attn_format: str = "bf16"
    ffn_format: str = "bf16"
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        _require_format("weight", FORMATS, self.attn_format, self.ffn_format)

    @property
    def symbol(self) -> str:
        return self.shape.symbol("dense_post", self.attn_format, self.ffn_format)


@dataclass(frozen=True)
class SparseBuild:
    """A whole sparse layer. `select`: choose the blocks to attend to, else reuse `selection`.

    Of a row's blocks the first `init_blocks` and the last `local_blocks` are always chosen, the
    rest of `index_topk` by index score; `max_blocks` bounds the blocks of a sequence.
    """

    shape: LayerShape
    select: bool = True
    attn_format: str = "bf16"
    ffn_format: str = "fp4"
    kv_format: str = "fp8"
    index_format: str = "fp8"
    index_topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    max_blocks: int = 8192
    sm_scale: float = HEAD_DIM**-0.5
    route_scale: float = 2.0
    shared_weight: float = 1.0
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        _require_format("weight", FORMATS, self.attn_format, self.ffn_format)
        _require_format("cache", CACHE_FORMATS, self.kv_format, self.index_format)
        if self.init_blocks + self.local_blocks > self.index_topk or self.local_blocks < 1:
            raise ValueError(f"{self}: init and local blocks are among the index_topk, local >= 1")
        if self.index_topk > THREADS:
            raise ValueError(f"{self}: a workgroup's threads choose at most {THREADS} blocks")

    @property
    def symbol(self) -> str:
        caches = (f"kv_{self.kv_format}", f"index_{self.index_format}" if self.select else "reuse")
        return self.shape.symbol("sparse_layer", self.attn_format, self.ffn_format, *caches)

    @property
    def attention_splits(self) -> int:
        """Workgroups that share the attention of one token and kv head: as many as leave it one
        round of the grid, while each of their waves has a quarter of a block."""
        splits, tasks = 1, self.shape.tokens * self.shape.kv_heads
        while (
            rounds(2 * splits * tasks, self.shape.blocks) == 1
            and 2 * splits * WAVES <= self.index_topk * QUARTERS
        ):
            splits *= 2
        return splits

    @property
    def qkv_rows(self) -> int:
        """Rows of qkv_w, with the index heads' where the layer selects."""
        return self.shape.qkv_rows + (self.shape.index_rows if self.select else 0)


DENSE_PRE_STEP = ("positions", "slots")
DENSE_PRE_ABI = (
    "norm_w",
    "qkv_w",
    "qkv_s",
    "q_norm_w",
    "k_norm_w",
    "cos_sin",
    "k_cache",
    "v_cache",
    "cache_scales",
    "q_out",
    "scratch",
    "layer",
    "diag",
    "stamps",
    "h_in",
    *DENSE_PRE_STEP,
)

DENSE_POST_ABI = (
    "attn_in",
    "o_w",
    "o_s",
    "norm_w",
    "gate_up_w",
    "gate_up_s",
    "down_w",
    "down_s",
    "scratch",
    "peers",
    "rank",
    "layer",
    "diag",
    "stamps",
    "h_out",
    "h_in",
)

SPARSE_STEP = ("positions", "slots", "block_table", "table_stride")
SPARSE_ABI = (
    "norm1_w",
    "qkv_w",
    "qkv_s",
    "q_norm_w",
    "k_norm_w",
    "iq_norm_w",
    "ik_norm_w",
    "cos_sin",
    "k_cache",
    "v_cache",
    "index_cache",
    "cache_scales",
    "selection",
    "o_w",
    "o_s",
    "norm2_w",
    "router_w",
    "router_bias",
    "gate_up_w",
    "gate_up_s",
    "down_w",
    "down_s",
    "scratch",
    "peers",
    "rank",
    "layer",
    "diag",
    "stamps",
    "h_out",
    "h_in",
    *SPARSE_STEP,
)

I32_NAMES = frozenset({"rank", "layer", "table_stride"})
