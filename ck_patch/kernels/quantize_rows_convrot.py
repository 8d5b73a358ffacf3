"""The rotating INT8 row quantizer: q[m] and scale[m] are those of `quantize_rows` on R(x[m]).

R rotates each 256 values of a row, in float32, by four stages of butterflies at strides 1, 4, 16
and 64. A butterfly takes (a, b, c, d) to half of (((a + b) + c) - d, ((a + b) - c) + d,
((a - b) + c) + d, ((b - a) + c) + d): each sum from left to right and each stage halved, with
subnormal numbers as zero, which is the order of stock's CUDA kernel, and shows in the result. The
largest magnitude of a row is that of R(x) in float32, while what is divided by the scale is R(x)
in the dtype of x.

Here a row is rotated to 16 R(x), with no halving, and one factor 1/16 for its scale. A factor that
is a power of two changes no rounding, so that this is exact unless a sum overflows, or is so small
that stock takes it for zero after a halving. Both are seen in the largest magnitude:

- An infinity or NaN among the sums stays one to the end. Rows from 2^127 on are quantized once
  more with all the halvings: not only from an infinity on, because rounding to bfloat16 may make
  one.
- What stock takes for zero is less than 2^-122 here, and all of it in one group moves no sum by
  2^-116. A row of less than 2^-107 is zeros on the smallest scale in any case. One from there to
  2^-30 is quantized once more. In one from 2^-30 on, what is less than 2^-38 becomes zero, and of
  the rest the last bit is 2^-61 or more. To change that, a difference must grow by roundings alone:
  each can turn the last bit of one number into that of a sum, at most 2^24 times as much, if the
  number lies at a tie of the sum to that very bit. It takes three such ties in consecutive sums, or
  more of less; by chance, about one such sum in 2^55 has them. A row can be made that differs.

float16 rows leave these bounds by an infinity or a NaN alone.

x float32, float16 or bfloat16 [M, K], K a multiple of 256; q int8 [M, K]; scale float32 [M].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED
from ck_patch.kernels.quantize_rows import RowQuantizer, quantize, reciprocal_of, scales

_SIXTEENTH = tl.constexpr(0.0625)
# The bits of 2^-107, 2^-30 and 2^127.
_LOWEST, _LOW, _HIGH = tl.constexpr(0x0A000000), tl.constexpr(0x30800000), tl.constexpr(0x7F000000)


@triton.jit(do_not_specialize=["GROUPS"])
def _quantize_rows_convrot_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    GROUPS,
    FINITE_MAX: tl.constexpr,
    HALF: tl.constexpr,
    HALVES: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program quantizes one row of GROUPS * 256 values, in pieces of 2 * HALF values, the last
    one HALF if HALVES is odd; FULL says that they are all there.

    The row stays in registers from the first stage to its scale: x is read once.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    PIECES: tl.constexpr = (HALVES + 1) // 2
    # So many pieces are on their way while one is rotated.
    AHEAD: tl.constexpr = 2
    K = GROUPS * 256
    # M * K may exceed 2^31.
    row = tl.program_id(0).to(tl.int64) * K
    x_ptr += row
    q_ptr += row
    scale_ptr += tl.program_id(0)

    loaded = ()
    kept = ()
    bits = 0
    largest = tl.zeros([HALF // 8], tl.int32)
    for i in tl.static_range(PIECES + AHEAD):
        if i < PIECES:
            loaded += (_load(x_ptr, i, K, HALF, HALVES, FULL),)  # type: ignore[assignment]
        if i >= AHEAD:
            # Half a piece has half as many maxima.
            if 2 * (i - AHEAD) + 1 == HALVES:
                bits = tl.max(largest, axis=0)
                largest = tl.zeros([HALF // 16], tl.int32)
            x = _rotate(_unpack(loaded[i - AHEAD], DTYPE))
            largest = _larger(largest, x)
            kept += (_keep(x, DTYPE),)  # type: ignore[assignment]
    bits = tl.maximum(bits, tl.max(largest, axis=0))
    exact = (bits < _HIGH) & ((bits >= _LOW) | (bits < _LOWEST))

    highest = bits.to(tl.float32, bitcast=True) * _SIXTEENTH
    scale, divisor, _, _ = scales(highest, DTYPE, False, FINITE_MAX, 0.0)
    tl.store(scale_ptr, scale)
    inverse = reciprocal_of(divisor, False)
    if tl.float16 != DTYPE:
        inverse *= _SIXTEENTH
    end = tl.where(exact, K, 0)
    for i in tl.static_range(PIECES):
        _store_bytes(q_ptr + i * 2 * HALF, kept[i], inverse, end - i * 2 * HALF, DTYPE)
    if not exact:
        _quantize_with_halvings(x_ptr, q_ptr, scale_ptr, K, FINITE_MAX, HALF)


@triton.jit
def _quantize_with_halvings(
    x_ptr, q_ptr, scale_ptr, K, FINITE_MAX: tl.constexpr, SIZE: tl.constexpr
):
    """A row in stock's operations, SIZE values at a time: once for its scale, once for q.

    Small rather than fast: it is rarely run, but is part of each compilation.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, SIZE)
    largest = tl.zeros([SIZE], tl.float32)
    steps = tl.cdiv(K, SIZE)
    for step in range(2 * steps):
        start = step % steps * SIZE
        mask = k < K - start
        x = tl.load(x_ptr + start + k, mask=mask, other=0.0).to(tl.float32)
        for _stage in range(4):
            x = tl.reshape(_join_four(_butterfly(_split(x))), [SIZE // 256, 64, 4])
            # The next stride becomes 1; after four stages all are again what they were.
            x = tl.reshape(tl.permute(x, [0, 2, 1]), [SIZE]) * 0.5
        largest = tl.maximum(largest, tl.abs(x))  # Passes over NaN.
        if step >= steps:
            scale, divisor, _, _ = scales(tl.max(largest, axis=0), DTYPE, False, FINITE_MAX, 0.0)
            tl.store(scale_ptr, scale)
            inverse = reciprocal_of(divisor, False)
            q = quantize(x.to(DTYPE), None, inverse, -128.0, 127.0, False)
            tl.store(q_ptr + start + k, q, mask=mask)


@triton.jit
def _load(x_ptr, i, K, HALF: tl.constexpr, HALVES: tl.constexpr, FULL: tl.constexpr):
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
def _unpack(words, DTYPE: tl.constexpr):
    """Sixteen neighbours a thread: four quads of float32 tensors [threads]."""
    if tl.float32 == DTYPE:
        p, q, r, s = words
        return _floats(p), _floats(q), _floats(r), _floats(s)
    else:
        a, b, c, d = _split(words[0])
        e, f, g, h = _split(words[1])
        return (
            _halves(a, DTYPE) + _halves(b, DTYPE),
            _halves(c, DTYPE) + _halves(d, DTYPE),
            _halves(e, DTYPE) + _halves(f, DTYPE),
            _halves(g, DTYPE) + _halves(h, DTYPE),
        )


@triton.jit
def _floats(words):
    return _split(words.to(tl.float32, bitcast=True))


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
def _rotate(x):
    """16 R of sixteen neighbours a thread: values by stride 16 in four quads by stride 64."""
    # The quads of a thread, and quads of those, are the strides 1 and 4.
    x = _join(_rotate_across(_rotate_each(x)))
    # Of (group, 16 places at strides 64 and 16, 16 at strides 4 and 1) the second comes last.
    x = tl.permute(tl.reshape(x, [x.numel // 256, 16, 16]), [0, 2, 1])
    a, b, c, d = _butterfly(_split(x))
    return _rotate_each((_split(a), _split(b), _split(c), _split(d)))


@triton.jit
def _split(x):
    """Every fourth element from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


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
    return _rotate_each(((a0, a1, a2, a3), (b0, b1, b2, b3), (c0, c1, c2, c3), (d0, d1, d2, d3)))


@triton.jit
def _butterfly(x):
    """Twice a butterfly of R: nothing is halved."""
    a, b, c, d = x
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 sum, difference, w, x, y, z;
            add.ftz.f32 sum, $4, $5;
            sub.ftz.f32 difference, $4, $5;
            add.ftz.f32 w, sum, $6;
            sub.ftz.f32 x, sum, $6;
            add.ftz.f32 y, difference, $6;
            sub.ftz.f32 z, $6, difference;
            sub.ftz.f32 w, w, $7;
            add.ftz.f32 x, x, $7;
            add.ftz.f32 y, y, $7;
            add.ftz.f32 z, z, $7;
            mov.f32 $0, w;
            mov.f32 $1, x;
            mov.f32 $2, y;
            mov.f32 $3, z;
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
        return (total + c) - d, (total - c) + d, (difference + c) + d, (c - difference) + d


@triton.jit
def _larger(largest, x):
    """The largest magnitudes with those of x, as bits, in whose order NaN is the largest."""
    for i in tl.static_range(4):
        a, b, c, d = x[i]
        if _COMPILED:
            # Flushing, an instruction takes magnitudes along.
            largest = tl.inline_asm_elementwise(
                """{
                .reg .f32 a, b, c, d;
                abs.ftz.f32 a, $2;
                abs.ftz.f32 b, $3;
                abs.ftz.f32 c, $4;
                abs.ftz.f32 d, $5;
                max.NaN.ftz.f32 a, a, b;
                max.NaN.ftz.f32 c, c, d;
                max.NaN.ftz.f32 a, a, c;
                max.NaN.ftz.f32 $0, a, $1;
                }""",
                "=r,r,f,f,f,f",
                [largest, a, b, c, d],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            for y in x[i]:
                largest = tl.maximum(largest, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    return largest


@triton.jit
def _keep(x, DTYPE: tl.constexpr):
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
        a *= _SIXTEENTH
        b *= _SIXTEENTH
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
def _store_bytes(q_ptr, x, inverse, left, DTYPE: tl.constexpr):
    """Quantize what `_keep` has of a piece and store the first `left` bytes of it."""
    p, q, r, s = x
    p, q = _quantize(p, inverse, DTYPE), _quantize(q, inverse, DTYPE)
    r, s = _quantize(r, inverse, DTYPE), _quantize(s, inverse, DTYPE)
    # Back to neighbours in one exchange of 64-bit words, half as many as of 32.
    words = tl.join(_pair(p, r), _pair(q, s))
    words = tl.permute(tl.reshape(words, [words.numel // 32, 16, 2]), [0, 2, 1])
    a, b, c, d = _split(words)

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


# A quad as `_keep` has it, in $1 and $2 or in $1 to $4, times the last operand, to the four bytes
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
    """A quad as `_keep` has it, times inverse in DTYPE, rounded to int8: the bytes of a word."""
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


class ConvrotRowQuantizer(RowQuantizer):
    """The rotating quantizer, with the rounding of stock's CUDA backend; K is a multiple of 256."""

    kernel = _quantize_rows_convrot_kernel

    def __init__(self) -> None:
        super().__init__("cuda")

    def _arguments(self, x: torch.Tensor) -> tuple[object, ...]:
        k, half = x.shape[1], 512 * self._num_warps(x)
        halves = triton.cdiv(k, half)
        return k // 256, torch.finfo(x.dtype).max, half, halves, k == half * halves

    def _num_warps(self, x: torch.Tensor) -> int:
        return _warps(x.shape[1])

    def _registers(self, x: torch.Tensor) -> int | None:
        """At most so many a thread: unlimited, 16-bit rows of three pieces and a half get 120 to
        168 by the release of Triton, for 12 or 16 warps on a multiprocessor instead of 20."""
        _, _, _, halves, _ = self._arguments(x)
        return 96 if halves == 7 and x.dtype != torch.float32 else None

    def _options(self, x: torch.Tensor) -> dict[str, Any]:
        return {**super()._options(x), "maxnreg": self._registers(x)}


def _warps(k: int) -> int:
    """Warps of a program, which takes 1024 values a warp at a time: as few as take at most three
    and a half pieces, and at most 16.

    Measured on one H200 (sm_90; torch 2.11+cu130, Triton 3.6, 2026-11-30) by CUDA graph replay on
    bfloat16, in percent of the speed of a copy of as many bytes, by warps and values of the pieces:

    | M x K | chosen | others |
    |---|---|---|
    | 36864 x 5376 | 2, 2048 x 3: 75 | 4, 4096 + 2048: 72; 1, 1024 x 5 + 512: 72 |
    | 37296 x 14336 | 4, 4096 x 3 + 2048: 80 | without a limit of registers: 69; 8, 8192 x 2: 70 |
    | 25900 x 16384 | 8, 8192 x 2: 77 | 4, 4096 x 4: 79, 96 registers: 74; 16, 16384: 74 |
    | 32760 x 5120 | 2, 2048 x 2 + 1024: 77 | 1, 1024 x 5: 77; 4, 4096 + 2048: 67 |
    | 4608 x 3072 | 1, 1024 x 3: 68 | 2, 2048 + 1024: 66; 4, 4096: 53 |
    | 4608 x 4096 | 2, 2048 x 2: 76 | 4, 4096: 76; 1, 1024 x 4: 64 |
    | 4608 x 12288 | 4, 4096 x 3: 76 | 8, 8192 + 4096: 71; 2, 2048 x 6: 60 |
    | 1024 x 4096 | 2, 2048 x 2: 56 | 4, 4096: 60; 1, 1024 x 4: 54 |
    | 512 x 3072 | 1, 1024 x 3: 58 | 2, 2048 + 1024: 58; 4, 4096: 54 |

    A limit of 96 registers gains at most 2% where a row is no more than three pieces. With one
    warp, five pieces and more take 18 to 32 seconds to compile; these take 1 to 5.
    """
    return min(16, int(triton.next_power_of_2(triton.cdiv(k, 3584))))
