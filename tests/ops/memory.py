"""Tensors on memory that only an address is known of."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from ck_patch.kernels.launch import Operands


def at(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The memory there, not a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.ctypeslib.as_array((ctypes.c_byte * size).from_address(address))
    return torch.from_numpy(memory).view(dtype).view(*shape)


def operands_at(addresses: Sequence[int], like: Operands) -> Operands:
    """The operands there, of a call of the same shape."""
    given = [like.a, like.b, like.x_scale, like.w_scale, like.bias, like.d]
    if like.residual is not None:
        given += [like.residual, like.residual_scale]
    return Operands(
        *(
            None if one is None else at(address, one.shape, one.dtype)  # type: ignore[arg-type]
            for address, one in zip(addresses, given, strict=True)
        )
    )
