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


# The interpreter knows no inline assembly; what it computes keeps its subnormal numbers.
_COMPILED = tl.constexpr(isinstance(grouped_tile, triton.JITFunction))


@triton.jit
def dequantize(acc, x_scale, w_scale, bias, HAS_BIAS: tl.constexpr):
    """`acc * x_scale[m] * w_scale[n] + bias[n]` in float32, exactly as CUTLASS rounds it.

    The row scale comes first and the second product is fused with the addition of the bias. Each of
    the four other orders differs from stock in the last bit of float32 (measured on sm_90).
    Subnormal numbers are zero on the way in and out (`.ftz`): every multiplication in the epilogues
    of stock's binaries for sm_80, 90 and 120 is FMUL.FTZ or FFMA.FTZ. The launchers switch the
    compiler's own contraction off, so that only this FMA is one.
    """
    acc = acc.to(tl.float32)
    x_scale = tl.broadcast_to(x_scale[:, None], acc.shape)
    w_scale = tl.broadcast_to(w_scale[None, :], acc.shape)
    bias = tl.broadcast_to(bias[None, :], acc.shape)
    if _COMPILED:
        scaled = _multiply(acc, x_scale)
        if HAS_BIAS:
            return tl.inline_asm_elementwise(
                "fma.rn.ftz.f32 $0, $1, $2, $3;",
                "=f,f,f,f",
                [scaled, w_scale, bias],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            return _multiply(scaled, w_scale)
    else:
        scaled = acc * x_scale
        if HAS_BIAS:
            return tl.fma(scaled, w_scale, bias)
        else:
            return scaled * w_scale


@triton.jit
def _multiply(a, b):
    return tl.inline_asm_elementwise(
        "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )
