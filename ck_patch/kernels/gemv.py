"""The linear in float32: y[m, n] = (sum over k of x[m, k] * w[n, k]) * scale[n] + bias[n].

x float32, float16 or bfloat16 [M, K]; w int8 [N, K]; scale float32, 1 or N values; bias N values
and y [M, N] of any of the dtypes of x. All is float32 until the one rounding to the dtype of y.
Made for a few rows, and for columns of many rows that another kernel cannot do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED

# A weight is at most 2^7 and K below 2^17: no sum of products with float32's largest x overflows.
# Exact but for what is subnormal then, and float16 is exempt: it needs no help.
_DOWN = tl.constexpr(2.0**-24)
_UP = tl.constexpr(2.0**24)


@triton.jit(do_not_specialize=["M", "N", "K_UNITS"])
def _gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K_UNITS,
    UNIT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program computes BLOCK_M x BLOCK_N of y, over the whole of K = K_UNITS * UNIT.

    UNIT says what K is a multiple of, and so how wide a load may be. All tensors have three axes
    from the start: then one layout serves x and w, and nothing is exchanged within the K loop.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = m < M, n < N
    y = _sums(x_ptr, w_ptr, m, n, in_m, in_n, K_UNITS * UNIT, BLOCK_M, BLOCK_N, BLOCK_K)
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + n, mask=in_n, other=0.0)[None, :]
    else:
        scale = tl.load(scale_ptr)
    if x_ptr.dtype.element_ty != tl.float16:
        scale *= _UP
    y *= scale
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _sums(
    x_ptr,
    w_ptr,
    m,
    n,
    in_m,
    in_n,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of x[m, k] * w[n, k] over k, times _DOWN unless x is float16."""
    k = tl.arange(0, BLOCK_K)
    # M * K and N * K may exceed 2^31.
    x_ptrs = x_ptr + (m.to(tl.int64) * K)[:, None, None] + k[None, None, :]
    w_ptrs = w_ptr + (n.to(tl.int64) * K)[None, :, None] + k[None, None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N, BLOCK_K), dtype=tl.float32)
    for k0 in range(0, K, BLOCK_K):
        in_k = (k < K - k0)[None, None, :]
        w = tl.load(w_ptrs + k0, mask=in_n[None, :, None] & in_k, other=0)
        x = tl.load(x_ptrs + k0, mask=in_m[:, None, None] & in_k, other=0.0).to(tl.float32)
        if x_ptr.dtype.element_ty != tl.float16:
            x *= _DOWN
        acc += x * _widen(w)
    return tl.sum(acc, axis=2)


@triton.jit(do_not_specialize=["M", "N", "K_UNITS", "stride_ym", "up"])
def _unfit_columns_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    M,
    N,
    K_UNITS,
    stride_ym,
    up,
    UNIT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LEAST: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All rows of y, times `up` before the bias, in those of BLOCK_N columns whose scale is above
    HIGH, or below LOW and not below LEAST. Nearly always there are none."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < N
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + n, mask=in_n, other=0.0)
    else:
        scale = tl.load(scale_ptr) + tl.zeros((BLOCK_N,), tl.float32)
    size = tl.abs(scale)
    unfit = in_n & ((size > HIGH) | ((size < LOW) & (size >= LEAST)))
    if tl.max(unfit.to(tl.int32), axis=0) > 0:
        for m0 in range(M):
            m = m0 + tl.arange(0, 1)
            y = _sums(x_ptr, w_ptr, m, n, m < M, unfit, K_UNITS * UNIT, 1, BLOCK_N, BLOCK_K)
            y = y * (scale * up)[None, :]
            if HAS_BIAS:
                y += tl.load(bias_ptr + n, mask=unfit, other=0.0).to(tl.float32)[None, :]
            y_ptrs = y_ptr + (m.to(tl.int64) * stride_ym)[:, None] + n[None, :]
            tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=unfit[None, :])


@triton.jit
def _widen(w):
    """int8 as float32. A conversion runs at an eighth of the speed of these operations.

    In [2^23, 2^24) the lowest byte of a float32 is the lowest of an integer's: w + 128 goes there.
    """
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes, word<4>;
            xor.b32 bytes, $4, 0x80808080;
            prmt.b32 word0, bytes, 0x4b000000, 0x7440;
            prmt.b32 word1, bytes, 0x4b000000, 0x7441;
            prmt.b32 word2, bytes, 0x4b000000, 0x7442;
            prmt.b32 word3, bytes, 0x4b000000, 0x7443;
            sub.rn.f32 $0, word0, 0f4B000080;
            sub.rn.f32 $1, word1, 0f4B000080;
            sub.rn.f32 $2, word2, 0f4B000080;
            sub.rn.f32 $3, word3, 0f4B000080;
            }""",
            "=f,=f,=f,=f,r",
            [w],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        return w.to(tl.float32)


@dataclass(frozen=True)
class _Program:
    """What one program takes: `rows` of x by `columns` of y, `width` values of K to a thread."""

    rows: int
    columns: int
    width: int
    num_warps: int

    def constants(self, k: int, per_channel: bool, has_bias: bool) -> tuple[int, ...]:
        unit = self.width if k % self.width == 0 else 1
        block_k = self.width * 32 * self.num_warps
        return unit, per_channel, has_bias, self.rows, self.columns, block_k


_UNFIT_COLUMNS = 16
_UNFIT_K = 256

_PROGRAMS = {
    program.rows: program
    for program in (
        _Program(1, 4, 8, 4),
        _Program(2, 2, 8, 2),
        _Program(4, 4, 4, 2),
        _Program(8, 2, 4, 2),
    )
}


def _program(m: int) -> _Program:
    return _PROGRAMS[min(triton.next_power_of_2(m), 8)]


def constants(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """What besides dtypes and alignments selects the binary for a call."""
    m, k = x.shape
    return _program(m).constants(k, scale.numel() > 1, bias is not None)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write `out` on the current stream of the current device; compiles at the first call.

    x float32, float16 or bfloat16 [M, K], weight int8 [N, K], scale float32 with 1 or N values,
    bias of N values and out [M, N] of any of the dtypes of x: all are contiguous and on one device,
    M, N and K positive, K below 2^17. The weight is read once for every 8 rows of x. A row of the
    result depends on no other row of x, and its sums are always taken in the same order.
    """
    launch(_program(x.shape[0]), x, weight, scale, bias, out)


def launch(
    program: _Program,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """The same with another shape of program, for measurements."""
    (m, k), n = x.shape, weight.shape[0]
    unit, *_ = given = program.constants(k, scale.numel() > 1, bias is not None)
    _gemv_kernel[(triton.cdiv(n, program.columns), triton.cdiv(m, program.rows))](
        x,
        weight,
        scale,
        scale if bias is None else bias,
        out,
        m,
        n,
        k // unit,
        *given,
        num_warps=program.num_warps,
        # A product and its sum are rounded once.
        enable_fp_fusion=True,
    )


def unfit_columns(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    up: float,
    limits: tuple[float, float, float],
) -> None:
    """Write again, as `gemv` does, the columns of `out` whose scale does not fit.

    A scale fits from `limits[1]` to `limits[2]`, and below `limits[0]`. x is float16; rows of `out`
    may be part of longer ones; the products are multiplied by `up`. Slow where there is such a
    column, and next to nothing where there is none.
    """
    (m, k), n = x.shape, weight.shape[0]
    unit = 16 if k % 16 == 0 else 1
    _unfit_columns_kernel[(triton.cdiv(n, _UNFIT_COLUMNS),)](
        x,
        weight,
        scale,
        scale if bias is None else bias,
        out,
        m,
        n,
        k // unit,
        out.stride(0),
        up,
        unit,
        scale.numel() > 1,
        bias is not None,
        *limits,
        _UNFIT_COLUMNS,
        _UNFIT_K,
        num_warps=4,
        enable_fp_fusion=True,
    )
