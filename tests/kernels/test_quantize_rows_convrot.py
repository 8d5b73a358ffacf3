"""The rotating row quantizer: interpreted against numpy, compiled for every GPU, launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ck_patch.kernels.input_acts import INPUT_ACTS, InputAct, columns
from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer
from tests.hostile_rows import BOUNDS, hostile_rotated_rows
from tests.kernels.test_compile import resource_usage
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

# Half a piece to four, the last one whole, half or not full, for each number of warps.
KS = (256, 512, 1280, 2560, 3840, 5376, 13_824, 16_384)
# Bytes a thread, which holds 224 of its row.
SPILLED = 192

Floats = npt.NDArray[np.float32]
SIGNS = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def rotated(values: Floats, factor: float = 0.5) -> Floats:
    """R of each 256 values in float32, every sum from left to right, times the factor."""
    signs = SIGNS.astype(np.float32)
    for stride in (1, 4, 16, 64):
        quads = values.reshape(-1, 4, stride)
        sums = quads[:, None, 0] * signs[:, 0, None]
        for term in (1, 2, 3):
            sums = sums + quads[:, None, term] * signs[:, term, None]
        values = (sums * np.float32(factor)).reshape(values.shape)
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
    rows = hostile_rotated_rows(k, dtype)
    assert_exact(torch.stack(list(rows.values())), list(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hostile_rows_lie_on_both_sides_of_each_bound_and_overflow_where_nothing_is_halved(
    dtype: torch.dtype,
) -> None:
    """Or the test above would prove little."""
    rows = {name: row.float().numpy() for name, row in hostile_rotated_rows(512, dtype).items()}
    for bound in BOUNDS:
        assert np.abs(rotated(rows[f"at {bound}"], 1)).max() == bound
        below = np.abs(rotated(rows[f"below {bound}"], 1)).max()
        assert bound * (1 - torch.finfo(dtype).eps) < below < bound
    with np.errstate(all="ignore"):
        assert np.isfinite(rotated(rows["of 10^37"])).all()
        assert not np.isfinite(rotated(rows["of 10^37"], 1)).all()


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


EPS = 1e-3

over_acts = pytest.mark.parametrize("act", INPUT_ACTS)


def activated(x: torch.Tensor, act: InputAct, weight: torch.Tensor) -> torch.Tensor:
    """The activation as the host's Python computes it, in float64."""
    wide = x.double()
    first, second = wide.chunk(2, dim=-1)
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(wide, approximate="tanh")
    if act == "swiglu":
        return torch.nn.functional.silu(first) * second
    if act == "situ":
        gate = 4 * torch.tanh(second / 4) * torch.sigmoid(second)
        return gate * 25 * torch.tanh(first / 25)
    return torch.nn.functional.rms_norm(wide, x.shape[1:], weight.double(), EPS)


def assert_activated(act: InputAct, x: torch.Tensor, weight: torch.Tensor) -> Quantized:
    """q and scale are those of the activation in float64 but for what rounding may change."""
    found = run_act(act, x, weight)
    right = activated(x, act, weight)
    matrix = np.kron(*[np.kron(SIGNS / 2, SIGNS / 2)] * 2)
    values = torch.from_numpy(right.view(-1, 256).numpy() @ matrix.T).view(right.shape)
    scale = values.abs().amax(dim=1).clamp(max=torch.finfo(x.dtype).max) / 127
    torch.testing.assert_close(found[1].double(), scale, rtol=1e-5, atol=1e-30)
    # As far as the dtype in which rows are divided by their scale rounds 127.
    bound = 0.51 + 127 * torch.finfo(x.dtype).eps * 1.5
    assert (found[0] - values / scale[:, None]).abs().max() < bound
    return found


def run_act(act: InputAct, x: torch.Tensor, weight: torch.Tensor) -> Quantized:
    norm = (weight, EPS) if act == "rms_norm" else ()
    return run(ConvrotRowQuantizer(act), x, *norm, k=x.shape[1] // columns(act))


@pytest.mark.interpreter
@pytest.mark.parametrize("k", [256, 1280, 3840])
@over_dtypes
@over_acts
def test_an_activation_is_applied_to_whole_rows(act: InputAct, dtype: torch.dtype, k: int) -> None:
    weight = torch.randn(k).to(dtype)
    for m in (2, 3):
        assert_activated(act, (torch.randn(m, k * columns(act)) * 2).to(dtype), weight)


@pytest.mark.interpreter
@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu", "rms_norm"])
def test_rows_that_are_quantized_once_more_are_activated_as_well(act: InputAct) -> None:
    # Rotated without halvings they are below 2^-30, or overflow.
    k = 1280
    x = torch.randn(4, k * columns(act))
    weight = torch.randn(k)
    if act == "rms_norm":
        weight *= 1e-12
    else:
        x[:, -k:] *= 1e-12
    assert_activated(act, x, weight)
    if act in ("swiglu", "gelu_tanh"):
        x = torch.randn(4, k * columns(act))
        x[:, -k:] *= 1e37
        assert_activated(act, x, weight)


@pytest.mark.interpreter
@over_acts
def test_a_nan_stays_in_its_row_and_in_its_group_if_no_mean_spreads_it(act: InputAct) -> None:
    k = 768
    weight = torch.ones(k)
    x = torch.randn(3, k * columns(act))
    clean_q, clean_scale = run_act(act, x, weight)
    x[1, 300] = torch.nan
    q, scale = run_act(act, x, weight)
    assert torch.equal(q[[0, 2]], clean_q[[0, 2]])
    assert torch.equal(scale[[0, 2]], clean_scale[[0, 2]])
    assert q[1, 256:512].eq(-128).all()
    assert q[1, 512:].eq(-128).all() == (act == "rms_norm")


@pytest.mark.interpreter
def test_the_pairs_of_a_last_row_are_found_beyond_2_31_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = quantize_last_row(
        ConvrotRowQuantizer("swiglu"), 65_537, 32_768, tmp_path, monkeypatch, k=16_384
    )
    monkeypatch.undo()
    assert_equal(found, run_act("swiglu", x, x))


@compiles
@pytest.mark.parametrize(
    ("k", "threads"),
    [
        *[(256, 64), (512, 128), (3072, 128), (3328, 256), (6144, 256), (6400, 512)],
        *[(12_032, 512), (12_288, 1024), (16_384, 1024)],
    ],
)
def test_squares_are_summed_by_as_many_threads_as_stock_has(k: int, threads: int) -> None:
    x = torch.empty(2, k, dtype=torch.bfloat16, device="meta")
    assert ConvrotRowQuantizer("rms_norm")._arguments(x)[-2:] == ("rms_norm", threads)
    host = pytest.importorskip("comfy_kitchen.backends.cuda")
    if hasattr(host, "_convrot_int8_fused_shared_memory_bytes"):
        shared = host._convrot_int8_fused_shared_memory_bytes(2, k)
        assert shared == (k + threads // 64 * 2 * 256) * 4


@compiles
@pytest.mark.parametrize("act", INPUT_ACTS)
def test_a_bound_launch_of_an_activation_is_of_the_columns_of_q(act: InputAct) -> None:
    k, half = 5120, 2048 if act == "situ" else 1024
    x = torch.zeros(5, k * columns(act), dtype=torch.bfloat16)
    quantizer = ConvrotRowQuantizer(act)
    launched = quantizer._compiled = Compiled()
    norm = (4, 0.5) if act == "rms_norm" else ()
    quantizer.bind(x)((1, 2, 3, *norm), 7)
    ((_, args, _),) = launched.launches
    given = dict(zip(quantizer.kernel.arg_names, args, strict=True))
    assert (given["GROUPS"], given["HALF"], given["ACT"]) == (20, half, act)
    assert (given["weight_ptr"], given["eps"]) == (norm or (None, None))


@compiles
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@over_acts
def test_an_activation_is_stocks_sequence_of_instructions(
    architecture: str, act: InputAct, tmp_path: Path
) -> None:
    k = 3072
    kernel = compiled(architecture, ConvrotRowQuantizer(act), torch.bfloat16, k * columns(act))
    assert_nothing_spills(kernel, architecture, tmp_path)
    ptx = kernel.asm["ptx"]
    assert "ld.global.v4" in ptx
    # By thread, 96 values in the pieces, 48 with situ, and 16 at a time of rows that are taken once
    # more, and the reciprocal of either's scale.
    values = 64 if act == "situ" else 112
    counts = {name: ptx.count(name) for name in ("ex2.approx", "rcp.approx", "tanh.approx", "fma")}
    expected = {
        "gelu_tanh": {"tanh.approx": values, "fma": values},
        "swiglu": {"ex2.approx": values, "rcp.approx": values},
        "situ": {"ex2.approx": values, "rcp.approx": 3 * values, "fma": 16 * values},
        "rms_norm": {},
    }[act]
    expected["rcp.approx"] = expected.get("rcp.approx", 0) + 2
    if act != "rms_norm":
        assert {name: count for name, count in counts.items() if count} == expected


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
    # Additions as stock has them; nothing is fused.
    assert "fma" not in kernel.asm["ptx"]


@compiles
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_of_a_limit_of_registers_hardly_anything_spills(architecture: str, tmp_path: Path) -> None:
    dtype, k = torch.float16, 5376
    quantizer = ConvrotRowQuantizer()
    registers = quantizer._registers(torch.empty(1, k, dtype=dtype))
    kernel = compiled(architecture, quantizer, dtype, k, maxnreg=registers)
    usage = resource_usage(kernel.asm["cubin"], tmp_path)
    assert usage["REG"] == registers
    # Bytes a thread, which holds 168 of a row.
    assert usage["STACK"] + usage["LOCAL"] <= SPILLED


@compiles
def test_every_row_is_covered_by_as_few_values_as_there_can_be() -> None:
    for k in range(256, 65_537, 256):
        x = torch.empty(1, k, dtype=torch.bfloat16, device="meta")
        quantizer = ConvrotRowQuantizer()
        arguments: Any = quantizer._arguments(x)
        _, _, groups, _, half, halves, full, _, _ = arguments
        warps = quantizer._num_warps(x)
        assert (groups, half) == (k // 256, 512 * warps)
        assert k <= half * halves < k + half
        assert full == (k == half * halves)
        assert warps * 32 * (quantizer._registers(x) or 128) <= 65_536


@compiles
@pytest.mark.parametrize(
    ("k", "warps_of_16_bits", "halves_of_16_bits"),
    [
        *[(256, 1, 1), (3072, 1, 6), (3584, 1, 7), (3840, 2, 4), (5120, 2, 5), (5376, 2, 6)],
        *[(12_288, 4, 6), (13_824, 4, 7), (14_336, 4, 7), (16_384, 8, 4), (65_536, 16, 8)],
    ],
)
def test_a_bound_launch_gives_every_parameter_its_value(
    k: int, warps_of_16_bits: int, halves_of_16_bits: int
) -> None:
    for dtype in DTYPES:
        warps, halves = warps_of_16_bits, halves_of_16_bits
        if dtype == torch.float32 and halves == 7:
            warps, halves = 2 * warps, 4
        x = torch.zeros(5, k, dtype=dtype)
        quantizer = ConvrotRowQuantizer()
        launched = quantizer._compiled = Compiled()
        quantizer.bind(x)((1, 2, 3), 7)
        ((grid, args, stream),) = launched.launches
        assert (grid, stream, quantizer._num_warps(x)) == ((5, 1, 1), 7, warps)
        limited = dtype == torch.float16 and halves == 6
        assert quantizer._registers(x) == (96 if limited else None)
        assert dict(zip(quantizer.kernel.arg_names, args, strict=True)) == {
            "x_ptr": 1,
            "q_ptr": 2,
            "scale_ptr": 3,
            "weight_ptr": None,
            "eps": None,
            "GROUPS": k // 256,
            "FINITE_MAX": torch.finfo(dtype).max,
            "HALF": 512 * warps,
            "HALVES": halves,
            "FULL": k == 512 * warps * halves,
            "ACT": None,
            "SUMS": None,
        }
