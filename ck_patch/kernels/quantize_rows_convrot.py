"""The rotating INT8 row quantizer: q[m] and scale[m] are those of `quantize_rows` on R(x[m]).

R rotates each 256 values of a row, in float32, by four stages of butterflies at strides 1, 4, 16
and 64. A butterfly takes (a, b, c, d) to half of (((a + b) + c) - d, ((a + b) - c) + d,
((a - b) + c) + d, ((b - a) + c) + d): each sum from left to right and each stage halved, with
subnormal numbers as zero, which is the order of stock's CUDA kernel, and shows in the result. The
largest magnitude of a row is that of R(x) in float32, while what is divided by the scale is R(x)
in the dtype of x.

x float32, float16 or bfloat16 [M, K], K a multiple of 256; q int8 [M, K]; scale float32 [M].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED
from ck_patch.kernels.quantize_rows import RowQuantizer, quantize, reciprocal_of, scales


@triton.jit(do_not_specialize=["GROUPS"])
def _quantize_rows_convrot_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    GROUPS,
    FINITE_MAX: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program quantizes one row of GROUPS * 256 values, in CHUNKS of CHUNK values, the last of
    which is FULL or not."""
    K = GROUPS * 256
    # M * K may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * K
    words_ptr = (q_ptr + row).to(tl.pointer_type(tl.int32))
    largest = tl.zeros([CHUNK // 16], tl.float32)
    scale_ptr += tl.program_id(0)
    _quantize_chunks(x_ptr + row, words_ptr, scale_ptr, K, largest, FINITE_MAX, CHUNK, CHUNKS, FULL)


@triton.jit
def _quantize_chunks(
    x_ptr,
    q_ptr,
    scale_ptr,
    left,
    largest,
    FINITE_MAX: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Quantize the `left` values of a row from x_ptr on; returns the reciprocal of the divisor.

    `largest` holds magnitudes of the chunks before. Each call keeps its own chunk in registers
    while the next one goes on to the end of the row, where the scale becomes known: x is read once.
    """
    WHOLE: tl.constexpr = FULL or CHUNKS > 1
    # Sixteen neighbours a thread: its quads, and quads of those, are the strides 1 and 4.
    x = _load_quads(x_ptr, left, CHUNK // 16, WHOLE)
    x = _rotate_across(_rotate_each(x))
    # Of (group, 16 places at strides 64 and 16, 16 at strides 4 and 1) the second comes last.
    x = tl.reshape(_join(x), [CHUNK // 256, 16, 16])
    x = _split(tl.reshape(tl.permute(x, [0, 2, 1]), [CHUNK]))
    a, b, c, d = _butterfly(x)
    x = _rotate_each((_split(a), _split(b), _split(c), _split(d)))

    a, b, c, d = x
    highest = tl.maximum(tl.maximum(_highest(a), _highest(b)), tl.maximum(_highest(c), _highest(d)))
    largest = tl.maximum(largest, highest)
    if CHUNKS > 1:
        inverse = _quantize_chunks(
            x_ptr + CHUNK,
            q_ptr + CHUNK // 4,
            scale_ptr,
            left - CHUNK,
            largest,
            FINITE_MAX,
            CHUNK,
            CHUNKS - 1,
            FULL,
        )
    else:
        DTYPE: tl.constexpr = x_ptr.dtype.element_ty
        scale, divisor, _, _ = scales(tl.max(largest, axis=0), DTYPE, False, FINITE_MAX, 0.0)
        tl.store(scale_ptr, scale)
        inverse = reciprocal_of(divisor, False)
    _store_bytes(q_ptr, x, inverse, left, x_ptr.dtype.element_ty, CHUNK, WHOLE)
    return inverse


@triton.jit
def _load_quads(x_ptr, left, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """Sixteen neighbours for each of ROWS threads: four quads of float32 tensors [ROWS]."""
    # What one load brings must be one piece of 16 bytes a thread.
    if x_ptr.dtype.element_ty.primitive_bitwidth == 32:
        k = tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 4)[None, :]
        mask = (k < left) | WHOLE
        p = _split(tl.load(x_ptr + k, mask=mask, other=0.0))
        q = _split(tl.load(x_ptr + 4 + k, mask=mask, other=0.0))
        r = _split(tl.load(x_ptr + 8 + k, mask=mask, other=0.0))
        s = _split(tl.load(x_ptr + 12 + k, mask=mask, other=0.0))
    else:
        k = tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 8)[None, :]
        mask = (k < left) | WHOLE
        p, q = _split_eight(tl.load(x_ptr + k, mask=mask, other=0.0).to(tl.float32))
        r, s = _split_eight(tl.load(x_ptr + 8 + k, mask=mask, other=0.0).to(tl.float32))
    return p, q, r, s


@triton.jit
def _split(x):
    """Every fourth element from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _split_eight(x):
    left, right = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, 4]), [0, 2, 1]))
    return _split(left), _split(right)


@triton.jit
def _join(x):
    """The one tensor whose elements the quads of x hold in turn: undoes two times `_split`."""
    p, q, r, s = x
    return _join_four((_join_four(p), _join_four(q), _join_four(r), _join_four(s)))


@triton.jit
def _join_four(x):
    a, b, c, d = x
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.numel])


@triton.jit
def _rotate_each(x):
    """A butterfly within each quad."""
    p, q, r, s = x
    return _butterfly(p), _butterfly(q), _butterfly(r), _butterfly(s)


@triton.jit
def _rotate_across(x):
    """A butterfly across the four quads at each place, and the quads and places exchanged."""
    p, q, r, s = x
    a0, b0, c0, d0 = p
    a1, b1, c1, d1 = q
    a2, b2, c2, d2 = r
    a3, b3, c3, d3 = s
    return (
        _butterfly((a0, a1, a2, a3)),
        _butterfly((b0, b1, b2, b3)),
        _butterfly((c0, c1, c2, c3)),
        _butterfly((d0, d1, d2, d3)),
    )


@triton.jit
def _butterfly(x):
    a, b, c, d = x
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 sum, difference, w, x, y, z;
            add.ftz.f32 sum, $4, $5;
            sub.ftz.f32 difference, $4, $5;
            add.ftz.f32 w, sum, $6;
            sub.ftz.f32 w, w, $7;
            sub.ftz.f32 x, sum, $6;
            add.ftz.f32 x, x, $7;
            add.ftz.f32 y, difference, $6;
            add.ftz.f32 y, y, $7;
            sub.ftz.f32 z, $6, difference;
            add.ftz.f32 z, z, $7;
            mul.ftz.f32 $0, w, 0f3F000000;
            mul.ftz.f32 $1, x, 0f3F000000;
            mul.ftz.f32 $2, y, 0f3F000000;
            mul.ftz.f32 $3, z, 0f3F000000;
            }""",
            "=f,=f,=f,=f,f,f,f,f",
            [a, b, c, d],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        total = a + b
        difference = a - b
        return (
            ((total + c) - d) * 0.5,
            ((total - c) + d) * 0.5,
            ((difference + c) + d) * 0.5,
            ((c - difference) + d) * 0.5,
        )


@triton.jit
def _highest(x):
    a, b, c, d = x
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _store_bytes(
    q_ptr, x, inverse, left, DTYPE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr
):
    """Quantize and store what lies, as after the last stage, by stride 16 in four quads by stride
    64; q_ptr points to words of four bytes."""
    p, q, r, s = x
    p, q = _quantize(p, inverse, DTYPE), _quantize(q, inverse, DTYPE)
    r, s = _quantize(r, inverse, DTYPE), _quantize(s, inverse, DTYPE)
    # Back to neighbours in one exchange of 64-bit words, half as many as of 32.
    low = _pair(p, r)
    high = _pair(q, s)
    words = tl.permute(tl.reshape(tl.join(low, high), [CHUNK // 256, 16, 2]), [0, 2, 1])
    a, b, c, d = _split(tl.reshape(words, [CHUNK // 8]))

    n = tl.arange(0, CHUNK // 32)
    at = n // 8 * 64 + n % 8
    mask = (at * 4 < left) | WHOLE
    _store_words(q_ptr + at, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32), mask)
    a, b, c, d = a >> 32, b >> 32, c >> 32, d >> 32
    at += 8
    _store_words(q_ptr + at, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32), mask)


@triton.jit
def _pair(low, high):
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _store_words(q_ptr, a, b, c, d, mask):
    """Store the first bytes of four words as one word, the second ones 16 words on, and so on."""
    if _COMPILED:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, s, t;
            prmt.b32 p, $4, $5, 0x5140;
            prmt.b32 q, $6, $7, 0x5140;
            prmt.b32 s, $4, $5, 0x7362;
            prmt.b32 t, $6, $7, 0x7362;
            prmt.b32 $0, p, q, 0x5410;
            prmt.b32 $1, p, q, 0x7632;
            prmt.b32 $2, s, t, 0x5410;
            prmt.b32 $3, s, t, 0x7632;
            }""",
            "=r,=r,=r,=r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b, c, d = (
            _word(a, b, c, d),
            _word(a >> 8, b >> 8, c >> 8, d >> 8),
            _word(a >> 16, b >> 16, c >> 16, d >> 16),
            _word(a >> 24, b >> 24, c >> 24, d >> 24),
        )
    tl.store(q_ptr, a, mask=mask)
    tl.store(q_ptr + 16, b, mask=mask)
    tl.store(q_ptr + 32, c, mask=mask)
    tl.store(q_ptr + 48, d, mask=mask)


@triton.jit
def _word(a, b, c, d):
    """The lowest bytes of four words as one word."""
    return (a & 0xFF) | ((b & 0xFF) << 8) | ((c & 0xFF) << 16) | ((d & 0xFF) << 24)


# Four float32 $1 to $4, times $5, to the four bytes of $0; NaN becomes the lower bound. With
# bfloat16, zero is rounded along to the lower half, so that the pair is a float32. The last
# rounding is that of float16, which from 1024 to 2047 has the integers alone: 0x6600 is 1536, whose
# sum with -128 ends in 0x80 and that with 127 in 0x7f. float32 has its own such range.
_HALVES_TO_BYTES = """
    cvt.rn.f16x2.f32 low, b, a;
    cvt.rn.f16x2.f32 high, d, c;
    mov.b32 t, 0x66006600;
    add.f16x2 low, low, t;
    add.f16x2 high, high, t;
    mov.b32 t, 0x65806580;
    max.f16x2 low, low, t;
    max.f16x2 high, high, t;
    mov.b32 t, 0x667f667f;
    min.f16x2 low, low, t;
    min.f16x2 high, high, t;
    prmt.b32 $0, low, high, 0x6420;
    }"""
_BFLOAT16_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d, zero; .reg .b32 t, low, high; mov.f32 zero, 0f00000000;\n"
    + "".join(
        f"cvt.rn.bf16x2.f32 t, ${index}, zero; mov.b32 {x}, t; mul.ftz.f32 {x}, {x}, $5;"
        f"cvt.rn.bf16x2.f32 t, {x}, zero; mov.b32 {x}, t;\n"
        for index, x in enumerate("abcd", 1)
    )
    + _HALVES_TO_BYTES
)
_FLOAT16_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b16 e, f, g, h; .reg .b32 t, low, high;"
    "cvt.rn.f16x2.f32 low, $2, $1; mov.b32 {e, f}, low;"
    "cvt.rn.f16x2.f32 high, $4, $3; mov.b32 {g, h}, high;"
    "cvt.f32.f16 a, e; cvt.f32.f16 b, f; cvt.f32.f16 c, g; cvt.f32.f16 d, h;\n"
    + "".join(f"mul.ftz.f32 {x}, {x}, $5;\n" for x in "abcd")
    + _HALVES_TO_BYTES
)
_FLOAT32_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b32 e, f, g, h;\n"
    + "".join(
        f"mul.ftz.f32 {x}, ${index}, $5; max.f32 {x}, {x}, 0fC3000000;"
        f"min.f32 {x}, {x}, 0f42FE0000; add.f32 {x}, {x}, 0f4B400000; mov.b32 {word}, {x};\n"
        for index, (x, word) in enumerate(zip("abcd", "efgh", strict=True), 1)
    )
    + "prmt.b32 e, e, f, 0x0040; prmt.b32 g, g, h, 0x0040; prmt.b32 $0, e, g, 0x5410; }"
)


@triton.jit
def _quantize(x, inverse, DTYPE: tl.constexpr):
    """A quad in DTYPE, times inverse in DTYPE, rounded to int8: the four bytes of a word."""
    a, b, c, d = x
    if _COMPILED:
        TO_BYTES: tl.constexpr = (
            _BFLOAT16_TO_BYTES
            if tl.bfloat16 == DTYPE
            else (_FLOAT16_TO_BYTES if tl.float16 == DTYPE else _FLOAT32_TO_BYTES)
        )
        return tl.inline_asm_elementwise(
            TO_BYTES,
            "=r,f,f,f,f,f",
            [a, b, c, d, inverse],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return _word(
            quantize(a.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(b.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(c.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(d.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
        )


class ConvrotRowQuantizer(RowQuantizer):
    """The rotating quantizer, with the rounding of stock's CUDA backend; K is a multiple of 256."""

    kernel = _quantize_rows_convrot_kernel

    def __init__(self) -> None:
        super().__init__("cuda")

    def _arguments(self, x: torch.Tensor) -> tuple[object, ...]:
        k = x.shape[1]
        chunk = _chunk(k)
        chunks = triton.cdiv(k, chunk)
        return k // 256, torch.finfo(x.dtype).max, chunk, chunks, k == chunk * chunks

    def _num_warps(self, x: torch.Tensor) -> int:
        return max(1, _chunk(x.shape[1]) // 1024)


def _chunk(k: int) -> int:
    """Values that a program takes at a time: a third of a row, or above 12288 the whole; a thread
    holds at most 96.

    Measured on one H200 (sm_90; torch 2.11+cu130, Triton 3.6, 2026-11-30) by CUDA graph replay on
    bfloat16, in percent of the speed of a copy of as many bytes, by chunk x chunks and warps:

    | M x K | chosen | others |
    |---|---|---|
    | 36864 x 5376 | 2048 x 3, 2 warps: 59 | 4 warps: 56; 1024 x 6, 2 warps: 52; 4096 x 2: 45 |
    | 25900 x 16384 | 16384 x 1, 16 warps: 65 | 4096 x 4: 58; 8192 x 2: 53 |
    | 4608 x 12288 | 4096 x 3, 4 warps: 64 | 8 warps: 56 |
    | 4608 x 3072 | 1024 x 3, 1 warp: 55 | 2 warps: 54 |
    | 512 x 3072 | 1024 x 3, 1 warp: 39 | 2 warps: 53 |
    | 1024 x 4096 | 2048 x 2, 2 warps: 50 | 4096 x 1: 49; 1024 x 4: 47 |
    """
    if k > 12_288:
        return 16_384
    return max(512, int(triton.next_power_of_2(triton.cdiv(k, 3))))
