"""The contract of the INT8 GEMM: which tensors stock takes, and what of them a plan depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ck_patch.kernels.launch import Operands

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

PlanKey = tuple[int, int, int, int, torch.dtype, torch.dtype | None, bool]
"""Device, M, N, K, output dtype, bias dtype, and whether there is a residual."""


def plan_key(tensors: Sequence[torch.Tensor], code: int) -> PlanKey | None:
    """What the plan of a call depends on; None unless the call keeps stock's contract to the
    letter, for stock answers the others itself.

    The tensors are such as capsules open to: of no subclass, without gradient or negative bit, and
    where they have no device index, on the CPU. This runs at every call: each fact is read once, by
    what is cheapest.
    """
    a, b, xs, ws, bias, d = tensors[:6]
    a_shape, b_shape = a.shape, b.shape
    if len(a_shape) != 2 or len(b_shape) != 2:
        return None
    m, k = a_shape
    n = b_shape[0]
    device, out_dtype, bias_dtype, biases = a.get_device(), d.dtype, bias.dtype, bias.numel()
    if not (
        b_shape[1] == k
        and d.shape == (m, n)
        # How a vector is shaped is all the same.
        and xs.numel() == m
        and ws.numel() == n
        and (biases == n or not biases)
        and a.dtype is b.dtype is torch.int8
        and xs.dtype is ws.dtype is torch.float32
        and CODES.get(out_dtype) == code
        and bias_dtype in DTYPE_NAMES
        and device == b.get_device() == xs.get_device() == ws.get_device()
        and device == bias.get_device() == d.get_device()
        and a.is_contiguous()
        and b.is_contiguous()
        and xs.is_contiguous()
        and ws.is_contiguous()
        and bias.is_contiguous()
        and d.is_contiguous()
    ):
        return None
    residual = len(tensors) > 6
    if residual and not _fits_residual(tensors[6], tensors[7], d):
        return None
    return device, m, n, k, out_dtype, bias_dtype if biases else None, residual


def _fits_residual(addend: torch.Tensor, scale: torch.Tensor, d: torch.Tensor) -> bool:
    return (
        addend.shape == d.shape
        and scale.numel() == d.shape[1]
        and addend.dtype == scale.dtype == d.dtype
        and addend.get_device() == scale.get_device() == d.get_device()
        and addend.is_contiguous()
        and scale.is_contiguous()
    )


def operands(tensors: Sequence[torch.Tensor]) -> Operands:
    a, b, xs, ws, bias, d, *residual = tensors
    return Operands(a, b, xs, ws, bias if bias.numel() else None, d, *residual)


def misaligned(addresses: Iterable[int]) -> int:
    """Non-zero unless every tensor starts on 16 bytes, as vector loads and the copy engine need;
    an empty bias starts at zero."""
    bits = 0
    for address in addresses:
        bits |= address
    return bits & 15
