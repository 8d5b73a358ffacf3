"""Pieces of a GEMM over a dequantized weight: they cover, they fit, and none is tiny."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ck_patch import shapes
from ck_patch.chunks import CHUNK_BYTES
from ck_patch.gemm_chunks import BUDGET, TILE, WORKSPACE_BYTES, Pieces, Storage, even, pieces

MIB = 2**20
HALF_IN_PLACE = Storage(0, 2, 4)
STORAGES = [HALF_IN_PLACE, Storage(2, 2, 4), Storage(4, 2, 6), Storage(4, 6, 4), Storage(12, 6, 4)]
SIZES = st.integers(1, 2**18)


def lengths(slices: list[slice]) -> list[int]:
    return [part.stop - part.start for part in slices]


def largest(found: Pieces) -> tuple[int, int]:
    return max(lengths(found.rows)), max(lengths(found.columns))


@settings(deadline=None)  # A limit of 1 makes very many slices.
@given(SIZES, st.integers(1, 5000))
def test_slices_cover_an_axis_without_overlap_and_keep_to_the_limit(size: int, limit: int) -> None:
    found = even(size, limit)
    assert found[0].start == 0
    assert found[-1].stop == size
    assert [part.stop for part in found[:-1]] == [part.start for part in found[1:]]
    assert max(lengths(found)) <= limit


@given(SIZES, st.integers(2, 64))
def test_no_slice_is_much_smaller_than_the_others(size: int, tiles: int) -> None:
    *whole, last = lengths(even(size, tiles * TILE))
    assert all(length % TILE == 0 for length in whole)
    if whole:
        assert max(whole) - min(whole) <= TILE
        assert last > max(whole) - TILE


def test_an_empty_axis_has_no_slices() -> None:
    assert even(0, TILE) == []


@settings(max_examples=500)
@given(SIZES, SIZES, st.integers(1, 2**21), st.sampled_from(STORAGES))
def test_every_piece_is_within_the_bound_of_memory(
    m: int, n: int, k: int, storage: Storage
) -> None:
    rows, columns = largest(pieces(m, n, k, storage))
    assert storage.bytes(rows, columns, k) <= BUDGET
    assert BUDGET + WORKSPACE_BYTES == CHUNK_BYTES == 256 * MIB


@pytest.mark.parametrize("shape", shapes.unique(), ids=str)
def test_the_pieces_of_real_layers_are_large(shape: shapes.Shape) -> None:
    m, n, k = shape
    for storage in STORAGES:
        rows, columns = largest(pieces(m, n, k, storage))
        assert rows >= TILE or rows == m
        assert columns >= 2 * TILE or columns == n


@pytest.mark.parametrize(
    "shape", [(4096, 4096, 4096), (4608, 4096, 12288), (2, 16384, 4096)], ids=str
)
def test_what_fits_is_one_piece(shape: tuple[int, int, int]) -> None:
    assert largest(pieces(*shape, HALF_IN_PLACE)) == shape[:2]


@pytest.mark.parametrize("k", [4096, 5376])
def test_x_in_place_leaves_its_rows_whole(k: int) -> None:
    found = pieces(4608, 24576, k, HALF_IN_PLACE)
    assert lengths(found.rows) == [4608]
    assert len(found.columns) <= 4
