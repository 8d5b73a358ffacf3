"""The rotating row quantizer: interpreted against numpy, compiled for every GPU, launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer
from tests.hostile_rows import hostile_rows
from tests.kernels.test_launch import Compiled
from tests.kernels.test_quantize_rows import (
    ARCHITECTURES,
    DTYPES,
    Quantized,
    assert_equal,
    assert_nothing_spills,
    compiled,
    compiles,
    narrowed,
    over_dtypes,
    quantize_last_row,
    run,
)

# One chunk, more than one, the last one full or not, and a row that is one chunk.
KS = (256, 512, 1280, 2560, 5376, 13_824)

Floats = npt.NDArray[np.float32]
SIGNS = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def rotated(values: Floats) -> Floats:
    """R of each 256 values in float32, every sum from left to right."""
    signs = SIGNS.astype(np.float32)
    for stride in (1, 4, 16, 64):
        quads = values.reshape(-1, 4, stride)
        sums = quads[:, None, 0] * signs[:, 0, None]
        for term in (1, 2, 3):
            sums = sums + quads[:, None, term] * signs[:, term, None]
        values = (sums * np.float32(0.5)).reshape(values.shape)
    return values


def expected(x: torch.Tensor) -> Quantized:
    """What stock's kernel makes of x, as the interpreter of this process rounds."""
    with np.errstate(all="ignore"):
        values = rotated(x.float().numpy())
        largest = np.fmax.reduce(np.abs(values), axis=1, initial=0)  # Passes over NaN.
        largest = np.minimum(largest, np.float32(torch.finfo(x.dtype).max))
        scale = np.maximum(largest * np.float32(1 / 127), np.float32(1e-30)).astype(np.float32)
        inverse = np.reciprocal(narrowed(scale, x.dtype))[:, None]
        quotient = np.rint(narrowed(narrowed(values, x.dtype) * inverse, x.dtype))
        q = np.clip(np.where(np.isnan(quotient), -128, quotient), -128, 127).astype(np.int8)
    return torch.from_numpy(q), torch.from_numpy(scale)


def assert_exact(x: torch.Tensor, names: list[str] | None = None) -> None:
    assert_equal(run(ConvrotRowQuantizer(), x), expected(x), names)


def test_the_reference_rotates_by_the_hadamard_matrix_that_its_inverse_is() -> None:
    matrix: npt.NDArray[Any] = np.ones((1, 1))
    for _ in range(4):
        matrix = np.kron(matrix, SIGNS / 2)
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    exact = (x.reshape(-1, 256).astype(np.float64) @ matrix.T).reshape(x.shape)
    np.testing.assert_allclose(rotated(x), exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(rotated(rotated(x)), x, rtol=0, atol=1e-5)


def test_the_order_of_additions_shows() -> None:
    """Or the tests below would prove little."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    # R does not change when rows and columns are reversed; each sum then goes from right to left.
    backwards = rotated(x[:, ::-1])[:, ::-1]
    np.testing.assert_allclose(backwards, rotated(x), rtol=0, atol=1e-5)
    assert (backwards != rotated(x)).any(axis=1).mean() > 0.9


@pytest.mark.interpreter
@pytest.mark.parametrize("k", KS)
@over_dtypes
def test_every_number_of_rows_and_groups_is_exact(dtype: torch.dtype, k: int) -> None:
    for m in (1, 3):
        assert_exact((torch.randn(m, k) * 10).to(dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize("k", [256, 1280])
@over_dtypes
def test_hostile_rows_are_exact(dtype: torch.dtype, k: int) -> None:
    rows = hostile_rows(k, dtype)
    assert_exact(torch.stack(list(rows.values())), list(rows))


@pytest.mark.interpreter
@over_dtypes
def test_a_nan_and_an_infinity_stay_in_their_groups_of_their_rows(dtype: torch.dtype) -> None:
    clean = torch.randn(4, 768).to(dtype)
    spoiled = clean.clone()
    spoiled[1, 300], spoiled[2, 300] = torch.nan, torch.inf
    q, scale = run(ConvrotRowQuantizer(), spoiled)
    clean_q, clean_scale = run(ConvrotRowQuantizer(), clean)
    assert torch.equal(q[[0, 3]], clean_q[[0, 3]])
    assert torch.equal(scale[[0, 3]], clean_scale[[0, 3]])
    assert q[1, 256:512].eq(-128).all()
    assert not q[1, 512:].eq(-128).all()
    assert ((q[2, 256:512] == 127) | (q[2, 256:512] == -128)).all()


@pytest.mark.interpreter
def test_the_last_row_is_exact_beyond_2_31_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = quantize_last_row(ConvrotRowQuantizer(), 131_073, 16_384, tmp_path, monkeypatch)
    assert_equal(found, expected(x))


@compiles
@pytest.mark.parametrize(
    ("dtype", "k"),
    [(torch.bfloat16, 3072), (torch.float32, 12_288), (torch.float16, 16_384)],
    ids=str,
)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_it_compiles_for_every_architecture_and_nothing_spills(
    architecture: str, dtype: torch.dtype, k: int, tmp_path: Path
) -> None:
    kernel = compiled(architecture, ConvrotRowQuantizer(), dtype, k)
    assert_nothing_spills(kernel, architecture, tmp_path)
    assert "ld.global.v4" in kernel.asm["ptx"]
    # Additions and their halving as stock has them; nothing is fused.
    assert "fma" not in kernel.asm["ptx"]


@compiles
@pytest.mark.parametrize(
    ("k", "chunk", "chunks", "warps"),
    [
        *[(256, 512, 1, 1), (3072, 1024, 3, 1), (4096, 2048, 2, 2), (5376, 2048, 3, 2)],
        *[(12_288, 4096, 3, 4), (12_544, 16_384, 1, 16), (16_384, 16_384, 1, 16)],
    ],
)
def test_a_bound_launch_gives_every_parameter_its_value(
    k: int, chunk: int, chunks: int, warps: int
) -> None:
    for dtype in DTYPES:
        x = torch.zeros(5, k, dtype=dtype)
        quantizer = ConvrotRowQuantizer()
        launched = quantizer._compiled = Compiled()
        quantizer.bind(x)((1, 2, 3), 7)
        ((grid, args, stream),) = launched.launches
        assert (grid, stream, quantizer._num_warps(x)) == ((5, 1, 1), 7, warps)
        assert dict(zip(quantizer.kernel.arg_names, args, strict=True)) == {
            "x_ptr": 1,
            "q_ptr": 2,
            "scale_ptr": 3,
            "GROUPS": k // 256,
            "FINITE_MAX": torch.finfo(dtype).max,
            "CHUNK": chunk,
            "CHUNKS": chunks,
            "FULL": k == chunk * chunks,
        }
