"""The INT8 GEMM with fused dequantization that loads through plain pointers: it runs everywhere.

y[m, n] = acc[m, n] * x_scale[m] * w_scale[n] + bias[n],  acc = sum over k of a[m, k] * b[n, k]
d[m, n] = y[m, n], or residual[m, n] + residual_scale[n] * y[m, n] with y rounded to the dtype of d

a int8 [M, K] and b int8 [N, K], acc int32, scales float32, bias and d float32, float16 or bfloat16,
residual and its scale of the dtype of d. `_blocks.dequantize` says how each ROUNDING rounds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ck_patch.kernels._blocks import grouped_tile, load_scales, store_tile
from ck_patch.kernels.launch import Gemm
from ck_patch.tiles import TileConfig

# Sizes that decide how wide a load or store may be arrive divided by what they are known to be a
# multiple of (K by 16, N by 8, see route). The compiler sees the factor, so that one binary serves
# every shape and a new resolution never compiles.


@triton.jit(do_not_specialize=["M", "N8", "K16"])
def _int8_gemm_dequant_kernel(
    a_ptr,
    b_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    d_ptr,
    residual_ptr,
    residual_scale_ptr,
    M,
    N8,
    K16,
    ROUNDING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    N = N8 * 8
    K = K16 * 16
    tile_m, tile_n = grouped_tile(
        tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M
    )
    m0 = tile_m * BLOCK_M
    n0 = tile_n * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_m = m < M - m0
    in_n = n < N - n0

    # M * K, N * K and M * N may exceed 2^31. The start of a tile is one 64-bit scalar; inside the
    # K loop the offsets are 32-bit, which BLOCK * K cannot exceed for K <= 131,071.
    a_ptrs = a_ptr + m0.to(tl.int64) * K + (m[:, None] * K + k[None, :])
    b_ptrs = b_ptr + n0.to(tl.int64) * K + (n[:, None] * K + k[None, :])
    if SCALES_FIRST:
        x_scale, w_scale, bias = load_scales(
            x_scale_ptr, w_scale_ptr, bias_ptr, m0, n0, M, N, HAS_BIAS, BLOCK_M, BLOCK_N
        )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k0 in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=in_m[:, None], other=0)
            b = tl.load(b_ptrs, mask=in_n[:, None], other=0)
        else:
            in_k = k < K - k0
            a = tl.load(a_ptrs, mask=in_m[:, None] & in_k[None, :], other=0)
            b = tl.load(b_ptrs, mask=in_n[:, None] & in_k[None, :], other=0)
        # Transposed here and not in the addresses: Triton 3.8 and newer would carry the operands of
        # an `mma.sync` loop from step to step byte by byte, at a third of the speed, but not of a
        # transposed view.
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K

    if not SCALES_FIRST:
        x_scale, w_scale, bias = load_scales(
            x_scale_ptr, w_scale_ptr, bias_ptr, m0, n0, M, N, HAS_BIAS, BLOCK_M, BLOCK_N
        )
    store_tile(
        acc,
        x_scale,
        w_scale,
        bias,
        d_ptr,
        residual_ptr,
        residual_scale_ptr,
        m0,
        n0,
        M,
        N,
        ROUNDING,
        HAS_BIAS,
        HAS_RESIDUAL,
    )


class PointerGemm(Gemm):
    """Launches `_int8_gemm_dequant_kernel`, one program per tile."""

    kernel = _int8_gemm_dequant_kernel

    @classmethod
    def variant(cls, config: TileConfig, k: int) -> object:
        return k % config.block_k == 0

    def constants(self, k: int) -> tuple[int, ...]:
        config = self.config
        return k % config.block_k == 0, config.scales_first, *config.blocks
