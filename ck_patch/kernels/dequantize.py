"""The dequantized weight: out[n, k] = w[n, k] * (scale[n] * factor), rounded once, from float32.

w int8 [N, K]; scale float32, 1 or N values; out float16 or bfloat16 [N, K].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 4
_BLOCK_K = 1024
_WARPS = 8


@triton.jit(do_not_specialize=["N", "K_UNITS"])
def _dequantize_kernel(
    w_ptr,
    scale_ptr,
    out_ptr,
    N,
    K_UNITS,
    UNIT: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """One program dequantizes ROWS x BLOCK_K values of N x (K_UNITS * UNIT)."""
    K = K_UNITS * UNIT
    blocks = tl.cdiv(K, BLOCK_K)
    n0 = tl.program_id(0) // blocks * ROWS
    k0 = tl.program_id(0) % blocks * BLOCK_K
    n = tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)
    in_n = n < N - n0
    mask = in_n[:, None] & (k < K - k0)[None, :]
    # N * K may exceed 2^31.
    first = n0.to(tl.int64) * K + k0
    offsets = n.to(tl.int64)[:, None] * K + k[None, :]
    if PER_CHANNEL:
        scale = tl.load(scale_ptr + n0 + n, mask=in_n, other=0.0)[:, None]
    else:
        scale = tl.load(scale_ptr)
    w = tl.load(w_ptr + first + offsets, mask=mask, other=0).to(tl.float32)
    scale *= FACTOR
    tl.store(out_ptr + first + offsets, (w * scale).to(out_ptr.dtype.element_ty), mask=mask)


def constants(
    weight: torch.Tensor, scale: torch.Tensor, factor: float = 1.0
) -> tuple[int, bool, int, int, float]:
    """What besides dtypes and alignments selects the binary for a call."""
    k = weight.shape[1]
    unit = 16 if k % 16 == 0 else 1
    return unit, scale.numel() > 1, _ROWS, min(triton.next_power_of_2(k), _BLOCK_K), factor


def dequantize(
    weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, factor: float = 1.0
) -> None:
    """Write `out` on the current stream of the current device; compiles at the first call.

    weight int8 [N, K], scale float32 with 1 or N values, out float16 or bfloat16 [N, K]: all are
    contiguous and on one device, N and K positive; `factor` is a power of two. What leaves the
    range of the dtype becomes infinite: in float16 that takes a scale above 65504 / 127 = 515.
    """
    n, k = weight.shape
    unit, _, rows, block_k, _ = given = constants(weight, scale, factor)
    _dequantize_kernel[(triton.cdiv(n, rows) * triton.cdiv(k, block_k),)](
        weight, scale, out, n, k // unit, *given, num_warps=_WARPS
    )
