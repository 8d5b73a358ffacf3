"""The operands of one INT8 GEMM, and launching a compiled kernel on them at little host cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ck_patch.tiles import TileConfig


@dataclass(frozen=True)
class Operands:
    """One call `d = a @ b.T`, dequantized: contiguous tensors of one device, 16-byte aligned.

    a int8 [M, K]; b int8 [N, K]; x_scale float32, M values; w_scale float32, N values; bias N
    values of float32, float16 or bfloat16, or None; d [M, N] of one of the same, written in place.
    K is a multiple of 16 and N one of 8.
    """

    a: torch.Tensor
    b: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    d: torch.Tensor

    @property
    def m(self) -> int:
        return self.a.shape[0]

    @property
    def n(self) -> int:
        return self.b.shape[0]

    @property
    def k(self) -> int:
        return self.a.shape[1]

    def rows(self, first: int, last: int, out: torch.Tensor) -> Operands:
        """The same GEMM for the rows first to last (exclusive), written to `out`."""
        x_scale = self.x_scale.view(-1)[first:last]
        return Operands(self.a[first:last], self.b, x_scale, self.w_scale, self.bias, out)


Launch = Callable[[Sequence[torch.Tensor], Sequence[int], int], None]
"""Launches a bound GEMM on the tensors a, b, x_scale, w_scale, bias (any tensor where there is
none) and d, given once more as addresses, on a raw CUDA stream of the current device."""


class Gemm:
    """One tile configuration of one kernel, for one device, one set of dtypes and one `variant`.

    `compile` goes through Triton's dispatcher, which inspects every argument at every call. What
    `bind` returns launches the compiled kernel itself, with addresses for tensors, which the
    launcher takes as they are. That is sound because nothing else about the arguments may vary: no
    integer is specialised on, and `Operands` are aligned.
    """

    kernel: ClassVar[Any]

    def __init__(self, config: TileConfig, sm_count: int) -> None:
        self.config = config
        self.sm_count = sm_count
        self._compiled: Any = None

    @classmethod
    def variant(cls, config: TileConfig, k: int) -> object:
        """What besides device and dtypes selects a binary; calls of one Gemm must agree on it."""
        return None

    def programs(self, m: int, n: int) -> int:
        """Size of the grid."""
        return self.config.tiles(m, n)

    def operands(self, tensors: Sequence[Any], pointers: Sequence[Any]) -> Sequence[Any]:
        """The kernel's leading six arguments, from tensors and from what stands for their
        addresses."""
        return pointers

    def constants(self, k: int) -> tuple[int, ...]:
        """The kernel's constexpr arguments after HAS_BIAS."""
        return self.config.blocks

    def _sizes(self, call: Operands) -> tuple[int, ...]:
        has_bias = call.bias is not None
        return call.m, call.n // 8, call.k // 16, has_bias, *self.constants(call.k)

    def run(self, call: Operands) -> None:
        """Compile if need be and run on the current stream of the current device."""
        # The kernel never reads a bias it does not have, but every pointer needs a value.
        bias = call.w_scale if call.bias is None else call.bias
        tensors = (call.a, call.b, call.x_scale, call.w_scale, bias, call.d)
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = self.kernel[self.programs(call.m, call.n), 1, 1](
            *self.operands(tensors, tensors),
            *self._sizes(call),
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            # `dequantize` says which operations are fused.
            enable_fp_fusion=False,
        )

    def bind(self, call: Operands) -> Launch:
        """The launch of calls of the same shape; `run` must have compiled the kernel."""
        runner = self._compiled[self.programs(call.m, call.n), 1, 1]
        sizes = self._sizes(call)
        operands = self.operands

        def launch(tensors: Sequence[torch.Tensor], pointers: Sequence[int], stream: int) -> None:
            runner(*operands(tensors, pointers), *sizes, stream=stream)

        return launch
