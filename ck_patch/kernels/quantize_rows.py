"""The INT8 row quantizer: q[m, k] = clamp(rint(x[m, k] / s[m])), scale[m] = max_k |x[m, k]| / 127.

x float32, float16 or bfloat16 [M, K]; q int8 [M, K]; scale float32 [M]; s is scale in the dtype of
x. Two roundings exist, that of stock's CUDA and Triton backends and that of its eager one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED
from ck_patch.kernels.replay import replay

Rounding = Literal["cuda", "triton", "eager"]
"""The stock quantizer whose results count. CUDA's and Triton's are the same, bit for bit, but for
rows with an infinity: Triton's makes their scale infinite, which is a fault, and ours is CUDA's."""

Launch = Callable[[Sequence[int], int], None]
"""Launches a bound quantizer on the addresses of x, q and scale, on a raw CUDA stream of the
current device."""

# What all three stock quantizers multiply with: the compiler makes that of `/ 127`.
_ONE_127TH = tl.constexpr(float.fromhex("0x1.020408p-7"))
_SMALLEST_SCALE = tl.constexpr(float.fromhex("0x1.4484cp-100"))  # 1e-30 in float32
# In [2^23, 2^24) float32 has the integers alone: adding rounds, half to even, and the lowest byte
# of the sum is the result. Conversions run at an eighth of the speed of additions.
_INTEGERS = tl.constexpr(1.5 * 2**23)


@triton.jit(do_not_specialize=["K_UNITS"])
def _quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    K_UNITS,
    UNIT: tl.constexpr,
    EAGER: tl.constexpr,
    FINITE_MAX: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program quantizes one row of K_UNITS * UNIT values."""
    K = K_UNITS * UNIT
    # M * K may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * K
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + row + k
    q_ptrs = q_ptr + row + k

    # The first block of a row stays in registers. What is beyond is read twice, the second time
    # from a cache.
    first = tl.load(x_ptrs, mask=k < K, other=0.0)
    largest = tl.max(_magnitude(first, EAGER), axis=0)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        beyond = tl.load(x_ptrs + k0, mask=k < K - k0, other=0.0)
        largest = tl.maximum(largest, tl.max(_magnitude(beyond, EAGER), axis=0))
    scale, s, low, high = scales(largest, x_ptr.dtype.element_ty, EAGER, FINITE_MAX, TINY)
    tl.store(scale_ptr + tl.program_id(0), scale)

    reciprocal = reciprocal_of(s, EAGER)
    tl.store(q_ptrs, quantize(first, s, reciprocal, low, high, EAGER), mask=k < K)
    for k0 in range(BLOCK_K, K, BLOCK_K):
        beyond = tl.load(x_ptrs + k0, mask=k < K - k0, other=0.0)
        quantized = quantize(beyond, s, reciprocal, low, high, EAGER)
        tl.store(q_ptrs + k0, quantized, mask=k < K - k0)


@triton.jit
def _magnitude(x, EAGER: tl.constexpr):
    """|x| in float32, or its bits, in whose order NaN is the largest: eager's maximum keeps it."""
    x = x.to(tl.float32)
    if EAGER:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return tl.abs(x)


@triton.jit
def scales(largest, DTYPE: tl.constexpr, EAGER: tl.constexpr, FINITE_MAX, TINY):
    """The scale, the divisor s, and the bounds of q, from the largest magnitude of a row."""
    if EAGER:
        scale = largest.to(tl.float32, bitcast=True) * _ONE_127TH
        scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
        s = scale.to(DTYPE).to(tl.float32)
        s = tl.where(s == 0.0, TINY, s)
        # With a scale that is infinite or NaN every quotient is 0 or NaN, and either becomes 0.
        finite = scale < float("inf")
        return scale, s, tl.where(finite, -128.0, 0.0), tl.where(finite, 127.0, 0.0)
    else:
        # The first maximum is for a row of NaN alone, which has no largest magnitude.
        largest = tl.minimum(tl.maximum(largest, 0.0), FINITE_MAX)
        scale = tl.maximum(largest * _ONE_127TH, _SMALLEST_SCALE)
        return scale, scale.to(DTYPE).to(tl.float32), -128.0, 127.0


@triton.jit
def reciprocal_of(s, EAGER: tl.constexpr):
    if EAGER:
        return tl.div_rn(1.0, s)
    elif _COMPILED:
        # That of `div.full.f32` too, by which stock's Triton kernel divides.
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / s


@triton.jit
def quantize(x, s, reciprocal, low, high, EAGER: tl.constexpr):
    """x / s in the dtype of x, rounded to int8."""
    wide = x.to(tl.float32)
    quotient = wide * reciprocal
    if EAGER:
        quotient = _correct(quotient, wide, s, reciprocal)
        if x.dtype == tl.float32:
            quotient = _correct(quotient, wide, s, reciprocal)
    quotient = _round_to(quotient, x.dtype)
    # NaN becomes the lower bound.
    quotient = tl.minimum(tl.maximum(quotient, low), high)
    return (quotient + _INTEGERS).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _correct(quotient, x, s, reciprocal):
    if _COMPILED:
        return tl.fma(tl.fma(-quotient, tl.broadcast_to(s, x.shape), x), reciprocal, quotient)
    else:
        return x / s


@triton.jit
def _round_to(x, DTYPE: tl.constexpr):
    """A float32 rounded to what DTYPE can hold."""
    if _COMPILED and tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, low, high;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 low, pair, 16;
            and.b32 high, pair, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(DTYPE).to(tl.float32)


class RowQuantizer:
    """The quantizer in the rounding of one of stock's backends.

    `run` goes through Triton's dispatcher, which inspects every argument at every call. What `bind`
    returns launches the compiled kernel itself, with addresses for tensors: see `launch.Gemm`.
    """

    kernel = _quantize_rows_kernel
    # Arguments that differ from one launch to the next: the addresses of x, q and scale.
    leading = 3

    def __init__(self, rounding: Rounding) -> None:
        self._eager = rounding == "eager"
        self._compiled: Any = None

    def _arguments(self, x: torch.Tensor) -> tuple[object, ...]:
        k = x.shape[1]
        unit = 16 if k % 16 == 0 else 1
        finfo = torch.finfo(x.dtype)
        block_k, _ = _shape_of_program(k, x.dtype)
        return k // unit, unit, self._eager, finfo.max, finfo.tiny, block_k

    def _num_warps(self, x: torch.Tensor) -> int:
        return _shape_of_program(x.shape[1], x.dtype)[1]

    def _options(self, x: torch.Tensor) -> dict[str, Any]:
        """The compiler's."""
        return {"num_warps": self._num_warps(x), "enable_fp_fusion": False}

    def run(self, x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, *more: object) -> None:
        """Compile if need be and run on the current stream of the current device.

        x float32, float16 or bfloat16 [M, K]; q int8 [M, K] and scale float32, M values, are
        written in place. All are contiguous, on one device, 16-byte aligned; M and K are positive.
        `more` is what a kernel of another class takes after these.
        """
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = self.kernel[x.shape[0], 1, 1](
            *(x, q, scale, *more, *self._arguments(x)), **self._options(x)
        )

    def bind(self, x: torch.Tensor) -> Launch:
        """The launch of calls of the shape and dtype of x; `run` must have compiled the kernel on
        as many columns of that dtype."""
        return replay(self._compiled, x.shape[0], self.leading, self._arguments(x))


def _shape_of_program(k: int, dtype: torch.dtype) -> tuple[int, int]:
    """Columns that a program takes at a time, and its warps: a thread holds 32 values.

    Measured on one H200 (sm_90; torch 2.11+cu130, Triton 3.6, 2026-11-30) by CUDA graph replay on
    bfloat16, in percent of the speed of a copy of as many bytes:

    | M x K | 4096 by 4 warps | 4096 by 8 | 8192 by 8 | whole row, at best |
    |---|---|---|---|---|
    | 36864 x 5376 | 91 | | 87 | 92 |
    | 4608 x 12288 | 90 | 86 | | 82 |
    | 25900 x 16384 | | 89 | | 91 |
    | 36864 x 28672 | | 83 | 88 | 80 |

    float32 in blocks of 8192 spills on sm_120.
    """
    widest = 8192 if k > 12288 and dtype != torch.float32 else 4096
    block_k = min(max(triton.next_power_of_2(k), 1024), widest)
    return block_k, block_k // 1024
