"""The INT8 linear on 16-bit tensor cores: the weight is dequantized piece by piece, by plain torch.

    out[m, n] = (sum over k of x[m, k] * weight[n, k]) * weight_scale[n] + bias[n]

An int8 is exact in float16 and bfloat16, so the weight is only cast; its scale and the bias come in
float32 after the GEMM, which accumulates in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ck_patch.gemm_chunks import Pieces, Storage, pieces

Gemm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`a` [m, K] by `w` [n, K], both of one 16-bit dtype, to a new [m, n] of that dtype or float32."""

_INT8 = 128
"""The largest magnitude of a weight."""

_FLOAT16 = 2.0**15
"""What sums that are written as float16 stay below, with room for rounding up to 65,504."""

_SMALLEST = 2.0**-100
"""Rows below it are scaled as if they reached it, so that the reciprocal of their scale is finite;
what they lose no output dtype would have shown."""

_BFLOAT16 = 2.0**-26
"""Factor of the weight under bfloat16, whose range lets x be read as it is: so no sum of up to
2**18 products leaves that of float32."""

_BFLOAT16_X = 2.0**-6
"""Factor of what is made from x under bfloat16, by rounding float32 or by rotating: the result is
within its range too."""


@dataclass(frozen=True)
class Entry:
    """A way through torch to a 16-bit GEMM that accumulates in float32.

    `narrow` writes the operands' dtype, which float16 sums must fit; `wide` writes float32 where
    the entry can, else it is `narrow`. Either widens operands to float32 first where `widens`.
    """

    wide: Gemm
    narrow: Gemm
    widens: bool = False


def _mm_float32(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, w.t(), out_dtype=torch.float32)


def _mm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, w.t())


def _convolution(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (m, k), n = a.shape, w.shape[0]
    # An image of m pixels with k channels, last in memory, and n filters of one pixel.
    image = a.as_strided((1, k, m, 1), (m * k, 1, k, k))
    filters = w.as_strided((n, k, 1, 1), (k, 1, k, k))
    # allow_tf32=False would keep cuDNN from tensor cores for every dtype.
    result = torch.cudnn_convolution(
        image, filters, (0, 0), (1, 1), (1, 1), 1, benchmark=False, deterministic=False,
        allow_tf32=True,
    )  # fmt: skip
    return result.permute(0, 2, 3, 1).reshape(m, n)


def _widened(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a.float() @ w.float().t()


FLOAT32_OUTPUT = Entry(_mm_float32, _mm)
SAME_OUTPUT = Entry(_mm, _mm)
CONVOLUTION = Entry(_convolution, _convolution)
WIDENED = Entry(_widened, _widened, widens=True)


@functools.cache
def has_out_dtype() -> bool:
    """Whether this torch lets a GEMM of 16-bit operands write float32."""
    return "dtype" in torch.ops.aten.mm.overloads()  # From torch 2.8 on.


def entry(device: torch.device, compute: torch.dtype) -> Entry:
    """The entry for operands of that dtype on that device, as torch's switches stand.

    Where float16 accumulation is switched on, cuBLAS accumulates in float16 and torch refuses a
    float32 output; cuDNN's convolutions accumulate in float32 all the same.
    """
    if device.type != "cuda":
        return WIDENED
    if compute == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        cudnn = torch.backends.cudnn
        return CONVOLUTION if cudnn.enabled and cudnn.is_available() else WIDENED
    return FLOAT32_OUTPUT if has_out_dtype() else SAME_OUTPUT


@torch.no_grad()
def dequantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    compute: torch.dtype = torch.float16,
    hadamard: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T, dequantized: x float32, float16 or bfloat16 [M, K] to a new [M, N].

    `weight` is int8 [N, K], `weight_scale` float32 with 1 or N values, `bias` any float dtype with
    N values, `compute` float16 or bfloat16. With `hadamard`, normalized, [G, G], G a power of 4
    that divides K, each G elements of a row of x are rotated by it first (ConvRot): as a GEMM of
    its own, in the rotated basis that the weight is in.

    Every finite x gives finite sums: what overflows is the output dtype. A rotated value of a
    float16 x is rounded to a multiple of at most 2**-24 times the root of G, besides the rounding
    to float16. An infinity or a NaN in x leaves nothing finite in its row, and does not leave its
    row. Takes at most CHUNK_BYTES beyond
    the output, does not synchronize, and neither heeds nor changes torch's switches for float16
    accumulation and reductions. Not differentiable.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    way = entry(x.device, compute)
    with torch.autocast(x.device.type, enabled=False):  # It would copy whole operands.
        DequantizedCall(x, weight, weight_scale, bias, compute, hadamard, way).into(out)
    return out


class DequantizedCall:
    """One linear: its operands, and the factors that keep 16-bit values in range."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        compute: torch.dtype,
        hadamard: torch.Tensor | None,
        entry: Entry,
    ) -> None:
        half = compute == torch.float16
        self.x, self.weight, self.compute = x, weight, compute
        self.entry = entry
        narrow = self.entry.wide is self.entry.narrow and not self.entry.widens
        self.scaled = half and (narrow or x.dtype != compute)
        """Whether rows of x are scaled by a power of two each."""
        in_place = rows_in_place(x) if hadamard is None else x.is_contiguous()
        self.copied = self.scaled or x.dtype != compute or not in_place
        # A scaled row is below 2 * factor, a sum of any of its products below 256 * factor * K, and
        # both bounds outlive a rotation, which keeps the length of a vector (Cauchy-Schwarz).
        self.x_factor = 1.0
        if self.scaled:
            bound = _FLOAT16 / (2 * _INT8 * x.shape[1])
            self.x_factor = 2.0 ** min(0, math.floor(math.log2(bound)))
        elif x.dtype == torch.float32 and not half:
            self.x_factor = _BFLOAT16_X
        self.w_factor = 1.0 if half else _BFLOAT16
        self.hadamard = None
        self.rotation = 1.0
        if hadamard is not None:
            if not half:
                self.rotation = _BFLOAT16_X
            elif not self.scaled:
                # Rotated values are at most the root of G, a power of two, times those of x.
                self.rotation = 1 / math.sqrt(hadamard.shape[0])
            self.hadamard = (hadamard.t() * self.rotation).to(compute).contiguous()
        self.w_scale = weight_scale.reshape(1, -1).float()
        factor = self.x_factor * self.w_factor * self.rotation
        if factor != 1:
            self.w_scale = self.w_scale / factor
        self.bias = None if bias is None else bias.reshape(1, -1).float()

    def pieces(self) -> Pieces:
        (m, k), n = self.x.shape, self.weight.shape[0]
        widened = 4 if self.entry.widens else 0
        x = widened + (2 if self.copied else 0)
        if self.hadamard is not None:
            x += 2 + widened
        # A narrow accumulator is widened by the epilogue.
        wide = self.entry.widens or self.entry.wide is not self.entry.narrow
        return pieces(m, n, k, Storage(x, 2 + widened, 4 if wide else 6))

    def into(self, out: torch.Tensor) -> None:
        """Write the result. What is dearer to make again is made in the outer loop."""
        parts = self.pieces()
        if self.copied or self.hadamard is not None:
            for rows in parts.rows:
                a, row_scale = self._operand(self.x[rows])
                for columns in parts.columns:
                    w = self._dequantized(columns)
                    self._piece(out[rows, columns], a, row_scale, w, columns)
                    del w
                del a
        else:
            for columns in parts.columns:
                w = self._dequantized(columns)
                for rows in parts.rows:
                    self._piece(out[rows, columns], self.x[rows], None, w, columns)
                del w

    def _operand(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """These rows of x for the GEMM, and the factors [m, 1] that its output has to get back."""
        a, row_scale = x, None
        if self.scaled:
            row_scale = _power_of_two(x)
            a = _product(x, self.x_factor / row_scale, self.compute)
        elif self.x_factor != 1:
            a = _product(x, self.x_factor, self.compute)
        elif self.copied:
            a = _cast(x, self.compute)
        if self.hadamard is not None:
            groups = a.reshape(-1, self.hadamard.shape[0])
            a = self.entry.narrow(groups, self.hadamard).to(self.compute).view(x.shape)
        return a, row_scale

    def _dequantized(self, columns: slice) -> torch.Tensor:
        w = _cast(self.weight[columns], self.compute)
        return w if self.w_factor == 1 else w.mul_(self.w_factor)

    def _piece(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        row_scale: torch.Tensor | None,
        w: torch.Tensor,
        columns: slice,
    ) -> None:
        acc = self.entry.wide(a, w)
        factor = _cut(self.w_scale, columns)
        if row_scale is not None:
            # Not the product of the scales: it may leave the range that the result is in.
            in_place = acc if acc.dtype == torch.float32 else None
            acc = torch.mul(acc, factor, out=in_place)
            factor = row_scale
        _affine(acc, factor, None if self.bias is None else _cut(self.bias, columns), out)


def _cast(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy. Unlike `to`, this reads and writes vectors on a GPU, whatever the dtypes:
    the cast of an int8 weight takes half the time."""
    copy = torch.empty(source.shape, dtype=dtype, device=source.device)
    torch._foreach_copy_([copy], [source])
    return copy


def _product(x: torch.Tensor, factor: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """x * factor, rounded once."""
    return torch.mul(x, factor, out=torch.empty(x.shape, dtype=dtype, device=x.device))


def _affine(
    acc: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write acc * factor + bias, rounded once; a float32 `acc` may be overwritten."""
    if bias is None:
        torch.mul(acc, factor, out=out)
    elif acc.dtype == torch.float32 != out.dtype and out.is_contiguous():
        # Operands of one dtype, and then a cast of all there is, are faster than both at once.
        out.copy_(torch.addcmul(bias, acc, factor, out=acc))
    else:
        torch.addcmul(bias, acc, factor, out=out)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two in the magnitude of each row, float32 [m, 1].

    Infinite for a row with an infinity or a NaN: its finite values become 0 by it, the others NaN.
    """
    peak = torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True, dtype=torch.float32)
    exponent = (peak.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.clamp(exponent, min=_SMALLEST)


def rows_in_place(x: torch.Tensor) -> bool:
    """Whether cuBLAS reads these rows where they are; torch would copy all of them otherwise."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _cut(values: torch.Tensor, columns: slice) -> torch.Tensor:
    """These columns of [1, N], or the [1, 1] that serves all."""
    return values if values.shape[1] == 1 else values[:, columns]
