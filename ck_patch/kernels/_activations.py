"""Input activations in float32, in the operations of stock's CUDA quantizers.

With E(t) for 2^(-t log2(e)), and in the order of the operations, each rounded, subnormal numbers
zero:

- gelu_tanh: (x / 2) * (1 + tanh(sqrt(2 / pi) * (x + x * (x * (0.044715 * x)))))
- swiglu of a gate and a value: value * (gate * (1 / (1 + E(gate))))
- situ of a value and a gate: (4 * tanh(gate / 4) / (1 + E(gate))) * (25 * tanh(value / 25))
- rms_norm: (x * rsqrt(mean(x^2) + eps)) * weight

The exponential, the reciprocals, the root and the tanh of gelu_tanh are the approximations of the
hardware: what stock's binary does on every architecture, as its disassembly says. Its results are
not rounded to the dtype of x. The interpreter has no such approximations, and computes the formulas
by exact functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ck_patch.kernels._blocks import _COMPILED

_LOG2_E = tl.constexpr(float.fromhex("0x1.715476p+0"))
_ROOT_OF_2_BY_PI = tl.constexpr(float.fromhex("0x1.988454p-1"))

# In float32 bits: 0fbfb8aa3b is -log2(e), 0f3f800000 is 1.
_GELU_TANH = tl.constexpr("""{
    .reg .f32 t, half;
    mul.rn.ftz.f32 t, $1, 0f3d372713;
    mul.rn.ftz.f32 t, $1, t;
    fma.rn.ftz.f32 t, $1, t, $1;
    mul.rn.ftz.f32 t, t, 0f3f4c422a;
    tanh.approx.f32 t, t;
    add.rn.ftz.f32 t, t, 0f3f800000;
    mul.rn.ftz.f32 half, $1, 0f3f000000;
    mul.rn.ftz.f32 $0, half, t;
    }""")
_SWIGLU = tl.constexpr("""{
    .reg .f32 t;
    mul.rn.ftz.f32 t, $1, 0fbfb8aa3b;
    ex2.approx.ftz.f32 t, t;
    add.rn.ftz.f32 t, t, 0f3f800000;
    rcp.approx.ftz.f32 t, t;
    mul.rn.ftz.f32 t, $1, t;
    mul.rn.ftz.f32 $0, $2, t;
    }""")
# Stock's tanh of s is that of the CUDA library, which has e^t - 1 for t = -2|s| as 2^n (p + 1) - 1
# with n = rint(t log2(e)) and a polynomial p of t - n log(2), or as p alone where t > -0.41. Here n
# comes from adding 1.5 * 2^23, where float32 has the integers alone, and 2^n from its bits: both
# exact, and off the unit that approximates. Below n = -25 it is -1 in any case.
_TANH = """
    mul.rn.ftz.f32 s, {x}, {inverse};
    abs.ftz.f32 t, s;
    mul.rn.ftz.f32 t, t, 0fc0000000;
    setp.gt.ftz.f32 near, t, 0fbed1eb85;
    mul.rn.ftz.f32 n, t, 0f3fb8aa3b;
    max.NaN.ftz.f32 n, n, 0fc2800000;
    add.rn.ftz.f32 n, n, 0f4b400000;
    selp.f32 n, 0f4b400000, n, near;
    mov.b32 bits, n;
    mad.lo.s32 bits, bits, 0x800000, 0x3f800000;
    mov.b32 power, bits;
    sub.rn.ftz.f32 n, n, 0f4b400000;
    setp.lt.ftz.f32 far, n, 0fc1c80000;
    neg.ftz.f32 n, n;
    fma.rn.ftz.f32 t, n, 0f3f317200, t;
    fma.rn.ftz.f32 t, n, 0f35bfbe8e, t;
    fma.rn.ftz.f32 p, t, 0f3ab5ebe6, 0f3c095663;
    fma.rn.ftz.f32 p, p, t, 0f3d2aabe3;
    fma.rn.ftz.f32 p, p, t, 0f3e2aa9f6;
    fma.rn.ftz.f32 p, p, t, 0f3efffffe;
    mul.rn.ftz.f32 p, t, p;
    fma.rn.ftz.f32 p, p, t, t;
    add.rn.ftz.f32 n, power, 0fbf800000;
    fma.rn.ftz.f32 p, p, power, n;
    selp.f32 p, 0fbf800000, p, far;
    add.rn.ftz.f32 n, p, 0f40000000;
    rcp.approx.ftz.f32 n, n;
    neg.ftz.f32 p, p;
    mul.rn.ftz.f32 p, p, n;
    copysign.f32 p, s, p;
    mul.rn.ftz.f32 {result}, p, {factor};
"""
_SITU = tl.constexpr(
    "{ .reg .f32 s, t, n, p, power, gate; .reg .b32 bits; .reg .pred near, far;"
    + _TANH.format(x="$2", inverse="0f3e800000", factor="0f40800000", result="gate")
    + """
    mul.rn.ftz.f32 t, $2, 0fbfb8aa3b;
    ex2.approx.ftz.f32 t, t;
    add.rn.ftz.f32 t, t, 0f3f800000;
    rcp.approx.ftz.f32 t, t;
    mul.rn.ftz.f32 gate, gate, t;"""
    + _TANH.format(x="$1", inverse="0f3d23d70a", factor="0f41c80000", result="p")
    + "mul.rn.ftz.f32 $0, gate, p; }"
)
_RMS_NORM = tl.constexpr("{ mul.rn.ftz.f32 $0, $1, $3; mul.rn.ftz.f32 $0, $0, $2; }")


@triton.jit
def activated(x, y, factor, ACT: tl.constexpr):
    """ACT of float32 tensors: of x, of the columns x and y of a pair, or of x with the weight y and
    the factor of `rsqrt_of_mean_square`."""
    if ACT == "gelu_tanh":
        if _COMPILED:
            return tl.inline_asm_elementwise(
                _GELU_TANH, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            cubic = x * (x * (x * 0.044715)) + x
            return (x * 0.5) * (_tanh(cubic * _ROOT_OF_2_BY_PI) + 1.0)
    elif ACT == "swiglu":
        if _COMPILED:
            return tl.inline_asm_elementwise(
                _SWIGLU, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return y * (x * _sigmoid(x))
    elif ACT == "situ":
        if _COMPILED:
            return tl.inline_asm_elementwise(
                _SITU, "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return (_tanh(y * 0.25) * 4.0 * _sigmoid(y)) * (_tanh(x * 0.04) * 25.0)
    elif ACT == "rms_norm":
        if _COMPILED:
            return tl.inline_asm_elementwise(
                _RMS_NORM, "=&f,f,f,f", [x, y, factor], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            return (x * factor) * y
    else:
        tl.static_assert(ACT is None)
        return x


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -_LOG2_E))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def rsqrt_of_mean_square(x_ptr, K, eps, SUMS: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of a row of K values in the order of stock's kernel: SUMS threads
    sum every so many squares from first to last, then the 32 of a warp and then the warps halve
    again and again, the second half added to the first."""
    k = tl.arange(0, SUMS)
    sums = tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, K, SUMS, loop_unroll_factor=4):
        x = tl.load(x_ptr + start + k, mask=k < K - start, other=0.0).to(tl.float32)
        if _COMPILED:
            sums = tl.inline_asm_elementwise(
                "fma.rn.ftz.f32 $0, $1, $1, $2;",
                "=f,f,f",
                [x, sums],
                dtype=tl.float32,
                is_pure=True,
                pack=1,
            )
        else:
            sums += x * x
    sums = tl.reshape(sums, [SUMS // 32, 32])
    for _ in tl.static_range(5):
        sums = _halved(sums)
    sums = tl.reshape(sums, [1, SUMS // 32])
    for _ in tl.static_range(5):
        if sums.shape[1] > 1:
            sums = _halved(sums)
    total = tl.max(tl.reshape(sums, [1]), axis=0)
    if _COMPILED:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            cvt.rn.f32.s32 t, $2;
            rcp.approx.ftz.f32 t, t;
            fma.rn.ftz.f32 t, $1, t, $3;
            rsqrt.approx.ftz.f32 $0, t;
            }""",
            "=f,f,r,f",
            [total, K, eps],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / tl.sqrt(total / K + eps)


@triton.jit
def _halved(x):
    """[N, 2 M] to [N, M], the second half of each row added to the first."""
    first, second = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))
    if _COMPILED:
        return tl.inline_asm_elementwise(
            "add.rn.ftz.f32 $0, $1, $2;",
            "=f,f,f",
            [first, second],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return first + second
