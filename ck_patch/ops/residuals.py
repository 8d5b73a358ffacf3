"""How a residual enters stock's CUDA `int8_linear`: in the GEMM's epilogue, or after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ck_patch.ops.gemm_contract import CODES

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Residual:
    """`values + scale * out` for an output [M, N]; the values are M*N in any shape."""

    values: torch.Tensor
    scale: torch.Tensor
    in_epilogue: bool
    """Whether stock's GEMM adds it. Both are of the output's dtype then, the scale has N values."""

    def operands(self, host: Any, m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [M, N] and scale as the GEMM reads them, both starting on 16 bytes."""
        values, scale = self.values.reshape(m, n).contiguous(), self.scale
        scale = host._gemm_vector_arg(scale, values.device, values.dtype)
        return values.detach(), scale.detach()

    def added(self, host: Any, out: torch.Tensor) -> torch.Tensor:
        """The sum for out [M, N], by the host's own function; raises what that does, for a scale
        that does not fit for instance."""
        found: torch.Tensor = host._apply_residual(out, self.values.reshape(out.shape), self.scale)
        return found


def plain_residual(
    values: Any, scale: Any, device: int, m: int, n: int, out_dtype: torch.dtype
) -> Residual | None:
    """The residual of a call, or None where that is stock's: without a scale, which stock refuses,
    and with anything but plain tensors, the one of M*N values."""
    if not (is_plain(values, device) and is_plain(scale, device)) or values.numel() != m * n:
        return None
    if values.dtype != out_dtype or scale.dtype != out_dtype or _stays_misaligned(values):
        return Residual(values, scale, in_epilogue=False)
    # Another number of values is for the entry to refuse.
    return Residual(values, scale, in_epilogue=True) if scale.numel() == n else None


def is_plain(operand: Any, device: int) -> bool:
    """Whether an operand beside x and weight is a tensor like any other, of that device."""
    return (
        type(operand) in _PLAIN
        and operand.dtype in CODES
        and operand.get_device() == device
        # Their memory holds the values with the other sign, or there is none.
        and not (operand.is_neg() or operand._is_zerotensor())
    )


def _stays_misaligned(values: torch.Tensor) -> bool:
    """What is not contiguous is copied, and copies are aligned."""
    return values.is_contiguous() and values.data_ptr() % 16 != 0
