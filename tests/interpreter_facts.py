"""Asks Triton's interpreter what it can do and how it rounds; both changed between releases."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tests.reference import Rounding


@triton.jit
def _rounding_kernel(fma_ptr, cast_ptr):  # type: ignore[no-untyped-def]
    # (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24, whose last term is lost if the product is rounded.
    x = tl.load(fma_ptr)
    tl.store(fma_ptr, tl.fma(x, x, x * 0.0 - 1.0))
    tl.store(cast_ptr, x.to(cast_ptr.dtype.element_ty))


@triton.jit
def _loop_kernel(out_ptr, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        tl.store(out_ptr + i, 1.0)


@functools.cache
def interpreter_rounding() -> Rounding:
    """How the interpreter of this process rounds, which is not the GPU's way.

    Triton 3.6 interprets an FMA as two operations, 3.9 as one; both cut float32 off to bfloat16
    (which also spoils subnormal results, so that tests keep bfloat16 outputs normal).
    """
    fused = torch.tensor([1 + 2.0**-12])
    _rounding_kernel[(1,)](fused, torch.empty(1))
    cast = torch.empty(1, dtype=torch.bfloat16)
    _rounding_kernel[(1,)](torch.tensor([1 + 0.75 * 2.0**-7]), cast)
    return Rounding(fused=fused.item() != 2.0**-11, truncates_bfloat16=cast.item() == 1.0)


@functools.cache
def interpreter_fault() -> str | None:
    """Why the interpreter of this process cannot run a loop, or None.

    That of Triton 3.6 makes an int of an array of one element, which numpy 2.4 refuses.
    """
    out = torch.zeros(2)
    try:
        _loop_kernel[(1,)](out, 2)
    except Exception as error:
        return f"Triton {triton.__version__} cannot interpret a loop: {error}"
    return None if out.eq(1).all() else f"Triton {triton.__version__} interprets a loop wrongly"
