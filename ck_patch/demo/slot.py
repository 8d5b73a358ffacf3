"""Random operands for the GEMM slot, calling it as comfy_kitchen does, and an exact reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ck_patch.dlpack import to_dlpack

# The codes of comfy_kitchen's C functions.
_CODES: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
)

PROMISED_UNITS = 2.0
"""Three roundings of float32 and one to the output, each at most half a unit in the last place; a
whole one in Triton's interpreter, which truncates to bfloat16."""

_COLUMNS = 2048


@dataclass(frozen=True)
class Inputs:
    """a int8 [M, K], b int8 [N, K], x_scale float32 [M, 1], w_scale float32 [N], bias [N] or None,
    and the dtype of the output."""

    a: torch.Tensor
    b: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    out_dtype: torch.dtype

    @classmethod
    def random(
        cls,
        shape: tuple[int, int, int],
        out_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
        device: str,
    ) -> Inputs:
        """Operands that use all of int8, with outputs well inside the range of float16."""
        m, n, k = shape
        bias = None
        if bias_dtype is not None:
            bias = torch.randn(n, device=device).to(bias_dtype)
        return cls(
            torch.randint(-128, 128, (m, k), dtype=torch.int8, device=device),
            torch.randint(-128, 128, (n, k), dtype=torch.int8, device=device),
            torch.rand(m, 1, device=device) * 0.01 + 0.001,
            torch.rand(n, device=device) * 0.01 + 0.001,
            bias,
            out_dtype,
        )

    def output(self) -> torch.Tensor:
        """A new output, poisoned: what is not written shows as NaN."""
        shape = self.a.shape[0], self.b.shape[0]
        return torch.full(shape, torch.nan, dtype=self.out_dtype, device=self.a.device)

    def call(
        self,
        function: Callable[..., Any],
        d: torch.Tensor,
        stream: int,
        wrap: Callable[[torch.Tensor], Any] = to_dlpack,
    ) -> bool:
        """Call the slot's function as comfy_kitchen does, to write `d`; `wrap` makes a capsule."""
        bias = d.new_empty(0) if self.bias is None else self.bias
        tensors = (self.a, self.b, self.x_scale, self.w_scale, bias, d)
        return bool(function(*map(wrap, tensors), _CODES[self.out_dtype], stream))

    def units_off(self, d: torch.Tensor, rows: int) -> float:
        """The largest error in the first and last `rows` rows of `d`, in units in the last place of
        |acc * x_scale * w_scale| + |bias|; NaN where `d` has one.

        The reference is float64: exact for the accumulator, and near enough for the rest.
        """
        m = d.shape[0]
        index = torch.tensor(sorted({*range(min(rows, m)), *range(max(0, m - rows), m)}))
        index = index.to(d.device)
        errors = [self._errors(d, index, columns) for columns in self._parts()]
        return float(torch.stack(errors).amax())

    def _parts(self) -> Iterator[slice]:
        # float64 takes eight times the memory of int8.
        for first in range(0, self.b.shape[0], _COLUMNS):
            yield slice(first, first + _COLUMNS)

    def _errors(self, d: torch.Tensor, rows: torch.Tensor, columns: slice) -> torch.Tensor:
        acc = self.a[rows].double() @ self.b[columns].double().T
        product = acc * self.x_scale[rows].double() * self.w_scale[columns].double()
        bias = torch.zeros_like(product[0]) if self.bias is None else self.bias[columns].double()
        precision = torch.finfo(self.out_dtype)
        magnitude = (product.abs() + bias.abs()).clamp(min=precision.smallest_normal)
        error = (d[rows][:, columns].double() - (product + bias)).abs()
        return (error / (magnitude * precision.eps)).amax()
