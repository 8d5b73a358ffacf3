"""The rotating INT8 row quantizer: q[m] and scale[m] are those of `quantize_rows` on R(act(x[m])).

act is nothing or one of `input_acts`, in float32, by `_activations`.

R rotates each 256 values of a row, in float32, by four stages of butterflies at strides 1, 4, 16
and 64. A butterfly takes (a, b, c, d) to half of (((a + b) + c) - d, ((a + b) - c) + d,
((a - b) + c) + d, ((b - a) + c) + d): each sum from left to right and each stage halved, with
subnormal numbers as zero, which is the order of stock's CUDA kernel, and shows in the result. The
largest magnitude of a row is that of R(x) in float32, while what is divided by the scale is R(x)
in the dtype of x.

Here a row is rotated to 16 R(x), with no halving, and one factor 1/16 for its scale. A factor that
is a power of two changes no rounding, so that this is exact unless a sum overflows, or is so small
that stock takes it for zero after a halving. Both are seen in the largest magnitude:

- An infinity or NaN among the sums stays one to the end. Rows from 2^127 on are quantized once
  more with all the halvings: not only from an infinity on, because rounding to bfloat16 may make
  one.
- What stock takes for zero is less than 2^-122 here, and all of it in one group moves no sum by
  2^-116. A row of less than 2^-107 is zeros on the smallest scale in any case. One from there to
  2^-30 is quantized once more. In one from 2^-30 on, what is less than 2^-38 becomes zero, and of
  the rest the last bit is 2^-61 or more. To change that, a difference must grow by roundings alone:
  each can turn the last bit of one number into that of a sum, at most 2^24 times as much, if the
  number lies at a tie of the sum to that very bit. It takes three such ties in consecutive sums, or
  more of less; by chance, about one such sum in 2^55 has them. A row can be made that differs.

None of this asks where the numbers come from, so that it holds for those of an activation. Without
one, float16 rows leave these bounds by an infinity or a NaN alone.

x float32, float16 or bfloat16 [M, K], or [M, 2 K] where the activation takes pairs, K a multiple of
256; q int8 [M, K]; scale float32 [M]; a weight [K] in the dtype of x.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ck_patch.kernels._activations import activated, rsqrt_of_mean_square
from ck_patch.kernels._rotation import butterfly, join_four, larger, rotate, split
from ck_patch.kernels._row_pieces import SIXTEENTH, keep, load, store_bytes, unpack
from ck_patch.kernels.input_acts import InputAct, columns
from ck_patch.kernels.quantize_rows import RowQuantizer, quantize, reciprocal_of, scales

# The bits of 2^-107, 2^-30 and 2^127.
_LOWEST, _LOW, _HIGH = tl.constexpr(0x0A000000), tl.constexpr(0x30800000), tl.constexpr(0x7F000000)


@triton.jit(do_not_specialize=["GROUPS"])
def _quantize_rows_convrot_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    weight_ptr,
    eps,
    GROUPS,
    FINITE_MAX: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    FULL: tl.constexpr,
    ACT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """One program quantizes one row of GROUPS * 256 values, in pieces of 2 * HALF values, the last
    one HALF if HALVES is odd; FULL says that they are all there. SUMS is that of
    `rsqrt_of_mean_square`; it, weight_ptr and eps are for rms_norm.

    The row stays in registers from the first stage to its scale: x is read once, but for the sum of
    squares, which reads the row once more, the second time from a cache.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PIECES: tl.constexpr = (HALVES + 1) // 2
    PAIRS: tl.constexpr = ACT == "swiglu" or ACT == "situ"
    OTHERS: tl.constexpr = PAIRS or ACT == "rms_norm"
    # So many pieces are on their way while one is rotated: two loads of each value count as two.
    AHEAD: tl.constexpr = 1 if OTHERS else 2
    K = GROUPS * 256
    # M * K may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * K
    q_ptr += row
    scale_ptr += tl.program_id(0)
    # What goes with x, from its own pointer: the other half of the row or the weight.
    y_ptr = x_ptr
    factor = 1.0
    if PAIRS:
        x_ptr += 2 * row
        y_ptr = x_ptr + K
    else:
        x_ptr += row
        if ACT == "rms_norm":
            y_ptr = weight_ptr
            factor = rsqrt_of_mean_square(x_ptr, K, eps, SUMS)

    loaded = ()
    others = ()
    kept = ()
    bits = 0
    largest = tl.zeros([HALF // 8], tl.int32)
    for i in tl.static_range(PIECES + AHEAD):
        if i < PIECES:
            loaded += (load(x_ptr, i, K, HALF, HALVES, FULL),)  # type: ignore[assignment]
            if OTHERS:
                others += (load(y_ptr, i, K, HALF, HALVES, FULL),)  # type: ignore[assignment]
        if i >= AHEAD:
            # Half a piece has half as many maxima.
            if 2 * (i - AHEAD) + 1 == HALVES:
                bits = tl.max(largest, axis=0)
                largest = tl.zeros([HALF // 16], tl.int32)
            x = unpack(loaded[i - AHEAD], DTYPE)
            if ACT is not None:
                y = x
                if OTHERS:
                    y = unpack(others[i - AHEAD], DTYPE)
                x = _activate_each(x, y, factor, ACT)
            x = rotate(x)
            largest = larger(largest, x)
            kept += (keep(x, DTYPE),)  # type: ignore[assignment]
    bits = tl.maximum(bits, tl.max(largest, axis=0))
    exact = (bits < _HIGH) & ((bits >= _LOW) | (bits < _LOWEST))

    highest = bits.to(tl.float32, bitcast=True) * SIXTEENTH
    scale, divisor, _, _ = scales(highest, DTYPE, False, FINITE_MAX, 0.0)
    tl.store(scale_ptr, scale)
    inverse = reciprocal_of(divisor, False)
    if tl.float16 != DTYPE:
        inverse *= SIXTEENTH
    end = tl.where(exact, K, 0)
    for i in tl.static_range(PIECES):
        store_bytes(q_ptr + i * 2 * HALF, kept[i], inverse, end - i * 2 * HALF, DTYPE)
    if not exact:
        _quantize_with_halvings(x_ptr, y_ptr, q_ptr, scale_ptr, K, factor, FINITE_MAX, HALF, ACT)


@triton.jit
def _activate_each(x, y, factor, ACT: tl.constexpr):
    """The activation of each of four quads."""
    p, q, r, s = x
    e, f, g, h = y
    return (
        _activate(p, e, factor, ACT),
        _activate(q, f, factor, ACT),
        _activate(r, g, factor, ACT),
        _activate(s, h, factor, ACT),
    )


@triton.jit
def _activate(x, y, factor, ACT: tl.constexpr):
    a, b, c, d = x
    e, f, g, h = y
    return (
        activated(a, e, factor, ACT),
        activated(b, f, factor, ACT),
        activated(c, g, factor, ACT),
        activated(d, h, factor, ACT),
    )


@triton.jit
def _quantize_with_halvings(
    x_ptr,
    y_ptr,
    q_ptr,
    scale_ptr,
    K,
    factor,
    FINITE_MAX: tl.constexpr,
    SIZE: tl.constexpr,
    ACT: tl.constexpr,
):
    """A row in stock's operations, SIZE values at a time: once for its scale, once for q.

    Small rather than fast: it is rarely run, but is part of each compilation.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, SIZE)
    largest = tl.zeros([SIZE], tl.float32)
    steps = tl.cdiv(K, SIZE)
    for step in range(2 * steps):
        start = step % steps * SIZE
        mask = k < K - start
        x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        y = x
        if ACT is not None:
            if ACT != "gelu_tanh":
                y = tl.load(y_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
            x = activated(x, y, factor, ACT)
        for _stage in range(4):
            x = tl.reshape(join_four(butterfly(split(x))), [SIZE // 256, 64, 4])
            # The next stride becomes 1; after four stages all are again what they were.
            x = tl.reshape(tl.permute(x, [0, 2, 1]), [SIZE]) * 0.5
        largest = tl.maximum(largest, tl.abs(x))  # Passes over NaN.
        if step >= steps:
            scale, divisor, _, _ = scales(tl.max(largest, axis=0), DTYPE, False, FINITE_MAX, 0.0)
            tl.store(scale_ptr, scale)
            inverse = reciprocal_of(divisor, False)
            q = quantize(x.to(DTYPE), None, inverse, -128.0, 127.0, False)
            tl.store(q_ptr + start + k, q, mask=mask)


class ConvrotRowQuantizer(RowQuantizer):
    """The rotating quantizer, with the rounding of stock's CUDA backend, after an input activation
    or none; K, the columns of q, is a multiple of 256.

    With rms_norm, `run` takes the weight [K], in the dtype of x, and eps after the scale, and the
    launch of `bind` the address of the weight, and eps. M is 2 at least: for a single row stock
    sums in another order.
    """

    kernel = _quantize_rows_convrot_kernel

    def __init__(self, act: InputAct | None = None) -> None:
        super().__init__("cuda")
        self.act = act
        if act == "rms_norm":
            self.leading = 5

    def k(self, x: torch.Tensor) -> int:
        """Columns of q."""
        return x.shape[1] // columns(self.act)

    def _arguments(self, x: torch.Tensor) -> tuple[object, ...]:
        k, half = self.k(x), 512 * self._num_warps(x)
        halves = triton.cdiv(k, half)
        normalizes = self.act == "rms_norm"
        return (
            *(() if normalizes else (None, None)),
            *(k // 256, torch.finfo(x.dtype).max, half, halves, k == half * halves),
            *(self.act, _threads_of_stock(k) if normalizes else None),
        )

    def _num_warps(self, x: torch.Tensor) -> int:
        return _warps(self.k(x), x.dtype, self.act)

    def _registers(self, x: torch.Tensor) -> int | None:
        """At most so many a thread: unlimited, float16 rows of three pieces get 140, for 12 warps
        on a multiprocessor instead of 20, which takes 1.28 times as long (measured as in `_warps`;
        everything else is faster without a limit)."""
        halves = triton.cdiv(self.k(x), 512 * self._num_warps(x))
        return 96 if halves == 6 and x.dtype == torch.float16 and self.act is None else None

    def _options(self, x: torch.Tensor) -> dict[str, Any]:
        return {**super()._options(x), "maxnreg": self._registers(x)}


def _threads_of_stock(k: int) -> int:
    """Threads of a block of stock's kernel for more than one row, which show in the sum of squares:
    as its launcher has them in the binaries of 0.2.34 to 0.2.40."""
    for threads, below in ((64, 257), (128, 3073), (256, 6145), (512, 12_288)):
        if k < below:
            return threads
    return 1024


def _warps(k: int, dtype: torch.dtype, act: InputAct | None) -> int:
    """Warps of a program, which takes 1024 values a warp at a time: as few as take at most three
    and a half pieces, or three of float32, and at most 16. situ, whose tanh takes registers, gets
    twice as many.

    Measured on one H200 (sm_90; torch 2.11+cu130, Triton 3.6, 2026-11-30) by CUDA graph replay on
    bfloat16, in percent of the speed of a copy of as many bytes, by warps and values of the pieces:

    | M x K | chosen | others |
    |---|---|---|
    | 36864 x 5376 | 2, 2048 x 3: 75 | 4, 4096 + 2048: 72; 1, 1024 x 5 + 512: 72 |
    | 37296 x 14336 | 4, 4096 x 3 + 2048: 77 | with a limit of 96 registers: 72; 8, 8192 x 2: 70 |
    | 18000 x 14336, float32 | 8, 8192 x 2: 93 | 4, 4096 x 3 + 2048: 82 |
    | 25900 x 16384 | 8, 8192 x 2: 77 | 4, 4096 x 4: 79, 96 registers: 74; 16, 16384: 74 |
    | 32760 x 5120 | 2, 2048 x 2 + 1024: 77 | 1, 1024 x 5: 77; 4, 4096 + 2048: 67 |
    | 4608 x 3072 | 1, 1024 x 3: 68 | 2, 2048 + 1024: 66; 4, 4096: 53 |
    | 4608 x 4096 | 2, 2048 x 2: 76 | 4, 4096: 76; 1, 1024 x 4: 64 |
    | 4608 x 12288 | 4, 4096 x 3: 76 | 8, 8192 + 4096: 71; 2, 2048 x 6: 60 |
    | 1024 x 4096 | 2, 2048 x 2: 56 | 4, 4096: 60; 1, 1024 x 4: 54 |
    | 512 x 3072 | 1, 1024 x 3: 58 | 2, 2048 + 1024: 58; 4, 4096: 54 |
    | 37296 x 14336, swiglu | 4, 4096 x 3 + 2048: 86 | 8, 8192 x 2: 64, with 80 registers: 83 |
    | 4608 x 12288, swiglu | 4, 4096 x 3: 79 | 8, 8192 + 4096: 83 |
    | 4608 x 12288, situ | 8, 8192 + 4096: 41 | 4, 4096 x 3: 33 |
    | 25900 x 16384, gelu_tanh | 8, 8192 x 2: 65 | 4, 4096 x 4: 61; 16, 16384: 58 |
    | 37296 x 5120, rms_norm | 2, 2048 x 2 + 1024: 45 | 4, 4096 + 1024: 36 |

    With one warp, five pieces and more take 18 to 32 seconds to compile; these take 1 to 5.
    """
    at_most = 3072 if dtype == torch.float32 else 3584
    warps = int(triton.next_power_of_2(triton.cdiv(k, at_most))) * (2 if act == "situ" else 1)
    return min(16, warps)
