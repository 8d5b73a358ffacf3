"""The exact INT8 GEMM with its float32 epilogue, computed without torch's or Triton's arithmetic.

d[m, n] = round(acc[m, n] * x_scale[m] * w_scale[n] + bias[n]), acc summed in 64-bit integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Rounding:
    """How a machine rounds: whether its FMA rounds once, and whether bfloat16 is cut off."""

    fused: bool
    truncates_bfloat16: bool


GPU = Rounding(fused=True, truncates_bfloat16=False)

Order = Literal["cutlass", "triton", "eager"]
"""The stock kernel whose order of operations counts."""


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    rounding: Rounding = GPU,
    order: Order = "cutlass",
    residual: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """`a` int8 [M, K] by `b` int8 [N, K] as stock computes it: every float32 operation rounds to
    nearest even, once; the output dtype likewise.

    CUTLASS scales by rows first and fuses the scale of the columns with the bias; with a residual
    [M, N] it adds a bias in any case, and rounds to the output dtype before the residual too.
    Triton fuses the product of the scales with the bias. Eager stores every result.
    """
    acc = (a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T).astype(np.float32)
    xs = x_scale.numpy().reshape(-1, 1)
    ws = w_scale.numpy().reshape(1, -1)
    with np.errstate(all="ignore"):
        left, right = (acc * xs, ws) if order == "cutlass" else (acc, xs * ws)
        if order == "eager":
            out = _stored(left * right, out_dtype, rounding)
            if bias is not None:
                out = out + _stored(_float32(bias), out_dtype, rounding)
        elif bias is None and residual is None:
            out = left * right
        else:
            addend = np.zeros(1, np.float32) if bias is None else _float32(bias)
            out = _sum(left, right, addend, rounding)
        if residual is not None and residual_scale is not None:
            out = _stored(out, out_dtype, rounding)
            out = _sum(out, _float32(residual_scale), _float32(residual), rounding)
        return _cast(out, out_dtype, rounding)


def _sum(x: Floats, y: Floats, z: Floats, rounding: Rounding) -> Floats:
    return fma(x, y, z) if rounding.fused else x * y + z


def _stored(values: Floats, dtype: torch.dtype, rounding: Rounding) -> Floats:
    return _float32(_cast(values, dtype, rounding))


def fma(x: Floats, y: Floats, z: Floats) -> Floats:
    """`x * y + z`, rounded once to float32.

    The product of two float32 is exact in float64. The sum is rounded to odd there (Boldo and
    Melquiond 2008: with more than twice the digits, rounding again is then as good as once).
    """
    product = x.astype(np.float64) * y.astype(np.float64)
    addend = np.broadcast_to(z.astype(np.float64), product.shape)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)
    even = total.view(np.int64) % 2 == 0
    inexact = np.isfinite(total) & (error != 0)
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, odd, total).astype(np.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A float tensor as integers, for comparing signs of zeros too; every NaN is the same."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return torch.where(tensor.isnan(), torch.nan, tensor).to(tensor.dtype).view(integers)


def _float32(tensor: torch.Tensor) -> Floats:
    values: Floats = tensor.to(torch.float32).numpy()  # exact: float32 holds the 16-bit types
    return values


def _cast(values: Floats, dtype: torch.dtype, rounding: Rounding) -> torch.Tensor:
    if dtype == torch.float16:
        return torch.from_numpy(values.astype(np.float16))
    if dtype == torch.bfloat16 and rounding.truncates_bfloat16:
        upper = (values.view(np.uint32) >> 16).astype(np.uint16)
        return torch.from_numpy(upper.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values).to(dtype)
