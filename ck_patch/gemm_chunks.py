"""Arithmetic of the pieces in which a GEMM over a dequantized weight keeps within its memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ck_patch.chunks import CHUNK_BYTES

WORKSPACE_BYTES = 64 * 2**20
"""Part of the bound that is left to the GEMM library: torch gives cuBLAS 8 to 32 MiB for each
handle and stream, from the same allocator, and cuBLASLt may have as much again."""

BUDGET = CHUNK_BYTES - WORKSPACE_BYTES
"""Bytes that the copies of one chunk of x and of the weight and the accumulator share."""

TILE = 128
"""Pieces are made of whole tiles of a GEMM kernel, but for the last one of each axis."""

_WIDE = 1024
"""Columns that pieces of many rows have all the same: narrower GEMMs are slower."""


@dataclass(frozen=True)
class Storage:
    """Bytes that a GEMM takes for each element of an operand: x, the weight, the accumulator.

    `x` is 0 where x is read in place.
    """

    x: int
    weight: int
    accumulator: int

    def bytes(self, rows: int, columns: int, k: int) -> int:
        """Of one piece of `rows` x `columns` at depth `k`."""
        return (rows * self.x + columns * self.weight) * k + rows * columns * self.accumulator


@dataclass(frozen=True)
class Pieces:
    """Slices of the M rows and N columns of an output; each pair of them is one GEMM."""

    rows: list[slice]
    columns: list[slice]


def pieces(m: int, n: int, k: int, storage: Storage) -> Pieces:
    """Few large pieces of an [m, n] output of depth `k`, each within BUDGET (for `k` to 2**21).

    Columns are cut first, since cutting rows as well has one operand made several times. Smaller
    pieces, whose accumulators would stay in an L2, gain nothing: on one H200 the GEMM and the
    launches lose more than the epilogue, which is not bound by memory, saves.
    """
    rows = _at_most(m, BUDGET // 2, k * storage.x, min(n, _WIDE) * storage.accumulator)
    left = BUDGET - rows * k * storage.x
    columns = _at_most(n, left, k * storage.weight + rows * storage.accumulator)
    return Pieces(even(m, rows), even(n, columns))


def even(size: int, limit: int) -> list[slice]:
    """As few slices as cover `size` with at most `limit` each, their sizes a tile apart at most."""
    if size <= limit:
        return [slice(0, size)] if size else []
    tile = min(TILE, limit)
    tiles = -(-size // tile)
    parts = -(-tiles // (limit // tile))
    # The later ones are the larger ones: the last tile may not be whole.
    bounds = [*(i * tiles // parts * tile for i in range(parts)), size]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _at_most(size: int, available: int, *each: int) -> int:
    """`size`, or as many whole tiles as fit in `available` bytes at each of those bytes apiece."""
    limit = available // max(1, *each)
    return size if size <= limit else max(1, limit if limit < TILE else limit // TILE * TILE)
