"""Drop-in for `backends.cuda._wrap_for_dlpack`: the same capsule for less host time.

comfy_kitchen exports every tensor of every call through it, nine for one `int8_linear`. Stock goes
through `Tensor.__dlpack__`, whose Python checks take most of its 2.3 us (measured beside an H200).
What is saved here goes most of the way to pay for the six capsules that the GEMM slot opens again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ck_patch.context import Function, OpContext
from ck_patch.dlpack import to_dlpack


class WrapForDlpack:
    """The op behind the slot.

    `function(tensor)` gives a DLPack capsule of a CUDA tensor without synchronizing streams. The
    checks are those that `Tensor.__dlpack__` makes for such a tensor; one that fails any of them,
    or that is not plain, goes to stock, which raises or detaches as it always did.
    """

    def __init__(self, stock: Function) -> None:
        self._active = True
        strided, plain = torch.strided, torch.Tensor
        # What torch.cuda.current_device() calls once CUDA is initialized, as it is for any CUDA
        # tensor; a CPU build of torch does not have it.
        current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

        # Not a wrapt.FunctionWrapper: calling one costs as much as is saved.
        @functools.wraps(stock)
        def wrap_for_dlpack(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                type(tensor) is plain
                and tensor.is_cuda
                and not tensor.requires_grad
                and tensor.layout is strided
                and not tensor.is_conj()
                # Stock refuses a tensor of another device: the kernels would run on the wrong one.
                and tensor.get_device() == current_device()
                and not args
                and not kwargs
                and self._active
            ):
                return to_dlpack(tensor)
            return stock(tensor, *args, **kwargs)

        self._function = wrap_for_dlpack

    @property
    def function(self) -> Function:
        """The function to install; signature and docstring are stock's."""
        return self._function

    def deactivate(self) -> None:
        """Pass every further call straight to stock."""
        self._active = False


def build(stock: Function, context: OpContext) -> WrapForDlpack:
    """Make the op that replaces `stock`."""
    return WrapForDlpack(stock)
