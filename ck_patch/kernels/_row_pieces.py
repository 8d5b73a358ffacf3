"""A piece of a row of `quantize_rows_convrot` on its way: from memory to float32, what is kept
until the scale is known, and from there to bytes.

A thread has sixteen values, neighbours before the rotation and by stride 16 after it: four quads,
tuples of four float32 tensors [threads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED
from ck_patch.kernels._rotation import split
from ck_patch.kernels.quantize_rows import quantize

SIXTEENTH = tl.constexpr(0.0625)


@triton.jit
def load(x_ptr, i, K, HALF: tl.constexpr, HALVES: tl.constexpr, FULL: tl.constexpr):
    """Piece i of a row in words of 32 bits, sixteen values a thread: tensors [threads, 4], two, or
    four of float32."""
    SIZE: tl.constexpr = 2 * HALF if 2 * i + 1 < HALVES else HALF
    WHOLE: tl.constexpr = FULL or 2 * i + 2 < HALVES
    WORDS: tl.constexpr = 16 if x_ptr.dtype.element_ty == tl.float32 else 8
    start = i * 2 * HALF
    thread = tl.arange(0, SIZE // 16)
    mask = ((start + thread * 16 < K) | WHOLE)[:, None]
    words_ptr = (x_ptr + start).to(tl.pointer_type(tl.int32))
    words_ptr += thread[:, None] * WORDS + tl.arange(0, 4)[None, :]
    # What one load brings must be one piece of 16 bytes a thread.
    p = tl.load(words_ptr, mask=mask, other=0)
    q = tl.load(words_ptr + 4, mask=mask, other=0)
    if WORDS == 8:
        return p, q
    else:
        r = tl.load(words_ptr + 8, mask=mask, other=0)
        s = tl.load(words_ptr + 12, mask=mask, other=0)
        return p, q, r, s


@triton.jit
def unpack(words, DTYPE: tl.constexpr):
    """Sixteen neighbours a thread: four quads of float32 tensors [threads]."""
    if tl.float32 == DTYPE:
        p, q, r, s = words
        return _floats(p), _floats(q), _floats(r), _floats(s)
    else:
        a, b, c, d = split(words[0])
        e, f, g, h = split(words[1])
        return (
            _halves(a, DTYPE) + _halves(b, DTYPE),
            _halves(c, DTYPE) + _halves(d, DTYPE),
            _halves(e, DTYPE) + _halves(f, DTYPE),
            _halves(g, DTYPE) + _halves(h, DTYPE),
        )


@triton.jit
def _floats(words):
    return split(words.to(tl.float32, bitcast=True))


@triton.jit
def _halves(word, DTYPE: tl.constexpr):
    """The lower and the upper 16 bits of a word, each of DTYPE, in float32."""
    if tl.bfloat16 == DTYPE:
        low, high = word << 16, word & -65536
        return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    else:
        low, high = word.to(tl.int16), (word >> 16).to(tl.int16)
        low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def keep(x, DTYPE: tl.constexpr):
    """What waits for the scale: of float32 16 R(x) as it is, of bfloat16 two in a word, and of
    float16, which may not hold that, R(x), two in a word."""
    if tl.float32 == DTYPE:
        return x
    else:
        p, q, r, s = x
        return _pack(p, DTYPE), _pack(q, DTYPE), _pack(r, DTYPE), _pack(s, DTYPE)


@triton.jit
def _pack(x, DTYPE: tl.constexpr):
    a, b, c, d = x
    return _word_of_two(a, b, DTYPE), _word_of_two(c, d, DTYPE)


@triton.jit
def _word_of_two(a, b, DTYPE: tl.constexpr):
    if tl.float16 == DTYPE:
        a *= SIXTEENTH
        b *= SIXTEENTH
    if _COMPILED:
        TO_TWO: tl.constexpr = (
            "cvt.rn.bf16x2.f32 $0, $2, $1;"
            if tl.bfloat16 == DTYPE
            else "cvt.rn.f16x2.f32 $0, $2, $1;"
        )
        return tl.inline_asm_elementwise(
            TO_TWO, "=r,f,f", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = a.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        high = b.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def store_bytes(q_ptr, x, inverse, left, DTYPE: tl.constexpr):
    """Quantize what `keep` has of a piece and store the first `left` bytes of it."""
    p, q, r, s = x
    p, q = _quantize(p, inverse, DTYPE), _quantize(q, inverse, DTYPE)
    r, s = _quantize(r, inverse, DTYPE), _quantize(s, inverse, DTYPE)
    # Back to neighbours in one exchange of 64-bit words, half as many as of 32.
    words = tl.join(_pair(p, r), _pair(q, s))
    words = tl.permute(tl.reshape(words, [words.numel // 32, 16, 2]), [0, 2, 1])
    a, b, c, d = split(words)

    n = tl.arange(0, a.numel)
    at = n // 8 * 64 + n % 8
    mask = at * 4 < left
    words_ptr = q_ptr.to(tl.pointer_type(tl.int32)) + at
    _store_words(words_ptr, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32), mask)
    a, b, c, d = a >> 32, b >> 32, c >> 32, d >> 32
    words_ptr += 8
    _store_words(words_ptr, a.to(tl.int32), b.to(tl.int32), c.to(tl.int32), d.to(tl.int32), mask)


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


# A quad as `keep` has it, in $1 and $2 or in $1 to $4, times the last operand, to the four bytes
# of $0. With bfloat16, zero is rounded along to the lower half, so that the pair is a float32. The
# last rounding is that of float16, which from 1024 to 2047 has the integers alone: 0x6600 is 1536,
# whose sum with -128 ends in 0x80 and that with 127 in 0x7f. float32 has its own such range.
#
# A magnitude and the scale, each rounded to bfloat16, may have a quotient of 128, never a larger
# one; in float32 none rounds to more than 127. In float16 the scale may be zero, and quotients
# infinite or NaN, which becomes the lower bound.
_TO_HALVES = """
    cvt.rn.f16x2.f32 low, b, a;
    cvt.rn.f16x2.f32 high, d, c;
    mov.b32 t, 0x66006600;
    add.f16x2 low, low, t;
    add.f16x2 high, high, t;"""
_LOWER_BOUND = """
    mov.b32 t, 0x65806580;
    max.f16x2 low, low, t;
    max.f16x2 high, high, t;"""
_UPPER_BOUND_TO_BYTES = """
    mov.b32 t, 0x667f667f;
    min.f16x2 low, low, t;
    min.f16x2 high, high, t;
    prmt.b32 $0, low, high, 0x6420;
    }"""
_BFLOAT16_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d, zero; .reg .b32 t, low, high; mov.f32 zero, 0f00000000;"
    "shl.b32 t, $1, 16; mov.b32 a, t; and.b32 t, $1, 0xffff0000; mov.b32 b, t;"
    "shl.b32 t, $2, 16; mov.b32 c, t; and.b32 t, $2, 0xffff0000; mov.b32 d, t;\n"
    + "".join(
        f"mul.ftz.f32 {x}, {x}, $3; cvt.rn.bf16x2.f32 t, {x}, zero; mov.b32 {x}, t;\n"
        for x in "abcd"
    )
    + _TO_HALVES
    + _UPPER_BOUND_TO_BYTES
)
_FLOAT16_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b16 e, f, g, h; .reg .b32 t, low, high;"
    "mov.b32 {e, f}, $1; cvt.f32.f16 a, e; cvt.f32.f16 b, f;"
    "mov.b32 {g, h}, $2; cvt.f32.f16 c, g; cvt.f32.f16 d, h;\n"
    + "".join(f"mul.ftz.f32 {x}, {x}, $3;\n" for x in "abcd")
    + _TO_HALVES
    + _LOWER_BOUND
    + _UPPER_BOUND_TO_BYTES
)
_FLOAT32_TO_BYTES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b32 e, f, g, h;\n"
    + "".join(
        f"mul.ftz.f32 {x}, ${index}, $5; add.f32 {x}, {x}, 0f4B400000; mov.b32 {word}, {x};\n"
        for index, (x, word) in enumerate(zip("abcd", "efgh", strict=True), 1)
    )
    + "prmt.b32 e, e, f, 0x0040; prmt.b32 g, g, h, 0x0040; prmt.b32 $0, e, g, 0x5410; }"
)


@triton.jit
def _quantize(x, inverse, DTYPE: tl.constexpr):
    """A quad as `keep` has it, times inverse in DTYPE, rounded to int8: the bytes of a word."""
    if not _COMPILED:
        a, b, c, d = x if tl.float32 == DTYPE else _halves(x[0], DTYPE) + _halves(x[1], DTYPE)
        return _word(
            quantize(a.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(b.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(c.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
            quantize(d.to(DTYPE), None, inverse, -128.0, 127.0, False).to(tl.int32),
        )
    elif tl.float32 == DTYPE:
        a, b, c, d = x
        return tl.inline_asm_elementwise(
            _FLOAT32_TO_BYTES,
            "=r,f,f,f,f,f",
            [a, b, c, d, inverse],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        a, b = x
        return tl.inline_asm_elementwise(
            _BFLOAT16_TO_BYTES if tl.bfloat16 == DTYPE else _FLOAT16_TO_BYTES,
            "=r,r,r,f",
            [a, b, inverse],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
