"""The two pieces every INT8 GEMM kernel shares: the order of its tiles and its epilogue."""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of a tile when GROUP_M rows of tiles are walked column by column.

    Programs that run together then share GROUP_M row panels of A and few column panels of B, which
    stay in L2.
    """
    group = tile // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


@triton.jit
def dequantize(acc, x_scale, w_scale, bias, HAS_BIAS: tl.constexpr):
    """`acc * x_scale[m] * w_scale[n] + bias[n]` in float32, in the order CUTLASS rounds it.

    The row scale comes first and the second product is fused with the addition of the bias. Each of
    the four other orders differs from stock in the last bit of float32 (measured on sm_90). The
    launchers switch the compiler's own contraction off, so that only this FMA is one.
    """
    scaled = acc.to(tl.float32) * x_scale[:, None]
    if HAS_BIAS:
        w_scale = tl.broadcast_to(w_scale[None, :], scaled.shape)
        return tl.fma(scaled, w_scale, tl.broadcast_to(bias[None, :], scaled.shape))
    else:
        return scaled * w_scale[None, :]
