"""Asks Triton's interpreter how it rounds: that changed between releases and is not the GPU's way.

Triton 3.6 interprets an FMA as two operations, 3.9 as one; both cut float32 off to bfloat16 (which
also spoils subnormal results, so that tests keep bfloat16 outputs normal).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from tests.reference import Rounding


@triton.jit
def _probe_kernel(fma_ptr, cast_ptr):  # type: ignore[no-untyped-def]
    # (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24, whose last term is lost if the product is rounded.
    x = tl.load(fma_ptr)
    tl.store(fma_ptr, tl.fma(x, x, x * 0.0 - 1.0))
    tl.store(cast_ptr, x.to(cast_ptr.dtype.element_ty))


@functools.cache
def interpreter_rounding() -> Rounding:
    """How the interpreter of this process rounds."""
    fused = torch.tensor([1 + 2.0**-12])
    _probe_kernel[(1,)](fused, torch.empty(1))
    cast = torch.empty(1, dtype=torch.bfloat16)
    _probe_kernel[(1,)](torch.tensor([1 + 0.75 * 2.0**-7]), cast)
    return Rounding(fused=fused.item() != 2.0**-11, truncates_bfloat16=cast.item() == 1.0)
