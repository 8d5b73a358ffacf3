"""DLPack capsules to tensors and back: the one place that opens or makes a capsule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

# What torch.utils.dlpack calls for a tensor or a capsule, less the microsecond of its own checks.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def open_capsules(values: Sequence[object]) -> tuple[list[object], bool]:
    """Each capsule as a tensor on the same memory, and whether all were capsules; what is none, or
    cannot be opened, as it is.

    A capsule opens once: whatever is called with the same values afterwards needs `renewed` ones.
    """
    opened: list[object] = []
    complete = True
    for value in values:
        try:
            opened.append(from_dlpack(value))
        except (RuntimeError, BufferError, TypeError, ValueError):
            # No capsule, a spent one, or of a device or dtype torch does not know: stock will say.
            opened.append(value)
            complete = False
    return opened, complete


def renewed(values: Sequence[object], opened: Sequence[object]) -> list[object]:
    """`values` once more, with a fresh capsule for each one that was opened."""
    return [
        to_dlpack(tensor) if tensor is not value and isinstance(tensor, torch.Tensor) else value
        for value, tensor in zip(values, opened, strict=True)
    ]
