"""The kernels that need no tensor cores: interpreted against exact references, and compiled."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ck_patch.kernels import dequantize, gemv
from tests.interpreter import interpreting
from tests.kernels.test_compile import SHORT, resource_usage

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = (F32, F16, BF16)
KS = (1, 3, 16, 17, 36, 100, 256, 1024, 1040, 4097)
MARGIN = 16_384

compiles = pytest.mark.skipif(interpreting(), reason="Triton interprets, it compiles nothing")
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
over_ks = pytest.mark.parametrize("k", KS)


def int8(n: int, k: int) -> torch.Tensor:
    return torch.randint(-128, 128, (n, k), dtype=torch.int8)


@contextmanager
def canaried(m: int, n: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """An [m, n] of NaN in memory around which nothing changes."""
    memory = torch.full((MARGIN + m * n + MARGIN,), torch.nan, dtype=dtype)
    yield memory[MARGIN : MARGIN + m * n].view(m, n)
    assert memory[:MARGIN].isnan().all()
    assert memory[-MARGIN:].isnan().all()


@pytest.mark.interpreter
@over_ks
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_weight_is_dequantized_with_one_rounding(k: int, per_channel: bool) -> None:
    for n in (1, 4, 7):
        weight, scale = int8(n, k), torch.rand(n if per_channel else 1) * 0.1
        weight[0, 0], weight[-1, -1] = -128, 127
        with canaried(n, k, F16) as out:
            dequantize.dequantize(weight, scale, out)
            # Exact in float64, and rounded to float32 and float16 as the kernel says.
            exact = weight.double().numpy() * scale.double().reshape(-1, 1).numpy()
            expected = torch.from_numpy(exact.astype(np.float32).astype(np.float16))
            assert torch.equal(out, expected)


@pytest.mark.interpreter
def test_what_float16_cannot_hold_is_infinite_and_small_values_are_kept() -> None:
    weight = torch.tensor([[127, -128, 1, 0]], dtype=torch.int8).repeat(3, 1)
    out = torch.empty(3, 4, dtype=F16)
    with np.errstate(over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        dequantize.dequantize(weight, torch.tensor([511.8, 512.0, 2.0**-24]), out)
    assert out[0].tolist() == [64992, -65504, 511.75, 0]
    assert out[1].tolist() == [65024, -torch.inf, 512, 0]
    assert out[2].tolist() == [127 * 2.0**-24, -(2.0**-17), 2.0**-24, 0]


def exact(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The linear in float64, and the sum of the magnitudes of its terms."""
    factor = scale.double().reshape(1, -1)
    addend = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double()
    sums = x.double() @ weight.double().t() * factor + addend
    magnitudes = x.double().abs() @ weight.double().abs().t() * factor + addend.abs()
    return sums, magnitudes


def assert_float32(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> None:
    with canaried(x.shape[0], weight.shape[0], F32) as out:
        gemv.gemv(x, weight, scale, bias, out)
        sums, magnitudes = exact(x, weight, scale, bias)
        assert ((out.double() - sums).abs() <= magnitudes * 2.0**-20).all()


@pytest.mark.interpreter
@over_ks
@over_dtypes
def test_few_rows_are_multiplied_to_float32_accuracy(dtype: torch.dtype, k: int) -> None:
    for m, n in itertools.product((1, 2, 3, 8, 9), (1, 5)):
        x, weight = torch.randn(m, k).to(dtype), int8(n, k)
        assert_float32(x, weight, torch.rand(n), torch.randn(n).to(dtype))
        assert_float32(x, weight, torch.rand(1), None)


@pytest.mark.interpreter
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_the_result_is_rounded_once_to_its_dtype(bias_dtype: torch.dtype) -> None:
    x, weight, scale = torch.randn(5, 48).half(), int8(7, 48), torch.rand(7)
    bias = torch.randn(7).to(bias_dtype)
    wide, narrow = torch.empty(5, 7), torch.empty(5, 7, dtype=F16)
    gemv.gemv(x, weight, scale, bias, wide)
    gemv.gemv(x, weight, scale, bias, narrow)
    assert torch.equal(narrow, wide.half())


@pytest.mark.interpreter
def test_products_that_cancel_leave_exactly_zero() -> None:
    weight = torch.ones(3, 16384, dtype=torch.int8)
    weight[:, 8192:] = -1
    out = torch.empty(2, 3, dtype=F16)
    gemv.gemv(torch.full((2, 16384), 8.0).half(), weight, torch.ones(1), None, out)
    assert (out == 0).all()


@pytest.mark.interpreter
@over_dtypes
def test_no_finite_row_overflows(dtype: torch.dtype) -> None:
    x = torch.full((3, 4096), torch.finfo(dtype).max).to(dtype)
    x[1, 1::2] *= -1
    weight, scale = torch.full((2, 4096), -128, dtype=torch.int8), torch.tensor([2.0**-40])
    assert_float32(x, weight, scale, None)


@pytest.mark.interpreter
def test_a_row_of_infinities_or_nan_leaves_other_rows_as_they_are() -> None:
    x, weight, scale = torch.randn(3, 40), int8(6, 40), torch.rand(6)
    clean, out = torch.empty(3, 6), torch.empty(3, 6)
    gemv.gemv(x, weight, scale, None, clean)
    x[1, 7], x[2, 39] = torch.inf, torch.nan
    with np.errstate(invalid="ignore"):
        gemv.gemv(x, weight, scale, None, out)
    assert torch.equal(out[0], clean[0])
    assert not out[1:].isfinite().any()


@pytest.mark.interpreter
def test_the_last_row_is_exact_beyond_2_31_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import interpreter

    # The interpreter's int32 wraps as the GPU's does, so that a 32-bit offset would miss.
    n, k = 131_076, 16_400
    path = str(tmp_path / "w")  # A sparse file: only pages that are written take memory or disk.
    weight = torch.from_file(path, shared=True, size=n * k, dtype=torch.int8).view(n, k)
    path = str(tmp_path / "out")
    folded = torch.from_file(path, shared=True, size=n * k, dtype=F16).view(n, k)
    weight[-1] = int8(1, k)[0]
    x, y, scale = torch.randn(1, k), torch.zeros(1, n), torch.ones(1)
    index = {0: 0}

    def program_id(axis: int) -> Any:
        return interpreter.TensorHandle(np.array([index.get(axis, 0)], np.int32), tl_int32)

    tl_int32 = interpreter.tl.int32
    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", program_id)
    program = gemv._program(1)
    index[0] = n // program.columns - 1
    constants = program.constants(k, per_channel=False, has_bias=False)
    gemv._gemv_kernel[1, 1, 1](x, weight, scale, scale, y, 1, n, k // constants[0], *constants)
    expected, magnitudes = exact(x, weight[-1:], scale, None)
    assert abs(y[0, -1] - expected) <= magnitudes * 2.0**-20
    unit, _, rows, block_k, _ = fold = dequantize.constants(weight, scale)
    blocks = -(-k // block_k)
    for block in range(blocks):
        index[0] = (n // rows - 1) * blocks + block
        dequantize._dequantize_kernel[1, 1, 1](weight, scale, folded, n, k // unit, *fold)
    assert torch.equal(folded[-1], weight[-1].half())


ARCHITECTURES = (60, 70, 75, 80, 86, 90, 100, 120)


def compiled(kernel: Any, types: list[str], values: tuple[Any, ...], sm: int, warps: int) -> Any:
    """Triton's compiled kernel: `asm` by stage, and `metadata`."""
    pytest.importorskip("triton")
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    signature = dict(zip(names, types + ["constexpr"] * len(values), strict=True))
    constants = {(len(types) + index,): value for index, value in enumerate(values)}
    pointers = [index for index, text in enumerate(types) if text.startswith("*")]
    aligned = {(index,): [["tt.divisibility", 16]] for index in pointers}
    return triton_compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": warps, "enable_fp_fusion": True},
    )


def short(dtype: torch.dtype) -> str:
    return "*" + SHORT[str(dtype).removeprefix("torch.")]


@functools.cache
def compiled_dequantize(sm: int, dtype: torch.dtype, k: int, per_channel: bool) -> Any:
    weight = torch.empty(8, k, dtype=torch.int8, device="meta")
    scale = torch.empty(8 if per_channel else 1, device="meta")
    types = ["*i8", "*fp32", short(dtype), "i32", "i32"]
    values = dequantize.constants(weight, scale)
    return compiled(dequantize._dequantize_kernel, types, values, sm, dequantize._WARPS)


@functools.cache
def compiled_gemv(sm: int, dtype: torch.dtype, m: int, k: int) -> Any:
    program = gemv._program(m)
    types = [short(dtype), "*i8", "*fp32", short(dtype), short(dtype), "i32", "i32", "i32"]
    values = program.constants(k, per_channel=True, has_bias=True)
    return compiled(gemv._gemv_kernel, types, values, sm, program.num_warps)


@compiles
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "k", "per_channel"), [(F16, 4096, True), (BF16, 4096, False), (F16, 4097, True)]
)
def test_dequantizing_compiles_for_every_architecture_and_moves_16_bytes_at_a_time(
    sm: int, dtype: torch.dtype, k: int, per_channel: bool, tmp_path: Path
) -> None:
    kernel = compiled_dequantize(sm, dtype, k, per_channel)
    usage = resource_usage(kernel.asm["cubin"], tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0), dict(usage)
    for instruction in ("ld.global.v4", "st.global.v4"):
        assert (instruction in kernel.asm["ptx"]) == (k % 16 == 0)


@compiles
@pytest.mark.parametrize("sm", ARCHITECTURES)
@pytest.mark.parametrize(
    ("dtype", "m", "k"),
    [(F16, 1, 4096), (F16, 2, 4096), (BF16, 4, 4096), (F16, 8, 4096), (F32, 8, 4097)],
)
def test_the_gemv_compiles_for_every_architecture_and_its_loop_exchanges_nothing(
    sm: int, dtype: torch.dtype, m: int, k: int, tmp_path: Path
) -> None:
    kernel = compiled_gemv(sm, dtype, m, k)
    usage = resource_usage(kernel.asm["cubin"], tmp_path)
    assert (usage["STACK"], usage["LOCAL"]) == (0, 0), dict(usage)
    source = kernel.asm["ttgir"]
    loop = source[source.index("scf.for") : source.index("scf.yield")]
    assert "convert_layout" not in loop
    # Conversions of integers are slow; an odd K takes them no better.
    assert "cvt.rn.f32.s" not in kernel.asm["ptx"]


@compiles
def test_sizes_do_not_select_a_binary() -> None:
    kernels = (dequantize._dequantize_kernel, gemv._gemv_kernel)
    for kernel in kernels:
        sizes = [p for p in kernel.params if p.name in {"M", "N", "K_UNITS"}]
        assert sizes
        assert all(p.do_not_specialize for p in sizes)
