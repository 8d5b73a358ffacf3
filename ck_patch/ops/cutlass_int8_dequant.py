"""Drop-ins for `_C.cutlass_int8_dequant` and its residual form: our GEMM, by policy, or stock."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import wrapt

from ck_patch.context import Function, Op, OpContext
from ck_patch.dlpack import open_capsules, renewed
from ck_patch.ops import references
from ck_patch.ops.gemm import Int8Gemm
from ck_patch.ops.watched import watched


class CutlassInt8Dequant(Op):
    """The op behind both slots: opens the capsules and asks the GEMM, or hands the call to stock.

    Stock's contract, read from its wheels: capsules of the tensors that `Int8Gemm` describes, the
    code of the output's dtype, a raw CUDA stream. `order` says where each of the GEMM's tensors is
    among the capsules. True means that `d` was written, False that the caller should use cuBLAS.
    Whatever is not exactly this goes to stock, which answers with its own error.
    """

    def __init__(
        self, operation: str, order: Sequence[int], stock: Function, context: OpContext
    ) -> None:
        self._gemm = Int8Gemm(operation, "cuda", references.cutlass(stock, context), context)
        self._count = len(order) + 2
        self._in_order: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*order)
        super().__init__(wrapt.FunctionWrapper(stock, self._call))

    def _call(
        self, stock: Function, instance: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if (
            not (self._active and self._gemm.useful)
            or kwargs
            or len(args) != self._count
            # A tracer must not see a launch, nor a transform miss one.
            or watched()
        ):
            return stock(*args, **kwargs)
        capsules, code, stream = args[:-2], args[-2], args[-1]
        opened, complete = open_capsules(capsules)
        if complete and self._gemm.run(self._in_order(opened), code, stream):
            return True
        with _device_of(opened):
            return stock(*renewed(capsules, opened), code, stream)


def _device_of(tensors: Sequence[Any]) -> AbstractContextManager[Any]:
    """Makes the one device of all tensors current. Stock launches on the one that is, and calls
    that ours takes elsewhere must not fail once they are stock's."""
    if torch.cuda.device_count() > 1:
        devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
        if len(devices) == 1 and (device := devices.pop()).type == "cuda":
            return torch.cuda.device(device)
    return contextlib.nullcontext()


def build(stock: Function, context: OpContext) -> CutlassInt8Dequant:
    """Make the op that replaces `_C.cutlass_int8_dequant`."""
    return CutlassInt8Dequant("cutlass_int8_dequant", range(6), stock, context)


def build_residual(stock: Function, context: OpContext) -> CutlassInt8Dequant:
    """Make the op that replaces `_C.cutlass_int8_dequant_residual`.

    Its capsules are a, b, xs, ws, bias, residual scale, residual and d.
    """
    order = (0, 1, 2, 3, 4, 7, 6, 5)
    return CutlassInt8Dequant("cutlass_int8_dequant_residual", order, stock, context)
