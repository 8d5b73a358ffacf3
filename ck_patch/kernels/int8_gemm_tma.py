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

from ck_patch.kernels._blocks import dequantize, grouped_tile
from ck_patch.kernels.launch import Gemm


@triton.jit(do_not_specialize=["M", "N8", "K16"])
def _int8_gemm_dequant_tma_kernel(
    a_desc,
    b_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    d_ptr,
    M,
    N8,
    K16,
    HAS_BIAS: tl.constexpr,
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

    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    in_m = m < M - m0
    in_n = n < N - n0
    x_scale = tl.load(x_scale_ptr + m0 + m, mask=in_m, other=0.0)
    w_scale = tl.load(w_scale_ptr + n0 + n, mask=in_n, other=0.0)
    bias = w_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n0 + n, mask=in_n, other=0.0).to(tl.float32)
    out = dequantize(acc, x_scale, w_scale, bias, HAS_BIAS)
    # M * N may exceed 2^31; descriptors count in elements per axis and never do.
    d_ptrs = d_ptr + (m0.to(tl.int64) * N + n0) + (m[:, None].to(tl.int64) * N + n[None, :])
    tl.store(d_ptrs, out.to(d_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def _store_half(
    acc,
    x_scale,
    w_scale_ptr,
    bias_ptr,
    d_desc,
    m0,
    n0,
    N,
    HAS_BIAS: tl.constexpr,
    HALF_N: tl.constexpr,
):
    n = n0 + tl.arange(0, HALF_N)
    w_scale = tl.load(w_scale_ptr + n, mask=n < N, other=0.0)
    bias = w_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    d_desc.store([m0, n0], dequantize(acc, x_scale, w_scale, bias, HAS_BIAS).to(d_desc.dtype))


@triton.jit(do_not_specialize=["M", "N8", "K16"])
def _int8_gemm_dequant_persistent_kernel(
    a_desc,
    b_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    d_desc,
    M,
    N8,
    K16,
    HAS_BIAS: tl.constexpr,
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

        m = m0 + tl.arange(0, BLOCK_M)
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
        # Half a tile at a time: the staging buffer of a whole one would cost a pipeline stage.
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _store_half(left, x_scale, w_scale_ptr, bias_ptr, d_desc, m0, n0, N, HAS_BIAS, BLOCK_N // 2)
        n1 = n0 + BLOCK_N // 2
        _store_half(
            right, x_scale, w_scale_ptr, bias_ptr, d_desc, m0, n1, N, HAS_BIAS, BLOCK_N // 2
        )


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
        return *super().operands(tensors, pointers)[:5], d

    def constants(self, k: int) -> tuple[int, ...]:
        return self.sm_count, *self.config.blocks
