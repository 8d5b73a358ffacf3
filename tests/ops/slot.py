"""Calls of the GEMM slot on the CPU, and a stock function that computes exactly and remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from tests import reference

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = {code: dtype for dtype, code in CODES.items()}
STREAM = 0


@dataclass(frozen=True)
class Call:
    """The tensors of one call, in the order of stock's parameters; an empty bias is none."""

    a: torch.Tensor
    b: torch.Tensor
    xs: torch.Tensor
    ws: torch.Tensor
    bias: torch.Tensor
    d: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.a, self.b, self.xs, self.ws, self.bias, self.d

    def arguments(self) -> list[Any]:
        """Fresh capsules, the code of the output dtype and a stream."""
        return [*map(to_dlpack, self.tensors), CODES.get(self.d.dtype, 0), STREAM]

    def expected(self) -> torch.Tensor:
        """The exact result, as a GPU rounds it."""
        bias = self.bias if self.bias.numel() else None
        return reference.gemm(self.a, self.b, self.xs, self.ws, bias, self.d.dtype)

    def is_exact(self) -> bool:
        """Whether d holds, bit by bit, the exact result."""
        return torch.equal(reference.bits(self.d), reference.bits(self.expected()))


def make_call(m: int = 5, n: int = 16, k: int = 32, **changes: Any) -> Call:
    """A well-formed call without bias, float32 output, poisoned d; scales are powers of two.

    So every way to round gives the same result: who computed it is for the stock to tell.
    """
    generator = torch.Generator().manual_seed(m * 1009 + n * 31 + k)
    call = Call(
        torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator),
        torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator),
        2.0 ** torch.randint(-8, -3, (m, 1), generator=generator),
        2.0 ** torch.randint(-8, -3, (n,), generator=generator),
        torch.empty(0),
        torch.full((m, n), torch.nan),
    )
    return dataclasses.replace(call, **changes)


@dataclass
class RecordingStock:
    """Stands in for stock where the real one has no code: it takes capsules of CPU tensors.

    Like the real one it opens each capsule itself, so that a spent one fails here.
    """

    result: bool = True
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        self.calls.append(args)
        if kwargs or len(args) != 8:
            raise TypeError("incompatible function arguments")
        if self.result:
            self._compute(args)
        return self.result

    def _compute(self, args: Sequence[Any]) -> None:
        a, b, xs, ws, bias, d = map(from_dlpack, args[:6])
        d.copy_(reference.gemm(a, b, xs, ws, bias if bias.numel() else None, DTYPES[args[6]]))
