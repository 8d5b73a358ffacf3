"""The INT8 GEMM with fused dequantization that loads through TMA descriptors (sm_90 and newer).

Computes what kernels.int8_gemm computes. The copy engine fetches whole tiles without registers for
addresses, so that two programs of 128x128 share an SM and one's epilogue hides behind the other's
main loop; it also reads zeros beyond the edge, so that no load needs a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ck_patch.kernels._blocks import epilogue, grouped_tile, half, store_tile
from ck_patch.kernels.launch import Gemm


@triton.jit(do_not_specialize=["M", "N8", "K16"])
def _int8_gemm_dequant_tma_kernel(
    a_desc,
    b_desc,
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
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k0 in range(0, K, BLOCK_K):
        a = a_desc.load([m0, k0])
        b = b_desc.load([n0, k0])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)

    store_tile(
        acc,
        x_scale_ptr,
        w_scale_ptr,
        bias_ptr,
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


@triton.jit(do_not_specialize=["M", "N8", "K16"])
def _int8_gemm_dequant_persistent_kernel(
    a_desc,
    b_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    d_desc,
    residual_ptr,
    residual_scale_ptr,
    M,
    N8,
    K16,
    ROUNDING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    N = N8 * 8
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_steps = tl.cdiv(K16 * 16, BLOCK_K)
    # One loop over tiles and K steps: the loads of the next tile start before this one is stored.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        m0 = tile_m * BLOCK_M
        n0 = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for step in range(k_steps):
            a = a_desc.load([m0, step * BLOCK_K])
            b = b_desc.load([n0, step * BLOCK_K])
            acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)

        m = tl.arange(0, BLOCK_M)
        in_m = m < M - m0
        x_scale = tl.load(x_scale_ptr + m0 + m, mask=in_m, other=0.0)
        rows = m0.to(tl.int64) * N + m.to(tl.int64) * N
        # Half a tile at a time: the staging buffer of a whole one would cost a pipeline stage.
        for index in tl.static_range(2):
            n1 = n0 + index * (BLOCK_N // 2)
            out = epilogue(
                half(acc, index),
                x_scale,
                w_scale_ptr,
                bias_ptr,
                residual_ptr,
                residual_scale_ptr,
                rows,
                in_m,
                n1 + tl.arange(0, BLOCK_N // 2),
                N,
                ROUNDING,
                HAS_BIAS,
                HAS_RESIDUAL,
                d_desc.dtype,
            )
            d_desc.store([m0, n1], out)


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    height, width = tensor.shape
    return TensorDescriptor(tensor, [height, width], [width, 1], [rows, columns])


class TmaGemm(Gemm):
    """Launches `_int8_gemm_dequant_tma_kernel`, one program per tile."""

    kernel = _int8_gemm_dequant_tma_kernel

    def operands(self, tensors: Sequence[Any], pointers: Sequence[Any]) -> Sequence[Any]:
        return (
            _descriptor(tensors[0], self.config.block_m, self.config.block_k),
            _descriptor(tensors[1], self.config.block_n, self.config.block_k),
            *pointers[2:],
        )


class PersistentGemm(TmaGemm):
    """Launches `_int8_gemm_dequant_persistent_kernel`, one program per SM."""

    kernel = _int8_gemm_dequant_persistent_kernel

    def programs(self, m: int, n: int) -> int:
        return min(self.sm_count, self.config.tiles(m, n))

    def operands(self, tensors: Sequence[Any], pointers: Sequence[Any]) -> Sequence[Any]:
        d = _descriptor(tensors[5], self.config.block_m, self.config.block_n // 2)
        a, b, x_scale, w_scale, bias, _, *residual = super().operands(tensors, pointers)
        return a, b, x_scale, w_scale, bias, d, *residual

    def constants(self, k: int) -> tuple[int, ...]:
        return self.sm_count, *self.config.blocks
