"""The operands of one INT8 GEMM, and launching one compiled kernel on them at the least host cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ck_patch.tiles import TileConfig

Arguments = tuple[int, tuple[Any, ...]]
"""Number of programs, then a value for every parameter of the kernel, constexpr ones included."""


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


class Gemm:
    """One tile configuration of one kernel, for one device, one set of dtypes and one `variant`.

    The first call compiles through Triton's dispatcher. Further calls launch the compiled kernel
    itself, which skips the dispatcher's inspection of every argument. That is sound because nothing
    else about the arguments may vary: no integer is specialised on, and `Operands` are aligned.
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

    def arguments(self, call: Operands) -> Arguments:
        """Grid and kernel arguments of one call."""
        raise NotImplementedError

    def __call__(self, call: Operands, stream: int) -> None:
        """Run the GEMM on `stream`, a raw CUDA stream of the current device.

        For the first call it must be the current stream too: Triton's dispatcher takes no other.
        """
        programs, values = self.arguments(call)
        if self._compiled is not None:
            self._compiled[programs, 1, 1](*values, stream=stream)
            return
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = self.kernel[programs, 1, 1](
            *values,
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            # `dequantize` says which operations are fused.
            enable_fp_fusion=False,
        )
