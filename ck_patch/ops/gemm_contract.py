"""The contract of the INT8 GEMM: which tensors stock takes, and what of them a plan depends on."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

from ck_patch.kernels.launch import Operands

OUT_DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
)
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
CODES = {dtype: code for code, dtype in OUT_DTYPES.items()}


def call_key(tensors: Sequence[Any], code: object, stream: object) -> tuple[object, ...] | None:
    """All that a plan depends on, addresses aside; None unless the types are those of the contract.

    The tensors are such as capsules open to: of no subclass, without gradient or negative bit. This
    runs at every call: plain reads, and everything that can be told from them is decided once per
    key.
    """
    if not type(code) is type(stream) is int:
        return None
    a, b, xs, ws, bias, d, *residual = tensors
    key = (
        code,
        a.shape,
        b.shape,
        d.shape,
        # How a vector is shaped is all the same.
        xs.numel(),
        ws.numel(),
        bias.numel(),
        a.dtype,
        b.dtype,
        xs.dtype,
        ws.dtype,
        bias.dtype,
        d.dtype,
        a.device,
        b.device,
        xs.device,
        ws.device,
        bias.device,
        d.device,
        a.is_contiguous()
        and b.is_contiguous()
        and xs.is_contiguous()
        and ws.is_contiguous()
        and bias.is_contiguous()
        and d.is_contiguous(),
    )
    if not residual:
        return key
    addend, scale = residual
    return (
        *key,
        addend.shape,
        scale.numel(),
        addend.dtype,
        scale.dtype,
        addend.device,
        scale.device,
        addend.is_contiguous() and scale.is_contiguous(),
    )


def well_formed(tensors: Sequence[torch.Tensor], code: object) -> bool:
    """Whether a call keeps stock's contract to the letter; stock answers the others itself."""
    a, b, xs, ws, bias, d, *residual = tensors
    if a.dim() != 2 or b.dim() != 2:
        return False
    m, k = a.shape
    n = b.shape[0]
    return (
        b.shape[1] == k
        and d.shape == (m, n)
        and xs.numel() == m
        and ws.numel() == n
        and bias.numel() in (0, n)
        and a.dtype == b.dtype == torch.int8
        and xs.dtype == ws.dtype == torch.float32
        and d.dtype == OUT_DTYPES.get(cast(int, code))
        and bias.dtype in DTYPE_NAMES
        and all(t.is_contiguous() and not t.is_neg() and t.device == a.device for t in tensors)
        and (not residual or _fits_residual(residual, d))
    )


def _fits_residual(residual: Sequence[torch.Tensor], d: torch.Tensor) -> bool:
    addend, scale = residual
    return (
        addend.shape == d.shape
        and scale.numel() == d.shape[1]
        and addend.dtype == scale.dtype == d.dtype
    )


def operands(tensors: Sequence[torch.Tensor]) -> Operands:
    a, b, xs, ws, bias, d, *residual = tensors
    return Operands(a, b, xs, ws, bias if bias.numel() else None, d, *residual)


def misaligned(pointers: Sequence[int]) -> int:
    """Non-zero unless every tensor starts on 16 bytes, as vector loads and the copy engine need;
    an empty bias starts at zero."""
    return functools.reduce(operator.or_, pointers) & 15
