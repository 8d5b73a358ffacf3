"""The INT8 linear on float16 tensor cores with the scales of the weight folded into it.

    out[m, n] = sum over k of x[m, k] * float16(weight[n, k] * weight_scale[n]) + bias[n]

The weight is written piece by piece by a kernel, and what follows is what a float16 model does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ck_patch import half_ways
from ck_patch.gemm_chunks import Pieces
from ck_patch.ops.dequantized_linear import FLOAT32_OUTPUT, WIDENED, DequantizedCall

Fold = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""Writes int8 weight [n, K] times float32 scale, 1 or n values, and a power of two to a float16
[n, K]."""

Unfit = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        "torch.Tensor | None",
        torch.Tensor,
        float,
        tuple[float, float, float],
    ],
    None,
]
"""Computes columns of an output again; see `kernels.gemv.unfit_columns`."""

_RANGE = 16.0
"""Factor of a folded weight: float16 keeps all its digits from 2**-18 on, and holds up to 4094."""

_LIMITS = (1.1e-30, 2.0**-24, 65504 / (128 * _RANGE))
"""Scales between the last two fold into float16, smaller ones would lose digits of the weight, and
stock's quantizer gives 1e-30 to a channel of zeros. Columns with others are computed again."""


@torch.no_grad()
def folded_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fold: Fold,
    unfit: Unfit,
    direct: bool,
    hadamard: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `dequantized_linear` for a float16 x with rows in place, weight and scale contiguous.

    With `direct` the GEMM writes the output, which is float16 as is a bias. torch's switch for
    float16 accumulation has to be off, and the GEMM large enough that K is not split. Columns whose
    folded weight would not fit float16 are computed again, in float32.
    """
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=out_dtype, device=x.device)
    with torch.autocast(x.device.type, enabled=False):  # It would copy whole operands.
        _FoldedCall(x, weight, weight_scale, bias, fold, unfit, direct, hadamard).into(out)
    return out


class _FoldedCall(DequantizedCall):
    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        fold: Fold,
        unfit: Unfit,
        direct: bool,
        hadamard: torch.Tensor | None,
    ) -> None:
        entry = FLOAT32_OUTPUT if x.is_cuda else WIDENED
        in_gemm = bias if direct else None
        after = None if direct else bias
        super().__init__(x, weight, weight_scale, after, torch.float16, hadamard, entry)
        self._fold, self._unfit, self._direct, self._in_gemm = fold, unfit, direct, in_gemm
        self._bias = bias
        self._scale = weight_scale.reshape(-1)
        self._alpha = 1 / (_RANGE * self.rotation)

    def pieces(self) -> Pieces:
        if not self._direct:
            return super().pieces()
        (m, k), n = self.x.shape, self.weight.shape[0]
        return half_ways.folded_pieces(m, n, k, self.hadamard is not None)

    def _dequantized(self, columns: slice) -> torch.Tensor:
        weight = self.weight[columns]
        w = torch.empty(weight.shape, dtype=self.compute, device=weight.device)
        self._fold(weight, _cut(self._scale, columns), w, _RANGE)
        return w

    def _piece(
        self,
        out: torch.Tensor,
        a: torch.Tensor,
        row_scale: torch.Tensor | None,
        w: torch.Tensor,
        columns: slice,
    ) -> None:
        if not self._direct:
            acc = self.entry.wide(a, w)
            if self.bias is not None:
                torch.add(self.bias[:, columns], acc, alpha=self._alpha, out=acc)
            elif self._alpha != 1:
                acc.mul_(self._alpha)
            out.copy_(acc)
        elif self._in_gemm is None:
            torch.addmm(out, a, w.t(), beta=0, alpha=self._alpha, out=out)
        else:
            torch.addmm(self._in_gemm[columns], a, w.t(), alpha=self._alpha, out=out)
        bias = None if self._bias is None else self._bias[columns]
        scale = _cut(self._scale, columns)
        self._unfit(a, self.weight[columns], scale, bias, out, 1 / self.rotation, _LIMITS)


def _cut(scale: torch.Tensor, columns: slice) -> torch.Tensor:
    return scale if scale.numel() == 1 else scale[columns]
