"""The operands of one INT8 GEMM, and launching a compiled kernel on them at little host cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ck_patch.kernels.replay import Replay, replay
from ck_patch.tiles import TileConfig


@dataclass(frozen=True)
class Operands:
    """One call `d = a @ b.T`, dequantized: contiguous tensors of one device, 16-byte aligned.

    a int8 [M, K]; b int8 [N, K]; x_scale float32, M values; w_scale float32, N values; bias N
    values of float32, float16 or bfloat16, or None; d [M, N] of one of the same, written in place.
    K is a multiple of 16 and N one of 8. With a residual [M, N] and its scale, N values, both of
    the dtype of d, what is written is `residual + residual_scale * (a @ b.T + bias)`.
    """

    a: torch.Tensor
    b: torch.Tensor
    x_scale: torch.Tensor
    w_scale: torch.Tensor
    bias: torch.Tensor | None
    d: torch.Tensor
    residual: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None

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
        residual = None if self.residual is None else self.residual[first:last]
        return replace(self, a=self.a[first:last], x_scale=x_scale, d=out, residual=residual)


Rounding = Literal["cutlass", "triton", "eager"]
"""Which stock kernel's order of operations the epilogue keeps; see `_blocks.dequantize`."""


class Gemm:
    """One tile configuration of one kernel, for one device, one set of dtypes and one `variant`,
    with a bias or without, with a residual or without.

    `compile` goes through Triton's dispatcher, which inspects every argument at every call. What
    `bind` returns launches the compiled kernel itself, with addresses for tensors, which the
    launcher takes as they are. That is sound because nothing else about the arguments may vary: no
    integer is specialised on, and `Operands` are aligned.
    """

    kernel: ClassVar[Any]

    def __init__(self, config: TileConfig, rounding: Rounding = "cutlass") -> None:
        self.config = config
        self.rounding = rounding
        self._compiled: Any = None

    @classmethod
    def variant(cls, config: TileConfig, k: int) -> object:
        """What besides device and dtypes selects a binary; calls of one Gemm must agree on it."""
        return None

    def operands(self, tensors: Sequence[Any], pointers: Sequence[Any]) -> Sequence[Any]:
        """The kernel's leading arguments, from tensors and from what stands for their addresses:
        six, or eight with a residual."""
        return pointers

    def constants(self, k: int) -> tuple[int, ...]:
        """The kernel's constexpr arguments after HAS_RESIDUAL."""
        return self.config.blocks

    def _sizes(self, call: Operands) -> tuple[object, ...]:
        flags = (self.rounding, call.bias is not None, call.residual is not None)
        return call.m, call.n // 8, call.k // 16, *flags, *self.constants(call.k)

    def run(self, call: Operands) -> None:
        """Compile if need be and run on the current stream of the current device."""
        # The kernel reads no operand that a call does not have, but every pointer needs a value.
        tensors = (
            call.a,
            call.b,
            call.x_scale,
            call.w_scale,
            call.w_scale if call.bias is None else call.bias,
            call.d,
            call.d if call.residual is None else call.residual,
            call.d if call.residual_scale is None else call.residual_scale,
        )
        # Triton's interpreter compiles nothing and returns None.
        self._compiled = self.kernel[self.config.tiles(call.m, call.n), 1, 1](
            *self.operands(tensors, tensors),
            *self._sizes(call),
            num_warps=self.config.num_warps,
            num_stages=self.config.num_stages,
            # `dequantize` says which operations are fused.
            enable_fp_fusion=False,
        )

    def bind(self, call: Operands) -> Replay:
        """The launch of calls of the same shape; `run` must have compiled the kernel.

        It takes the addresses of a, b, x_scale, w_scale, bias (any where there is none), d and,
        with a residual, that and its scale.
        """
        absent = () if call.residual is not None else (0, 0)
        fixed = (*absent, *self._sizes(call))
        programs = self.config.tiles(call.m, call.n)
        launch = replay(self._compiled, programs, 8 - len(absent), fixed)
        if type(self).operands is Gemm.operands:
            return launch
        operands = self.operands
        a, b = ((tensor.dtype, tensor.shape) for tensor in (call.a, call.b))

        def launch_with_descriptors(pointers: Sequence[int], stream: int) -> None:
            described = (_At(pointers[0], *a), _At(pointers[1], *b))
            launch(operands(described, pointers), stream)

        return launch_with_descriptors


class _At(NamedTuple):
    """A tensor as far as a descriptor asks for one."""

    address: int
    dtype: torch.dtype
    shape: torch.Size

    def data_ptr(self) -> int:
        return self.address
