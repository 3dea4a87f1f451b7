"""The grammar of kernel names in tuned tables: ``parse(name)`` and ``format_name(parsed)``.

A FlyDSL name is a family's prefix followed by ``_``-separated tokens in one canonical order;
each token is declared once, beside the field it sets. A token whose field has its default is
left out of a name, so that name and value correspond one to one:

    flydsl_moe1_afp8_wfp4_bf16_t32x64x256_w4_gui_kw4_fp8
    flydsl_moe2_afp4_wfp4_bf16_t64x256x256_reduce_xcd4_persist_sbm128
    flydsl_moe2_layout_afp4_wfp4_bf16_t64x256x128_reduce_sbm64_sp801
    flydsl_mxmoe_g1_a4w4_16x256x256_f16in_nt
    flydsl_mxmoe_g2_a4w4_16x256x256_atomic_nt
    grouped_gemm1_fp4_gugu
    impl__<registered>__<free-form configuration>

A name says what its table means by it. Some of that has no effect on this project's kernels: the
sort block (sbm), async, f16in, f4out and cshuffle, bf16lds, sp, and most hints of waves per EU;
persist and cumul change a grid, not code. `aiter.ops.flydsl.moe.stages` says why, parameter by
parameter, and a plan's `notes` say it of a row.

Plain Python: imports neither torch nor FlyDSL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from aiter.ops.enum import GateMode


class KernelNameError(ValueError):
    """A name no family of the grammar accepts; says which token is wrong and where."""

    def __init__(self, name: str, problem: str, token: str = "", position: int = 0) -> None:
        where = f" at {token!r}, position {position}" if token else ""
        super().__init__(f"kernel name {name!r}{where}: {problem}")
        self.name = name
        self.token = token
        self.position = position


# ---------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Token:
    """One place in a family's order: the text it accepts and the fields it sets.

    ``read`` turns a match into the fields' values; ``write`` turns values back into text, or
    into "" when they are the defaults and the token is left out.
    """

    fields: tuple[str, ...]
    expected: str
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str]], tuple[Any, ...]]
    write: Callable[..., str]
    required: bool = False


_NUMBER = r"([1-9]\d*)"


def _word(name: str, prefix: str, *values: str) -> Token:
    pattern = re.compile(f"{prefix}({'|'.join(values)})")
    return Token(
        (name,),
        f"{prefix}{{{'|'.join(values)}}}",
        pattern,
        re.Match.groups,
        f"{prefix}{{}}".format,
        True,
    )


def _tile(prefix: str) -> Token:
    return Token(
        ("tile_m", "tile_n", "tile_k"),
        f"{prefix}{{M}}x{{N}}x{{K}}",
        re.compile(f"{prefix}{_NUMBER}x{_NUMBER}x{_NUMBER}"),
        lambda match: tuple(map(int, match.groups())),
        f"{prefix}{{}}x{{}}x{{}}".format,
        True,
    )


def _number(name: str, prefix: str, default: int | None) -> Token:
    return Token(
        (name,),
        f"{prefix}{{n}}",
        re.compile(prefix + _NUMBER),
        lambda match: (int(match[1]),),
        lambda value: "" if value == default else f"{prefix}{value}",
    )


def _choice(name: str, choices: Mapping[str, Any], *, required: bool = False) -> Token:
    """``choices`` maps each token to its value; a value not among them is the default."""
    by_value = {value: token for token, value in choices.items()}
    return Token(
        (name,),
        "|".join(choices),
        re.compile("|".join(choices)),
        lambda match: (choices[match[0]],),
        lambda value: by_value.get(value, ""),
        required,
    )


def _flag(name: str, token: str) -> Token:
    return _choice(name, {token: True})


_A = _word("a_dtype", "a", "bf16", "fp4", "fp8")
_W = _word("w_dtype", "w", "fp4", "fp8", "int4")
_OUT = _word("out_dtype", "", "bf16")
_STAGE2_EPILOGUE = _choice("epilogue", {"atomic": "atomic", "reduce": "reduce"}, required=True)
_SORT_BLOCK = _number("sort_block_m", "sbm", None)


# ---------------------------------------------------------------- families


@dataclass(frozen=True)
class Moe1Name:
    """Stage 1: gate and up GEMM, activation, optional requantisation.

    b_nt: 2 loads weights non-temporally, 0 through the caches. k_batch: grid split of K, with
    a separate activation kernel. k_wave: split of K over the waves of a block. requant: type
    the epilogue quantises to, with sorted e8m0 scales. sort_block_m: None if it is tile_m.
    """

    PREFIX: ClassVar[str] = "flydsl_moe1"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _A,
        _W,
        _OUT,
        _tile("t"),
        _number("waves_per_eu", "w", 1),
        _number("k_batch", "kb", 1),
        _choice("b_nt", {"bnt0": 0}),
        _choice("gate_mode", {"go": GateMode.MOCK_GATE_ONLY, "gui": GateMode.INTERLEAVE}),
        _number("xcd_swizzle", "xcd", 0),
        _number("k_wave", "kw", 1),
        _choice("requant", {"fp4": "fp4", "fp8": "fp8"}),
        _SORT_BLOCK,
    )

    a_dtype: str
    w_dtype: str
    out_dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    waves_per_eu: int = 1
    k_batch: int = 1
    b_nt: int = 2
    gate_mode: GateMode = GateMode.SEPARATED
    xcd_swizzle: int = 0
    k_wave: int = 1
    requant: str | None = None
    sort_block_m: int | None = None


@dataclass(frozen=True)
class Moe2Name:
    """Stage 2: down GEMM times route weight.

    epilogue: "atomic" accumulates into [M, D], "reduce" writes [M, topk, D] for a reduce
    kernel. persist: the grid is cu_num * cu_num_mul blocks that loop. sort_block_m: sort
    block where it is larger than tile_m, else None.
    """

    PREFIX: ClassVar[str] = "flydsl_moe2"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _A,
        _W,
        _OUT,
        _tile("t"),
        _STAGE2_EPILOGUE,
        _choice("b_nt", {"bnt2": 2}),
        _number("xcd_swizzle", "xcd", 0),
        _flag("persist", "persist"),
        _flag("async_copy", "async"),
        _number("waves_per_eu", "w", 1),
        _number("cu_num_mul", "cumul", 1),
        _SORT_BLOCK,
    )

    a_dtype: str
    w_dtype: str
    out_dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    epilogue: str
    b_nt: int = 0
    xcd_swizzle: int = 0
    persist: bool = False
    async_copy: bool = False
    waves_per_eu: int = 1
    cu_num_mul: int = 1
    sort_block_m: int | None = None

    def __post_init__(self) -> None:
        if self.cu_num_mul != 1 and not self.persist:
            raise ValueError("cumul multiplies a persistent grid, so it needs persist")


@dataclass(frozen=True)
class Moe2LayoutName:
    """Stage 2 that reads the sorted layout stage 1 writes, with no quantisation in between.

    nt: non-temporal weight loads. bf16_lds: the output tile is staged in LDS as bf16.
    spatial_partition: group_num * 100 + m01, or 0 for none.
    """

    PREFIX: ClassVar[str] = "flydsl_moe2_layout"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _word("a_dtype", "a", "fp4", "fp8"),
        _word("w_dtype", "w", "fp4", "fp8"),
        _OUT,
        _tile("t"),
        _STAGE2_EPILOGUE,
        _flag("persist", "persist"),
        _flag("nt", "nt"),
        _SORT_BLOCK,
        _flag("bf16_lds", "bf16lds"),
        _number("spatial_partition", "sp", 0),
    )

    a_dtype: str
    w_dtype: str
    out_dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    epilogue: str
    persist: bool = False
    nt: bool = False
    sort_block_m: int | None = None
    bf16_lds: bool = False
    spatial_partition: int = 0


_MX_TYPES = _choice("a_dtype", {"a4w4": "fp4", "a8w4": "fp8"}, required=True)


@dataclass(frozen=True)
class MxmoeG1Name:
    """Native MX stage 1; weights are fp4. inline_quant: takes bf16 activations and sorts inline."""

    PREFIX: ClassVar[str] = "flydsl_mxmoe_g1"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _MX_TYPES,
        _tile(""),
        _flag("inline_quant", "f16in"),
        _flag("nt", "nt"),
        _number("xcd_swizzle", "xcd", 0),
    )

    a_dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    inline_quant: bool = False
    nt: bool = False
    xcd_swizzle: int = 0


@dataclass(frozen=True)
class MxmoeG2Name:
    """Native MX stage 2; weights are fp4.

    epilogue: "atomic"; "f4out" writes MX fp4 routes; "cshuffle" and "nonatomic" write bf16
    routes. nt, non-temporal weight loads, goes with atomic only.
    """

    PREFIX: ClassVar[str] = "flydsl_mxmoe_g2"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _MX_TYPES,
        _tile(""),
        _choice("epilogue", {"atomic": "atomic", "f4out": "f4out", "cshuffle": "cshuffle"}),
        _flag("nt", "nt"),
    )

    a_dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    epilogue: str = "nonatomic"
    nt: bool = False

    def __post_init__(self) -> None:
        if self.nt and self.epilogue != "atomic":
            raise ValueError("nt goes with the atomic epilogue only")


@dataclass(frozen=True)
class GroupedName:
    """A grouped GEMM of gfx1250. A label: the table's columns hold every parameter.

    gugu: gate and up rows of w1 alternate.
    """

    PREFIX: ClassVar[str] = "grouped"
    TOKENS: ClassVar[tuple[Token, ...]] = (
        _choice("stage", {"gemm1": 1, "gemm2": 2}, required=True),
        _word("w_dtype", "", "fp4", "fp8"),
        _flag("gugu", "gugu"),
    )

    stage: int
    w_dtype: str
    gugu: bool = False


@dataclass(frozen=True)
class ImplName:
    """A whole-graph implementation registered under ``registered``, configured by free text."""

    registered: str
    config: str
    PREFIX: ClassVar[str] = "impl__"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)*", self.registered):
            raise ValueError("the registered name is words joined by single underscores")
        if not self.config:
            raise ValueError("the configuration after the second '__' is missing")


KernelName = (
    Moe1Name | Moe2Name | Moe2LayoutName | MxmoeG1Name | MxmoeG2Name | GroupedName | ImplName
)

# Longest prefix first: flydsl_moe2_layout names also begin like flydsl_moe2 names.
FAMILIES = (Moe2LayoutName, Moe1Name, Moe2Name, MxmoeG1Name, MxmoeG2Name, GroupedName)


# ---------------------------------------------------------------- parsing and formatting


def parse(name: str) -> KernelName:
    """The typed value of a FlyDSL name. Raises KernelNameError for any other text."""
    if name.startswith(ImplName.PREFIX):
        return _parse_impl(name)
    for family in FAMILIES:
        if name.startswith(family.PREFIX + "_"):
            return _parse_tokens(family, name)
    prefixes = ", ".join(sorted([*(f.PREFIX + "_" for f in FAMILIES), ImplName.PREFIX]))
    raise KernelNameError(name, f"not a FlyDSL name; those begin with {prefixes}")


def format_name(kernel: KernelName) -> str:
    """The canonical name; ``format_name(parse(name)) == name``. Raises KernelNameError."""
    if isinstance(kernel, ImplName):
        return f"{kernel.PREFIX}{kernel.registered}__{kernel.config}"
    words = (t.write(*(getattr(kernel, f) for f in t.fields)) for t in kernel.TOKENS)
    name = "_".join([kernel.PREFIX, *filter(None, words)])
    # A value outside the grammar, such as a tile of 0, must not become a name.
    if parse(name) != kernel:
        raise KernelNameError(name, f"no name stands for {kernel}")
    return name


def _parse_impl(name: str) -> ImplName:
    registered, _, config = name.removeprefix(ImplName.PREFIX).partition("__")
    try:
        return ImplName(registered, config)
    except ValueError as error:
        raise KernelNameError(name, str(error), registered or name, len(ImplName.PREFIX)) from None


def _parse_tokens(family: Any, name: str) -> KernelName:
    values: dict[str, Any] = {}
    position, place = len(family.PREFIX) + 1, 0
    for word in name[position:].split("_"):
        place = _advance(family, name, word, position, place)
        token = family.TOKENS[place - 1]
        found = token.read(token.pattern.fullmatch(word))  # type: ignore[arg-type]
        if token.write(*found) != word:
            raise KernelNameError(name, "the default is left out of a name", word, position)
        values.update(zip(token.fields, found, strict=True))
        position += len(word) + 1
    missing = [t.expected for t in family.TOKENS[place:] if t.required]
    if missing:
        raise KernelNameError(name, f"ends where {missing[0]} is expected")
    try:
        return family(**values)
    except ValueError as error:
        raise KernelNameError(name, str(error)) from None


def _advance(family: Any, name: str, word: str, position: int, place: int) -> int:
    """The place after the token that ``word`` matches, at ``place`` or later."""
    for index in range(place, len(family.TOKENS)):
        token = family.TOKENS[index]
        if token.pattern.fullmatch(word):
            return index + 1
        if token.required:
            raise KernelNameError(name, f"{token.expected} is expected here", word, position)
    if any(token.pattern.fullmatch(word) for token in family.TOKENS[:place]):
        raise KernelNameError(name, "the token is repeated or out of order", word, position)
    known = ", ".join(token.expected for token in family.TOKENS[place:]) or "nothing"
    raise KernelNameError(name, f"unknown token; {known} may follow here", word, position)


# ---------------------------------------------------------------- whose kernel it is

_BACKENDS = (
    ("flydsl", re.compile(r"flydsl_|impl__|grouped_gemm")),
    ("opus", re.compile(r"opus_")),
    ("ck", re.compile(r"moe_ck2stages_")),
    ("cktile", re.compile(r"cktile_|\w+_cktile(_|$)")),
    ("asm", re.compile(r"_ZN|fmoe_")),
)
_NO_NAME = frozenset({"", "null", "none", "nan"})


def backend_of(name: str) -> str:
    """Whose kernel ``name`` is: flydsl, opus, ck, cktile, asm, or none for a blank cell.

    Judges by the beginning alone; :func:`parse` judges a FlyDSL name as a whole. Raises
    KernelNameError for a name of nobody's.
    """
    if name.strip().lower() in _NO_NAME:
        return "none"
    for backend, beginning in _BACKENDS:
        if beginning.match(name):
            return backend
    raise KernelNameError(name, "not a kernel name of FlyDSL, opus, CK, cktile or ASM")


def is_flydsl(name: str) -> bool:
    """Whether :func:`backend_of` ``name`` is FlyDSL; False, not an error, for unknown names."""
    return bool(_BACKENDS[0][1].match(name))
