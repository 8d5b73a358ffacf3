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

from ck_patch.kernels._blocks import grouped_tile, load_scales, store_tile
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
    x_scale, w_scale, bias = load_scales(
        x_scale_ptr, w_scale_ptr, bias_ptr, m0, n0, M, N, HAS_BIAS, BLOCK_M, BLOCK_N
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for k0 in range(0, K, BLOCK_K):
        a = a_desc.load([m0, k0])
        b = b_desc.load([n0, k0])
        acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)

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
