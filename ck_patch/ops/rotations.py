"""The ways in which stock's CUDA `int8_linear` rotates rows before it quantizes them."""

from __future__ import annotations

from typing import Any

import torch

# A process that meets more shapes than this asks anew.
_MAX_SHAPES = 4096


class Rotations:
    """Stock's choice and its steps, by the functions of `host`, the CUDA backend's module."""

    def __init__(self, host: Any) -> None:
        self._host = host
        # By device, rows, K and group size.
        self._in_one_kernel: dict[tuple[object, ...], bool] = {}

    def in_one_kernel(self, x: torch.Tensor, m: int, k: int, group: object) -> bool:
        """Whether stock activates, rotates and quantizes rows of x in one kernel.

        x has M rows of any shape; K is the width that they have once activated.
        """
        key = (x.get_device(), m, k, group)
        found = self._in_one_kernel.get(key)
        if found is None:
            if len(self._in_one_kernel) >= _MAX_SHAPES:
                self._in_one_kernel.clear()
            found = self._in_one_kernel[key] = (
                group == 256
                and k % 256 == 0
                and 256 <= k <= self._host._CONVROT_FUSED_MAX_K
                and self._host._convrot_fused_shared_memory_fits(x.reshape(m, -1), k, group)
            )
        return found

    def quantized(self, x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """q int8 [M, K] and the scales, float32 [M, 1], of x [M, K], rotated in another way.

        Raises what the host does, ValueError for a group size that it does not have.
        """
        host = self._host
        quantized: tuple[torch.Tensor, torch.Tensor]
        if host._should_use_convrot_fused_kernel(x, x.shape[1], group):
            quantized = host.quantize_int8_rowwise_convrot(x, group)
        else:
            h = host._build_hadamard(group, device=x.device, dtype=x.dtype)
            quantized = host.quantize_and_rotate_rowwise(x, h, group)
        return quantized
