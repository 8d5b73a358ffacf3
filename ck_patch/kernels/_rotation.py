"""The rotation R of `quantize_rows_convrot`, on sixteen neighbours a thread and on any tensor.

Sixteen values a thread are four quads, tuples of four tensors [threads].
"""

from __future__ import annotations

import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED


@triton.jit
def rotate(x):
    """16 R of sixteen neighbours a thread: values by stride 16 in four quads by stride 64."""
    # The quads of a thread, and quads of those, are the strides 1 and 4.
    x = _join(_rotate_across(_rotate_each(x)))
    # Of (group, 16 places at strides 64 and 16, 16 at strides 4 and 1) the second comes last.
    x = tl.permute(tl.reshape(x, [x.numel // 256, 16, 16]), [0, 2, 1])
    a, b, c, d = butterfly(split(x))
    return _rotate_each((split(a), split(b), split(c), split(d)))


@triton.jit
def split(x):
    """Every fourth element from the first, second, third and fourth on."""
    even, odd = tl.split(tl.reshape(x, [x.numel // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _join(x):
    """The one tensor whose elements the quads of x hold in turn: undoes two times `split`."""
    p, q, r, s = x
    return join_four((join_four(p), join_four(q), join_four(r), join_four(s)))


@triton.jit
def join_four(x):
    a, b, c, d = x
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [4 * a.numel])


@triton.jit
def _rotate_each(x):
    """A butterfly within each quad."""
    p, q, r, s = x
    return butterfly(p), butterfly(q), butterfly(r), butterfly(s)


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
def butterfly(x):
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
def larger(largest, x):
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
