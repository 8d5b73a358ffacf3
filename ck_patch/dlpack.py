"""DLPack capsules to tensors and back: the one place that opens or makes a capsule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# What torch.utils.dlpack calls for a capsule; the functions there add a microsecond to each.
from torch._C import _from_dlpack as from_dlpack
from torch._C import _to_dlpack as to_dlpack

_Capsule = type(to_dlpack(torch.empty(0)))


def open_capsules(values: Sequence[object]) -> list[object]:
    """Each capsule as a tensor on the same memory; what is no capsule, or cannot be opened, as is.

    A capsule opens once: whatever is called with the same values afterwards needs `renewed` ones.
    """
    opened = []
    for value in values:
        if type(value) is _Capsule:
            try:
                # Unlike torch.from_dlpack on a tensor this never synchronizes streams.
                value = from_dlpack(value)
            except (RuntimeError, BufferError, TypeError, ValueError):
                # Spent, or of a device or dtype torch does not know: stock will say which.
                pass
        opened.append(value)
    return opened


def renewed(values: Sequence[object], opened: Sequence[object]) -> list[object]:
    """`values` once more, with a fresh capsule for each one that was opened."""
    return [
        to_dlpack(tensor) if tensor is not value and isinstance(tensor, torch.Tensor) else value
        for value, tensor in zip(values, opened, strict=True)
    ]
