"""The pieces every INT8 GEMM kernel shares: the order of its tiles and its epilogue."""

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
def epilogue(
    acc,
    x_scale,
    w_scale,
    bias,
    residual_ptr,
    residual_scale_ptr,
    rows,
    in_m,
    n,
    N,
    ROUNDING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The tile of d in DTYPE: the accumulator dequantized, with bias and residual where there are.

    `rows` are the 64-bit offsets of the tile's rows in d, `in_m` which of them exist, `n` the
    columns.
    """
    in_n = n < N
    if HAS_BIAS:
        if ROUNDING == "eager":
            bias = bias.to(DTYPE)
        bias = bias.to(tl.float32)
    elif HAS_RESIDUAL:
        # Stock's residual form has no variant without a bias: it adds zeros.
        bias = tl.zeros_like(w_scale)
    out = dequantize(acc, x_scale, w_scale, bias, ROUNDING, HAS_BIAS or HAS_RESIDUAL, DTYPE)
    if HAS_RESIDUAL:
        # Its tree of operations stores the sum with the bias in the dtype of the output.
        out = out.to(DTYPE).to(tl.float32)
        mask = in_m[:, None] & in_n[None, :]
        residual = tl.load(residual_ptr + (rows[:, None] + n[None, :]), mask=mask, other=0.0)
        residual_scale = tl.load(residual_scale_ptr + n, mask=in_n, other=0.0).to(tl.float32)
        residual_scale = tl.broadcast_to(residual_scale[None, :], out.shape)
        out = _fma_ftz(out, residual_scale, residual.to(tl.float32))
    return out.to(DTYPE)


@triton.jit
def load_scales(
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    m0,
    n0,
    M,
    N,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Row scales, column scales and bias of the tile that starts at [m0, n0]; without a bias
    something to pass on that is not read.

    A thread gets one or two values of each. Loaded before the K loop they are there when it ends.
    """
    in_m = tl.arange(0, BLOCK_M) < M - m0
    in_n = tl.arange(0, BLOCK_N) < N - n0
    x_scale = tl.load(x_scale_ptr + m0 + tl.arange(0, BLOCK_M), mask=in_m, other=0.0)
    w_scale = tl.load(w_scale_ptr + n0 + tl.arange(0, BLOCK_N), mask=in_n, other=0.0)
    bias = w_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n0 + tl.arange(0, BLOCK_N), mask=in_n, other=0.0)
    return x_scale, w_scale, bias


@triton.jit
def store_tile(
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
    ROUNDING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Store the tile of d that starts at [m0, n0] through pointers; scales and bias are those of
    `load_scales`."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    m = tl.arange(0, BLOCK_M)
    in_m = m < M - m0
    # M * N may exceed 2^31.
    start = m0.to(tl.int64) * N
    rows = m.to(tl.int64) * N
    # A residual takes as many registers as the tile, and float32 twice those of 16 bits: half of
    # the tile at a time does not spill.
    WIDE: tl.constexpr = d_ptr.dtype.element_ty == tl.float32
    PARTS: tl.constexpr = 2 if HAS_RESIDUAL or WIDE else 1
    PART_N: tl.constexpr = BLOCK_N // PARTS
    for index in tl.static_range(PARTS):
        part, part_w_scale, part_bias = acc, w_scale, bias
        if PARTS == 2:
            part = half(acc, index)
            part_w_scale = half_row(w_scale, index)
            part_bias = half_row(bias, index)
        n = n0 + index * PART_N + tl.arange(0, PART_N)
        out = epilogue(
            part,
            x_scale,
            part_w_scale,
            part_bias,
            residual_ptr + start,
            residual_scale_ptr,
            rows,
            in_m,
            n,
            N,
            ROUNDING,
            HAS_BIAS,
            HAS_RESIDUAL,
            d_ptr.dtype.element_ty,
        )
        mask = in_m[:, None] & (n < N)[None, :]
        tl.store(d_ptr + start + (rows[:, None] + n[None, :]), out, mask=mask)


@triton.jit
def half(tile, index: tl.constexpr):
    """The left (0) or right (1) half of a tile's columns."""
    halves = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    left, right = tl.split(tl.permute(halves, (0, 2, 1)))
    if index == 0:
        return left
    else:
        return right


@triton.jit
def half_row(row, index: tl.constexpr):
    """The first (0) or second (1) half of a vector."""
    first, second = tl.split(tl.trans(tl.reshape(row, (2, row.shape[0] // 2))))
    if index == 0:
        return first
    else:
        return second


@triton.jit
def dequantize(
    acc,
    x_scale,
    w_scale,
    bias,
    ROUNDING: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`acc * x_scale[m] * w_scale[n] + bias[n]` in float32, rounded as the replaced kernel does.

    `cutlass`: the row scale comes first and the second product is fused with the addition of the
    bias; each of the four other orders differs in the last bit of float32 (measured on sm_90).
    Subnormal numbers are zero on the way in and out (`.ftz`): every multiplication in the epilogues
    of stock's binaries for sm_80, 90 and 120 is FMUL.FTZ or FFMA.FTZ.
    `triton`: the product of the scales comes first, and Triton contracts the rest to one FMA.
    `eager`: the same product, but the sum is rounded to DTYPE before the bias is added, since each
    of torch's operations stores its result.
    The launchers switch the compiler's own contraction off, so that only what is said is fused.
    """
    acc = acc.to(tl.float32)
    x_scale = tl.broadcast_to(x_scale[:, None], acc.shape)
    w_scale = tl.broadcast_to(w_scale[None, :], acc.shape)
    bias = tl.broadcast_to(bias[None, :], acc.shape)
    if ROUNDING == "cutlass":
        scaled = _multiply_ftz(acc, x_scale)
        if HAS_BIAS:
            return _fma_ftz(scaled, w_scale, bias)
        else:
            return _multiply_ftz(scaled, w_scale)
    else:
        scale = x_scale * w_scale
        if HAS_BIAS:
            if ROUNDING == "triton":
                return tl.fma(acc, scale, bias)
            else:
                return (acc * scale).to(DTYPE).to(tl.float32) + bias
        else:
            return acc * scale


@triton.jit
def _multiply_ftz(a, b):
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return a * b


@triton.jit
def _fma_ftz(a, b, c):
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "fma.rn.ftz.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [a, b, c],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.fma(a, b, c)
