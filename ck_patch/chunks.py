"""Arithmetic of the chunks in which a call stays below the reach of 32-bit offsets."""

from __future__ import annotations

LIMIT = 2**31
"""Elements of a matrix from which on comfy_kitchen's Triton kernels, whose offsets are int32, read
and write outside of it. Reported for an RTX 3090: right at 99,865 x 21,504, which is one row more
than fits, dead at 99,900; from the limit on nothing is left to chance."""

CHUNK_BYTES = 256 * 2**20
"""Bound of what a row chunk adds to the peak of memory, at 4 bytes for each element."""

_TILE = 128
"""The largest tile of the kernels: chunks of a multiple of it leave no tile partly filled."""


def rows_per_chunk(widest: int) -> int:
    """Rows in a chunk whose widest matrix has `widest` columns; depends on nothing else, so that
    the kernels' autotuner, which is keyed on the exact M, meets one M whatever the whole has."""
    return _whole_tiles(CHUNK_BYTES // (4 * widest))


def columns_per_chunk(k: int) -> int:
    """Output columns in a chunk, so that these rows of a weight of depth `k` stay below LIMIT."""
    return _whole_tiles((LIMIT - 1) // k)


def chunks(size: int, step: int) -> list[slice]:
    """Slices that cover `size`, each of exactly `step`; a smaller size is one slice.

    The last one is moved back to end at `size`: it computes some again rather than being of
    another length.
    """
    if size <= step:
        return [slice(0, size)]
    starts = [*range(0, size - step, step), size - step]
    return [slice(start, start + step) for start in starts]


def _whole_tiles(size: int) -> int:
    return max(1, size if size < _TILE else size // _TILE * _TILE)
