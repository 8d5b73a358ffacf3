"""Quantizer and GEMM of a linear of the CUDA backend, from tensors, without capsules in between.

comfy_kitchen passes every tensor of a call to its extension in a DLPack capsule, and what replaces
the entries there has to open each of them again. Here the tensors are at hand.
"""

from __future__ import annotations

import inspect
import math
import sys
from typing import Any, cast

import torch

from ck_patch.context import Function, OpContext, Refused, op_of
from ck_patch.kernels.launch import Operands
from ck_patch.ops import references
from ck_patch.ops.gemm import Int8Gemm
from ck_patch.ops.gemm_contract import CODES, misaligned
from ck_patch.ops.gemm_plan import Plan
from ck_patch.ops.references import Reference
from ck_patch.ops.residuals import Residual, is_plain, plain_residual
from ck_patch.ops.rotations import Rotations

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class QuantizedLinear:
    """What stock's `int8_linear` computes from three rows on, in the same steps.

    Input activation, rotation and residual are the host's own functions where stock does not leave
    them to a kernel. The rows are quantized by what stands in the host's module; where that is
    ours, its kernel is launched from here once it has been proven.
    """

    def __init__(self, operation: str, stock: Function, context: OpContext) -> None:
        self._host: Any = sys.modules[stock.__module__]
        extension = self._host._C
        self._entry = extension.cutlass_int8_dequant
        parameters = inspect.signature(stock).parameters
        ours = inspect.signature(self.compute).parameters.values()
        named = {one.name for one in ours if one.kind is one.KEYWORD_ONLY}
        self.unknown = frozenset(named - parameters.keys())
        """Keywords of `compute` that stock refuses: the oldest tested releases have no residual."""
        self._residual_entry = None
        if "residual" in parameters:
            self._residual_entry = extension.cutlass_int8_dequant_residual
        reference = _reference(self._entry, self._residual_entry, context)
        self.gemm = Int8Gemm(operation, "cuda", reference, context)
        self._rotations = Rotations(self._host)
        self._device_type = "cuda"
        # A CPU build of torch has neither of the two.
        self._current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
        self._current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def compute(
        self,
        *,
        x: Any = None,
        weight: Any = None,
        weight_scale: Any = None,
        bias: Any = None,
        out_dtype: Any = None,
        convrot: Any = False,
        convrot_groupsize: Any = 256,
        input_act: Any = None,
        input_act_weight: Any = None,
        input_act_eps: Any = 0.0,
        residual: Any = None,
        residual_scale: Any = None,
        **unknown: Any,
    ) -> torch.Tensor | None:
        """The linear of x [..., K], or [..., 2K] with a gated activation, in float32, float16 or
        bfloat16 with at least three rows.

        weight is int8 [N, K], weight_scale float32 with one or N values, bias none or N values in
        the output dtype; the others are what the host takes. None where the call is stock's: one or
        two rows, which have kernels of their own, and everything else. Raises what a step of the
        host's raises.
        """
        host = self._host
        # Whoever replaced the entry since wants it called.
        if unknown or host._C.cutlass_int8_dequant is not self._entry:
            return None
        if not type(x) is type(weight) is type(weight_scale) is torch.Tensor:
            return None
        activates = input_act not in (None, "none")
        width = host._input_act_width(input_act) if activates else 1
        shape, weight_shape = x.shape, weight.shape
        if len(weight_shape) != 2 or not shape or shape[-1] != width * weight_shape[1]:
            return None
        n, k = weight_shape
        if len(shape) == 2:
            rows = shape[0]
            out_shape: tuple[int, ...] = (rows, n)
        else:
            rows, out_shape = math.prod(shape[:-1]), (*shape[:-1], n)
        on, device = x.device, x.get_device()
        dtype = out_dtype or x.dtype
        scales = weight_scale.numel()
        if (
            on.type != self._device_type
            or rows < 3
            or x.dtype not in CODES
            or dtype not in CODES
            or x.requires_grad
            # Their memory holds the values with the other sign.
            or x.is_neg()
            or weight.is_neg()
            or weight_scale.is_neg()
            or weight.dtype != torch.int8
            or weight_scale.dtype != torch.float32
            or scales not in (1, n)
            # Stock expands it, which one value in a matrix refuses.
            or (scales != n and weight_scale.dim() > 1)
            or not (weight.is_contiguous() and weight_scale.is_contiguous())
            or not device == weight.get_device() == weight_scale.get_device()
            # Stock exports no tensor of a device that is not the current one.
            or device != self._current_device()
            or host._DISABLE_CUTLASS_INT8
            or (convrot and not (type(convrot_groupsize) is int and convrot_groupsize > 0))
            # Stock makes a float of it, whatever the activation.
            or type(input_act_eps) not in (float, int)
        ):
            return None
        if bias is not None:
            if not (
                type(bias) in _PLAIN
                and bias.dtype == dtype
                and bias.numel() == n
                and bias.is_contiguous()
                and bias.get_device() == device
                and not bias.is_neg()
            ):
                return None
            if bias.requires_grad:
                bias = bias.detach()
        added = None
        if residual is not None:
            entry = self._residual_entry
            if entry is None or host._C.cutlass_int8_dequant_residual is not entry:
                return None
            added = plain_residual(residual, residual_scale, device, rows, n, dtype)
            if added is None:
                return None
        act: tuple[Any, ...] = ()
        if activates:
            act = (input_act,)
            if input_act == "rms_norm":  # The others ignore a weight.
                if not is_plain(input_act_weight, device) or input_act_weight.shape != (k,):
                    return None
                act = (input_act, input_act_weight.detach(), input_act_eps)
        in_epilogue = added is not None and added.in_epilogue
        plan = self.gemm.plan(
            device, rows, n, k, dtype, None if bias is None else dtype, in_epilogue
        )
        # Ask before the activation is quantized: declining later would cost that.
        if plan is None or not self.gemm.ready(plan):
            return None
        if misaligned(
            (
                weight.data_ptr(),
                weight_scale.data_ptr() if scales == n else 0,
                0 if bias is None else bias.data_ptr(),
            )
        ):
            return None
        if scales != n:
            weight_scale = weight_scale.reshape(-1).expand(n).contiguous()
        group = convrot_groupsize if convrot else 0
        return self._run(plan, x, weight, weight_scale, bias, group, act, added, out_shape)

    def _run(
        self,
        plan: Plan,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        group: int,
        act: tuple[Any, ...],
        residual: Residual | None,
        shape: tuple[int, ...],
    ) -> torch.Tensor | None:
        """The steps, in stock's order; None if the GEMM has to be stock's after all.

        `group` is that of the rotation, zero without one; `act` is the activation's name, if any,
        for rms_norm with its weight and eps.
        """
        host = self._host
        device, m, n, k, dtype, _, _ = plan.key
        # Here and not by the caller, which would keep the copy to the end.
        x = x.contiguous()
        fused = residual if residual is not None and residual.in_epilogue else None
        options: tuple[Any, ...] = ()
        if group and self._rotations.in_one_kernel(x, m, k, group):
            quantize = host.quantize_int8_rowwise_convrot64
            options = (256, 0, *act) if act else (256,)
        else:
            if act:
                # Its weight as it came: torch's rms_norm rounds by where that starts.
                x, act = host._apply_input_act(x.view(m, -1), *act), ()
            quantize = host.quantize_int8_rowwise
            if group:
                quantize, options = self._rotations.quantized, (group,)
        stream = self._current_stream(device)
        out = self._by_addresses(
            plan, quantize, act, x, weight, weight_scale, bias, fused, shape, stream
        )
        if out is None:
            q, x_scale = quantize(x.view(m, -1), *options)
            out = torch.empty(shape, dtype=dtype, device=x.device)
            if bias is None:
                bias = host._empty_cuda_tensor(x.device, dtype)
            added = () if fused is None else fused.operands(host, m, n)
            tensors = (q, weight, x_scale, weight_scale, bias, out.view(m, n), *added)
            if not self.gemm.launch(plan, tensors, stream):
                return None
        if residual is None or fused is not None:
            return out
        out = residual.added(host, out.view(m, n))
        # A scale of more dimensions gives a matrix as many, with stock too.
        return out if len(shape) == 2 else out.reshape(shape)

    def _by_addresses(
        self,
        plan: Plan,
        quantize: Any,
        act: tuple[Any, ...],
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        fused: Residual | None,
        shape: tuple[int, ...],
        stream: int,
    ) -> torch.Tensor | None:
        """Launch both kernels, if the quantizer is ours and both were proven, and return the
        output, of that shape.

        What lies between them is no tensor: one allocation holds the quantized rows and, behind
        them, their scales.
        """
        op: Any = op_of(quantize)
        if op is None:
            return None
        device, m, n, k, dtype, _, _ = plan.key
        if act:
            launch_quantizer = op.launch(device, x.dtype, m, k, input_act=act[0])
        else:
            launch_quantizer = op.launch(device, x.dtype, m, k)
        launch_gemm = None if launch_quantizer is None else self.gemm.direct(plan)
        if launch_gemm is None:
            return None
        start = x.data_ptr()
        if not start or start % 16:
            return None
        on = x.device
        out = torch.empty(shape, dtype=dtype, device=on)
        scratch = torch.empty(m * (k + 4), dtype=torch.int8, device=on)
        q, d = scratch.data_ptr(), out.data_ptr()
        scale = q + m * k
        if misaligned((q, scale, d)):
            return None
        bias_start = 0 if bias is None else bias.data_ptr()
        addresses: tuple[int, ...]
        addresses = (q, weight.data_ptr(), scale, weight_scale.data_ptr(), bias_start, d)
        if fused is not None:
            added = fused.operands(self._host, m, n)
            addresses += (added[0].data_ptr(), added[1].data_ptr())
        operands: tuple[Any, ...] = (start, q, scale)
        if len(act) > 1:
            _, norm_weight, eps = act
            norm_weight = _aligned(norm_weight.to(x.dtype).contiguous())
            operands += (norm_weight.data_ptr(), float(eps))
        try:
            launch_quantizer(operands, stream)
        except Exception as error:
            op.failed(error, device)
            return None
        try:
            launch_gemm(addresses, stream)
        except Exception as error:
            self.gemm.failed(error, plan)
            return None
        return out


def _aligned(vector: torch.Tensor) -> torch.Tensor:
    return vector.clone() if misaligned((vector.data_ptr(),)) else vector


def _reference(entry: Any, residual_entry: Any, context: OpContext) -> Reference:
    """The stock functions behind both entries, the second one where there is any."""
    plain = references.cutlass(_stock_of(entry), context)
    if residual_entry is None:
        return plain
    adding = references.cutlass(_stock_of(residual_entry), context)

    def reference(call: Operands, stream: int) -> bool:
        return (plain if call.residual is None else adding)(call, stream)

    return reference


def _stock_of(entry: Any) -> Function:
    """The stock function behind an entry; refuses one that another patcher has replaced."""
    if not hasattr(entry, "__wrapped__"):
        return cast(Function, entry)
    if op_of(entry) is not None:
        return cast(Function, entry.__wrapped__)
    raise Refused(f"another patcher has replaced _C.{getattr(entry, '__name__', 'an entry')}")
