"""Decides by what means one linear over a dequantized weight is run, from its sizes and dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ck_patch.gemm_chunks import TILE, Pieces, Storage, pieces

Way = Literal["gemv", "folded", "folded float32", "torch"]
"""`gemv`: float32 sums straight from the int8 weight. `folded`: a kernel writes the weight with its
scale in float16, and a GEMM of that writes the output; `folded float32`: the GEMM writes float32,
and torch the output. `torch`: plain torch, which takes everything."""

GEMV_ROWS = 8
"""Rows for which the weight is read once: the more of them there are, the less that saves."""

_GEMV_K = 2**17 - 1
"""The largest K for which the sums of the GEMV cannot overflow."""

_WAVES = 2
"""A GEMM library splits K, and may then store partial sums in float16, to fill a GPU that the tiles
of an output do not. With two tiles of 128 x 128 an SM, those of 256 x 128 fill it too."""


@dataclass(frozen=True)
class HalfCall:
    """One linear; dtypes by name, `bias_dtype` None without a bias.

    `in_place` says whether a GEMM can read x where it is, `rotated` whether x is rotated first,
    `fp16_accumulation` how torch's switch of that name stands.
    """

    m: int
    n: int
    k: int
    x_dtype: str
    out_dtype: str
    bias_dtype: str | None = None
    compute: str = "float16"
    in_place: bool = True
    rotated: bool = False
    fp16_accumulation: bool = False


@dataclass(frozen=True)
class Means:
    """What a device and its torch have: `kernels` says whether Triton runs there, `float32_output`
    whether a GEMM of float16 operands can write float32."""

    kernels: bool
    sm_count: int
    float32_output: bool


def way(call: HalfCall, means: Means) -> Way:
    """The fastest way for one call that is as exact as plain torch's."""
    if not means.kernels:
        return "torch"
    if call.m <= GEMV_ROWS and call.k <= _GEMV_K:
        return "gemv"
    if call.fp16_accumulation or not call.in_place or {call.x_dtype, call.compute} != {"float16"}:
        return "torch"
    if (
        call.out_dtype == "float16"
        and call.bias_dtype in (None, "float16")
        and _fewest_tiles(call) >= _WAVES * means.sm_count
    ):
        return "folded"
    return "folded float32" if means.float32_output else "torch"


def folded_pieces(m: int, n: int, k: int, rotated: bool) -> Pieces:
    """The pieces of a folded GEMM, whose accumulator is the output itself."""
    return pieces(m, n, k, Storage(x=2 if rotated else 0, weight=2, accumulator=0))


def _fewest_tiles(call: HalfCall) -> int:
    """Tiles in the smallest GEMM of the call."""
    parts = folded_pieces(call.m, call.n, call.k, call.rotated)
    rows: int = min(part.stop - part.start for part in parts.rows)
    columns: int = min(part.stop - part.start for part in parts.columns)
    return math.ceil(rows / TILE) * math.ceil(columns / TILE)
