"""The ways of a linear over a dequantized weight, decided without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ck_patch import shapes
from ck_patch.half_ways import GEMV_ROWS, HalfCall, Means, folded_pieces, way

V100 = Means(kernels=True, sm_count=80, float32_output=True)
H200 = replace(V100, sm_count=132)
DTYPES = ("float32", "float16", "bfloat16")
LARGE = HalfCall(4096, 4096, 4096, "float16", "float16", "float16")
FEW = replace(LARGE, m=2)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize("means", [V100, H200], ids=["V100", "H200"])
def test_float16_layers_of_images_are_folded_and_their_gemm_writes_the_output(means: Means) -> None:
    layers = [shape for shape in shapes.load()["qwen_image_2_1"] if shape[0] > GEMV_ROWS]
    assert layers
    for m, n, k in [*layers, (4096, 4096, 4096)]:
        for bias in (None, "float16"):
            for rotated in (False, True):
                call = HalfCall(m, n, k, "float16", "float16", bias, rotated=rotated)
                assert way(call, means) == "folded"


def test_without_triton_everything_is_plain_torchs() -> None:
    for call in (LARGE, FEW, replace(LARGE, m=200)):
        assert way(call, replace(V100, kernels=False)) == "torch"


@over_dtypes
@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_few_rows_are_multiplied_from_int8_whatever_the_dtypes_and_switches(
    dtype: str, compute: str
) -> None:
    for m in (1, GEMV_ROWS):
        call = HalfCall(m, 4096, 65536, dtype, dtype, dtype, compute, False, True, True)
        assert way(call, V100) == "gemv"
        assert way(replace(call, m=GEMV_ROWS + 1), V100) != "gemv"
        assert way(replace(call, k=2**17), V100) != "gemv"


@pytest.mark.parametrize(
    "change",
    [
        {"x_dtype": "bfloat16"},
        {"x_dtype": "float32"},
        {"compute": "bfloat16"},
        {"in_place": False},
        {"fp16_accumulation": True},
    ],
    ids=str,
)
def test_nothing_else_than_float16_as_it_lies_is_folded(change: dict[str, Any]) -> None:
    for m in (64, 4096):
        assert way(replace(LARGE, m=m, **change), V100) == "torch"


def test_an_output_or_a_bias_of_another_dtype_comes_from_float32_sums() -> None:
    for call in (
        replace(LARGE, out_dtype="float32"),
        replace(LARGE, out_dtype="bfloat16"),
        replace(LARGE, bias_dtype="float32"),
    ):
        assert way(call, V100) == "folded float32"
        assert way(call, replace(V100, float32_output=False)) == "torch"


SIZES = st.integers(GEMV_ROWS + 1, 2**15)


@given(SIZES, SIZES, st.integers(1, 2**15), st.booleans())
def test_a_gemm_writes_the_output_only_where_its_tiles_fill_the_gpu_twice(
    m: int, n: int, k: int, rotated: bool
) -> None:
    call = HalfCall(m, n, k, "float16", "float16", rotated=rotated)
    parts = folded_pieces(m, n, k, rotated)
    rows = min(part.stop - part.start for part in parts.rows)
    columns = min(part.stop - part.start for part in parts.columns)
    tiles = -(-rows // 128) * -(-columns // 128)
    for means in (V100, H200):
        filled = tiles >= 2 * means.sm_count
        assert way(call, means) == ("folded" if filled else "folded float32")
