"""Drop-in for `backends.cuda._wrap_for_dlpack`: the same capsule for less host time.

comfy_kitchen exports every tensor of every call through it, nine for one `int8_linear`. Stock goes
through `Tensor.__dlpack__`, whose Python checks take most of its 2.3 us (measured beside an H200).
What is saved here pays for the six capsules that the GEMM slot opens again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ck_patch.context import Function, Op, OpContext
from ck_patch.dlpack import to_dlpack


class WrapForDlpack(Op):
    """The op behind the slot.

    `function(tensor)` gives a DLPack capsule of a CUDA tensor without synchronizing streams. Of the
    checks that `Tensor.__dlpack__` makes those are left that `to_dlpack` does not; stock detaches a
    tensor that requires gradients, which is the same memory. Whatever fails a check, or is not
    plain, goes to stock, which raises as it always did.
    """

    def __init__(self, stock: Function) -> None:
        plain = torch.Tensor, torch.nn.Parameter
        # What torch.cuda.current_device() calls once CUDA is initialized, as it is for any CUDA
        # tensor; a CPU build of torch does not have it.
        current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

        # Not a wrapt.FunctionWrapper: calling one costs as much as is saved.
        @functools.wraps(stock)
        def wrap_for_dlpack(tensor: Any) -> Any:
            if (
                self._active
                and type(tensor) in plain
                # Below zero it is on the CPU. Stock refuses a tensor of another device: the kernels
                # would run on the wrong one.
                and (device := tensor.get_device()) >= 0
                and device == current_device()
                and not tensor.is_conj()
            ):
                try:
                    return to_dlpack(tensor)
                except Exception:
                    pass  # A layout or a dtype that no capsule has: stock will say.
            return stock(tensor)

        super().__init__(wrap_for_dlpack)


def build(stock: Function, context: OpContext) -> WrapForDlpack:
    """Make the op that replaces `stock`."""
    return WrapForDlpack(stock)
