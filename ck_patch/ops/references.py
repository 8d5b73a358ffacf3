"""Stock's GEMMs, on operands of ours: what our kernels are compared with, in result and in time."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ck_patch import chunks
from ck_patch.context import Function, OpContext
from ck_patch.dlpack import renewed
from ck_patch.kernels.launch import Operands
from ck_patch.ops.gemm_contract import CODES

# Bytes of the weight that are copied at once.
_COPIED = 64 * 2**20

Reference = Callable[[Operands, int], bool]
"""Writes stock's result of a GEMM into its `d`, on a raw stream that is current; False if stock
declines the call."""


class StockGemm:
    """Stock among our kernels, with what the engine needs of a `kernels.launch.Gemm`."""

    def __init__(self, run: Reference) -> None:
        self.run = run
        """Computes a call, and says whether stock did."""


def cutlass(stock: Function, context: OpContext) -> Reference:
    """The stock `_C.cutlass_int8_dequant`, or `_C.cutlass_int8_dequant_residual` for operands with
    a residual."""
    bias_float32 = context.release.bias_dtype == "float32"

    def reference(call: Operands, stream: int) -> bool:
        bias = call.bias
        if bias is None:
            bias = call.d.new_empty(0)
        elif bias_float32:
            bias = bias.float()
        residual = () if call.residual is None else (call.residual_scale, call.residual)
        values = (call.a, call.b, call.x_scale, call.w_scale, bias, *residual, call.d)
        capsules = renewed([None] * len(values), values)
        return bool(stock(*capsules, CODES[call.d.dtype], stream))

    return reference


def cutlass_config(number: int) -> Reference | None:
    """Stock's CUDA GEMM in its tile configuration of that number, for operands without a bias and
    a residual; None where the release has no such entry."""
    extension = getattr(sys.modules.get("comfy_kitchen.backends.cuda"), "_C", None)
    stock = getattr(extension, "cutlass_int8_dequant_config", None)
    return None if stock is None else functools.partial(_cutlass_config, stock, number)


def _cutlass_config(stock: Function, number: int, call: Operands, stream: int) -> bool:
    values = (call.a, call.b, call.x_scale, call.w_scale, call.d)
    capsules = renewed([None] * len(values), values)
    return bool(stock(*capsules, CODES[call.d.dtype], number, stream))


def eager(host: Any) -> Reference:
    """The GEMM and epilogue of `backends.eager.quantization.int8_linear`; `host` is that module."""

    def reference(call: Operands, stream: int) -> bool:
        for columns in chunks.chunks(call.n, max(8, _COPIED // call.k)):
            weight = call.b[columns].T.contiguous()
            sums = host._int8_matmul_accumulate(call.a, weight)
            scales = call.x_scale.reshape(-1, 1) * call.w_scale.reshape(1, -1)[:, columns]
            part = (sums.float() * scales).to(call.d.dtype)
            if call.bias is not None:
                part = part + call.bias[columns].to(part.dtype).reshape(1, -1)
            call.d[:, columns].copy_(part)
        return True

    return reference


def triton(host: Any) -> Reference:
    """The kernel of `backends.triton.quantization.int8_linear`; `host` is that module."""

    def reference(call: Operands, stream: int) -> bool:
        import triton

        tuner = host._int8_matmul_dequant_per_row_kernel
        # Any of its configurations computes the same, and tuning takes seconds.
        kernel, config = tuner.fn, tuner.configs[-1]
        for columns in chunks.chunks(call.n, chunks.columns_per_chunk(call.k)):
            weight, out = call.b[columns], call.d[:, columns]
            has_bias = call.bias is not None
            m, n = out.shape
            grid = (
                triton.cdiv(m, config.kwargs["block_m"]) * triton.cdiv(n, config.kwargs["block_n"]),
            )
            kernel[grid](
                a_ptr=call.a,
                b_ptr=weight,
                c_ptr=out,
                a_scale_ptr=call.x_scale,
                b_scale_ptr=call.w_scale[columns],
                bias_ptr=call.a if call.bias is None else call.bias[columns],
                m=m,
                n=n,
                k=call.k,
                stride_am=call.k,
                stride_ak=1,
                stride_bk=1,
                stride_bn=call.k,
                stride_cm=out.stride(0),
                stride_cn=1,
                has_bias=has_bias,
                **config.kwargs,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        return True

    return reference
