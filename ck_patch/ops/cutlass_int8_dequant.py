"""Drop-in for `_C.cutlass_int8_dequant`: our GEMM where the policy says so, else stock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import wrapt

from ck_patch.context import Function, OpContext
from ck_patch.dlpack import open_capsules, renewed
from ck_patch.ops.gemm import Int8Gemm


class CutlassInt8Dequant:
    """The op behind the slot: opens the capsules and asks the GEMM, or hands the call to stock.

    Stock's contract, read from its wheels: capsules of the tensors that `Int8Gemm` describes, the
    code of the output's dtype, a raw CUDA stream. True means that `d` was written, False that the
    caller should use cuBLAS. Whatever is not exactly this goes to stock, which answers with its own
    error.
    """

    def __init__(self, stock: Function, context: OpContext) -> None:
        self._gemm = Int8Gemm("cutlass_int8_dequant", stock, context)
        self._active = True
        self._function = wrapt.FunctionWrapper(stock, self._call)

    @property
    def function(self) -> Function:
        """The wrapper to install: signature, name and docstring are stock's."""
        return cast(Function, self._function)

    def deactivate(self) -> None:
        """Pass every further call straight to stock."""
        self._active = False

    def _call(
        self, stock: Function, instance: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if (
            not (self._active and self._gemm.useful)
            or kwargs
            or len(args) != 8
            # Dynamo must not trace into the launch: the kernel would be its own, not ours.
            or torch.compiler.is_compiling()
        ):
            return stock(*args, **kwargs)
        opened = open_capsules(args[:6])
        if self._gemm.run(opened, args[6], args[7]):
            return True
        return stock(*renewed(args[:6], opened), *args[6:])


def build(stock: Function, context: OpContext) -> CutlassInt8Dequant:
    """Make the op that replaces `stock`."""
    return CutlassInt8Dequant(stock, context)
