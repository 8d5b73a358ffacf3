"""The row quantizer: interpreted against an exact reference, compiled for every GPU, launched."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ck_patch import device
from ck_patch.kernels.quantize_rows import Rounding, RowQuantizer
from tests.hostile_rows import hostile_rows
from tests.interpreter import interpreting
from tests.kernels.test_compile import SHORT, resource_usage
from tests.kernels.test_launch import Compiled

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS: tuple[Rounding, ...] = ("cuda", "eager")
KS = (1, 3, 16, 17, 100, 256, 300, 4097, 33_000)
POISON = 99

compiles = pytest.mark.skipif(interpreting(), reason="Triton interprets, it compiles nothing")
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_roundings = pytest.mark.parametrize("rounding", ROUNDINGS)


Quantized = tuple[torch.Tensor, torch.Tensor]


def quantize(x: torch.Tensor, rounding: Rounding) -> Quantized:
    return run(RowQuantizer(rounding), x)


def run(quantizer: RowQuantizer, x: torch.Tensor, *more: object, k: int | None = None) -> Quantized:
    """q [M, K] and scale of one launch, in memory around which nothing changed."""
    m, k = x.shape[0], k or x.shape[1]
    # A multiple of 16 bytes on either side, more than the largest block would overrun.
    margin = 16_384
    values = torch.full((margin + m * k + margin,), POISON, dtype=torch.int8)
    scales = torch.full((margin + m + margin,), 12.5)
    q, scale = values[margin : margin + m * k].view(m, k), scales[margin : margin + m]
    scale.fill_(torch.nan)
    before = x.clone()
    # numpy's remarks on NaN and infinities are no concern of a kernel's.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        quantizer.run(x, q, scale, *more)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    for memory, poison in ((values, POISON), (scales, 12.5)):
        assert memory[:margin].eq(poison).all()
        assert memory[-margin:].eq(poison).all()
    return q, scale


def expected(x: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in numpy's float32, as the interpreter of this process rounds."""
    values: npt.NDArray[np.float32] = x.float().numpy()
    magnitudes = np.abs(values)
    with np.errstate(all="ignore"):
        if rounding == "eager":
            largest = magnitudes.max(axis=1)  # NaN if there is one.
        else:
            largest = np.fmax.reduce(magnitudes, axis=1, initial=0)  # Passes over NaN.
            largest = np.minimum(largest, np.float32(torch.finfo(x.dtype).max))
        scale = np.maximum(largest * np.float32(1 / 127), np.float32(1e-30)).astype(np.float32)
        divisor = narrowed(scale, x.dtype)[:, None]
        if rounding == "eager":
            divisor[divisor == 0] = torch.finfo(x.dtype).tiny
            quotient = values / divisor
        else:
            quotient = values * np.reciprocal(divisor)
        rounded = np.rint(narrowed(quotient, x.dtype))
        nan = 0 if rounding == "eager" else -128
        q = np.clip(np.where(np.isnan(rounded), nan, rounded), -128, 127).astype(np.int8)
    return torch.from_numpy(q), torch.from_numpy(scale)


def narrowed(values: npt.NDArray[np.float32], dtype: torch.dtype) -> npt.NDArray[np.float32]:
    """Values rounded to what dtype can hold."""
    from tests.interpreter_facts import interpreter_rounding

    if dtype == torch.bfloat16 and interpreter_rounding().truncates_bfloat16:
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    rounded: npt.NDArray[np.float32] = torch.from_numpy(values).to(dtype).float().numpy()
    return rounded


def assert_exact(x: torch.Tensor, rounding: Rounding, names: list[str] | None = None) -> None:
    assert_equal(quantize(x, rounding), expected(x, rounding), names)


def assert_equal(found: Quantized, right: Quantized, names: list[str] | None = None) -> None:
    (q, scale), (expected_q, expected_scale) = found, right
    same = (q == expected_q).all(dim=1)
    same &= (scale == expected_scale) | (scale.isnan() & expected_scale.isnan())
    wrong = (~same).nonzero().flatten().tolist()
    assert not wrong, [names[row] for row in wrong] if names else wrong


@pytest.mark.interpreter
@pytest.mark.parametrize("k", KS)
@over_dtypes
@over_roundings
def test_every_number_of_rows_and_columns_is_exact(
    rounding: Rounding, dtype: torch.dtype, k: int
) -> None:
    for m in range(1, 6):
        assert_exact((torch.randn(m, k) * 10).to(dtype), rounding)


@pytest.mark.interpreter
@pytest.mark.parametrize("k", KS)
@over_dtypes
@over_roundings
def test_hostile_rows_are_exact(rounding: Rounding, dtype: torch.dtype, k: int) -> None:
    rows = hostile_rows(k, dtype)
    assert_exact(torch.stack(list(rows.values())), rounding, list(rows))


@pytest.mark.interpreter
@over_dtypes
@over_roundings
def test_a_row_of_nan_and_infinities_leaves_other_rows_as_they_are(
    rounding: Rounding, dtype: torch.dtype
) -> None:
    clean = torch.randn(4, 300).to(dtype)
    spoiled = clean.clone()
    spoiled[1, 7], spoiled[1, 8], spoiled[2, 299] = torch.nan, torch.inf, -torch.inf
    for before, after in zip(quantize(clean, rounding), quantize(spoiled, rounding), strict=True):
        assert torch.equal(before[[0, 3]], after[[0, 3]])


@pytest.mark.interpreter
@over_dtypes
def test_an_infinity_takes_the_scale_of_the_largest_finite_value(dtype: torch.dtype) -> None:
    x = torch.randn(2, 300).to(dtype)
    x[0, 5], x[1, 299] = torch.inf, -torch.inf
    q, scale = quantize(x, "triton")
    assert scale.tolist() == pytest.approx([torch.finfo(dtype).max / 127] * 2, rel=1e-6)
    assert [int(q[0, 5]), int(q[1, 299])] == [127, -128]


@pytest.mark.interpreter
@over_roundings
def test_the_last_row_is_exact_beyond_2_31_elements(
    rounding: Rounding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, found = quantize_last_row(RowQuantizer(rounding), 131_073, 16_400, tmp_path, monkeypatch)
    assert_equal(found, expected(x, rounding))


def quantize_last_row(
    quantizer: RowQuantizer,
    m: int,
    columns: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    k: int | None = None,
) -> tuple[torch.Tensor, Quantized]:
    """The last row of a float16 x [M, columns], and what the program for it writes of q [M, K],
    there alone; K is as many columns."""
    k = k or columns
    from triton.runtime import interpreter

    # The interpreter's int32 wraps as the GPU's does, so that a 32-bit offset would miss.
    assert (m - 1) * columns >= 2**31
    path = str(folder / "x")  # A sparse file: only pages that are written take memory or disk.
    x = torch.from_file(path, shared=True, size=m * columns, dtype=torch.float16).view(m, columns)
    path = str(folder / "q")
    q = torch.from_file(path, shared=True, size=m * k, dtype=torch.int8).view(m, k)
    scale = torch.zeros(m)
    x[-1] = torch.randn(columns)
    last = interpreter.TensorHandle(np.array([m - 1], np.int32), interpreter.tl.int32)

    def program_id(axis: int) -> Any:
        return last

    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", program_id)
    quantizer.kernel[1, 1, 1](x, q, scale, *quantizer._arguments(x))
    assert not q[0].any()
    assert not q[-2].any()
    assert not scale[:-1].any()
    return x[-1:], (q[-1:], scale[-1:])


@pytest.mark.interpreter
def test_the_roundings_differ() -> None:
    """Or the tests above would prove little."""
    x = torch.stack(list(hostile_rows(300, torch.float16).values()))
    cuda, eager = (expected(x, rounding) for rounding in ROUNDINGS)
    assert not torch.equal(cuda[0], eager[0])
    assert not torch.equal(cuda[1], eager[1])


ARCHITECTURES = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"}
GPUS = {gpu.architecture: gpu for gpu in device.KNOWN if gpu.architecture in ARCHITECTURES}
# Each dtype, each rounding, each width of a program for large K, and a K in no alignment.
VARIANTS: tuple[tuple[Rounding, torch.dtype, int], ...] = (
    ("cuda", torch.bfloat16, 3072),
    ("eager", torch.bfloat16, 28_672),
    ("eager", torch.float32, 28_672),
    ("eager", torch.float16, 4097),
)


def compiled(
    architecture: str, quantizer: RowQuantizer, dtype: torch.dtype, k: int, **options: Any
) -> Any:
    """Triton's compiled kernel: `asm` by stage, and `metadata`."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    x = torch.empty(2, k, dtype=dtype, device="meta")
    names = list(quantizer.kernel.arg_names)
    floats = "*" + SHORT[str(dtype).removeprefix("torch.")]
    types = {"x_ptr": floats, "q_ptr": "*i8", "scale_ptr": "*fp32"}
    values = quantizer._arguments(x)
    constants: dict[tuple[int], object] = {}
    for index, value in enumerate(values, len(names) - len(values)):
        if names[index] in ("K_UNITS", "GROUPS"):
            types[names[index]] = "i32"
        else:
            constants[index,] = value
            types[names[index]] = "constexpr"
    more = {"weight_ptr": floats, "eps": "fp32"}
    signature = {name: types.get(name) or more[name] for name in names}
    # What Triton's dispatcher says of the operands: every pointer is a multiple of 16, no integer
    # is specialised on.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    major, minor = GPUS[architecture].capability
    return triton.compile(
        ASTSource(quantizer.kernel, signature, constants, aligned),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options={"num_warps": quantizer._num_warps(x), "enable_fp_fusion": False, **options},
    )


def assert_nothing_spills(kernel: Any, architecture: str, folder: Path) -> None:
    usage = resource_usage(kernel.asm["cubin"], folder)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0), dict(usage)
    assert kernel.metadata.shared <= GPUS[architecture].shared_memory


@compiles
@pytest.mark.parametrize(("rounding", "dtype", "k"), VARIANTS, ids=str)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_it_compiles_for_every_architecture_and_nothing_spills(
    architecture: str, rounding: Rounding, dtype: torch.dtype, k: int, tmp_path: Path
) -> None:
    kernel = compiled(architecture, RowQuantizer(rounding), dtype, k)
    assert_nothing_spills(kernel, architecture, tmp_path)
    # Aligned rows move 16 bytes at a time.
    assert ("ld.global.v4" in kernel.asm["ptx"]) == (k % 16 == 0)


@compiles
@over_dtypes
@pytest.mark.parametrize("k", [16, 17, 5376, 28_672])
@pytest.mark.parametrize("rounding", ["cuda", "triton", "eager"])
def test_a_bound_launch_gives_every_parameter_its_value(
    rounding: Rounding, k: int, dtype: torch.dtype
) -> None:
    x = torch.zeros(5, k, dtype=dtype)
    quantizer = RowQuantizer(rounding)
    compiled = quantizer._compiled = Compiled()
    quantizer.bind(x)((1, 2, 3), 7)

    ((grid, args, stream),) = compiled.launches
    given = dict(zip(quantizer.kernel.arg_names, args, strict=True))
    unit = 1 if k == 17 else 16
    wide = 4096 if dtype == torch.float32 else 8192
    block_k = {16: 1024, 17: 1024, 5376: 4096, 28_672: wide}[k]
    assert (grid, stream) == ((5, 1, 1), 7)
    assert given == {
        "x_ptr": 1,
        "q_ptr": 2,
        "scale_ptr": 3,
        "K_UNITS": k // unit,
        "UNIT": unit,
        "EAGER": rounding == "eager",
        "FINITE_MAX": torch.finfo(dtype).max,
        "TINY": torch.finfo(dtype).tiny,
        "BLOCK_K": block_k,
    }
