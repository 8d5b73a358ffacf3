"""DLPack capsules to tensors and back: the one place that opens or makes a capsule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What torch.utils.dlpack calls for a tensor or a capsule, less the microsecond of its own checks.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack

_Capsule = type(to_dlpack(torch.empty(0, device="cpu")))


def open_capsules(values: Sequence[object]) -> list[object]:
    """Each capsule as a tensor on the same memory; what is no capsule, or cannot be opened, as is.

    A capsule opens once: whatever is called with the same values afterwards needs `renewed` ones.
    """
    return [_open(value) if type(value) is _Capsule else value for value in values]


def _open(capsule: object) -> object:
    try:
        return from_dlpack(capsule)
    except (RuntimeError, BufferError, TypeError, ValueError):
        # Spent, or of a device or dtype torch does not know: stock will say which.
        return capsule


def renewed(values: Sequence[object], opened: Sequence[object]) -> list[object]:
    """`values` once more, with a fresh capsule for each one that was opened."""
    return [
        to_dlpack(tensor) if tensor is not value and isinstance(tensor, torch.Tensor) else value
        for value, tensor in zip(values, opened, strict=True)
    ]
