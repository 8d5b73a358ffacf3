"""Drop-ins for `int8_linear` of the eager and the Triton backend: the path that the policy names.

Both functions of the host do the same things in the same order: input activation, rotation, row
quantizer, GEMM, residual. Ours replace the quantizer and the GEMM, each with the rounding of the
backend it stands in for; the rest is the host's own code.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from ck_patch import log, notices
from ck_patch.context import Function, Op, OpContext, Refused
from ck_patch.device import interpreting, profile
from ck_patch.ops import references, triton_rows
from ck_patch.ops.failures import Failures, decline, hand_over
from ck_patch.ops.gemm import Int8Gemm
from ck_patch.ops.gemm_contract import CODES
from ck_patch.ops.half_linear import HalfLinear
from ck_patch.ops.watched import watched
from ck_patch.route import Backend, DevicePath, device_path

_COMPUTE = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_QUANTIZERS = {"eager": "quantize_int8_rowwise", "triton": "triton_quantize_rowwise"}
# How many columns of x make one of an activation's; an unknown activation is stock's to refuse.
_ACT_WIDTHS = {None: 1, "none": 1, "gelu_tanh": 1, "rms_norm": 1, "swiglu": 2, "situ": 2}


class Int8Linear(Op):
    """The op behind both slots.

    It takes x [..., K] (2K with a gated activation) float32, float16 or bfloat16, weight int8
    [N, K], contiguous, weight_scale with one or N values, bias of N values or none, all on the
    device of x. Everything else goes to `fallback`, which is stock or as good as stock.
    """

    def __init__(
        self, backend: Backend, stock: Function, fallback: Function, context: OpContext
    ) -> None:
        self._backend: Backend = backend
        self._host: Any = sys.modules[stock.__module__]
        self._settings = context.settings
        operation = f"{backend}_int8_linear"
        reference = getattr(references, backend)(self._host)
        self._gemm = Int8Gemm(operation, backend, reference, context)
        self._failures = Failures(operation, context.breaker)
        self._half = HalfLinear(operation, context.breaker)
        self._quantizer = _QUANTIZERS[backend]
        self._names = frozenset(inspect.signature(stock).parameters)
        self._paths: dict[int, DevicePath] = {}
        self._operation = operation
        # The CPU has something to do only where somebody asks for it.
        self._on_cpu = interpreting() or context.settings.assumed(-1) is not None

        # Not a wrapt.FunctionWrapper: Dynamo traces through a plain function as it does stock's.
        @functools.wraps(stock)
        def function(*args: Any, **kwargs: Any) -> Any:
            x = args[0] if args else kwargs.get("x")
            if (
                not (self._active and isinstance(x, torch.Tensor))
                or not (x.is_cuda or (self._on_cpu and x.device.type == "cpu"))
                # A tracer must not see a launch, nor a transform miss one.
                or watched()
                or kwargs.keys() - self._names
                or len(args) > len(self._names)
            ):
                return fallback(*args, **kwargs)
            out = self._attempt(args, kwargs)
            if out is not None:
                return out
            decline(self._operation, x)
            return fallback(*args, **kwargs)

        super().__init__(function)

    def _attempt(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        try:
            return self._linear(*args, **kwargs)
        except Exception as error:
            # The GEMM and the quantizer account for their own failures.
            hand_over(self._operation, error)
            return None

    def _linear(
        self,
        x: Any = None,
        weight: Any = None,
        weight_scale: Any = None,
        bias: Any = None,
        out_dtype: Any = torch.bfloat16,
        convrot: Any = False,
        convrot_groupsize: Any = 256,
        input_act: Any = None,
        input_act_weight: Any = None,
        input_act_eps: Any = 0.0,
        residual: Any = None,
        residual_scale: Any = None,
    ) -> torch.Tensor | None:
        """The result, or None where the call is stock's."""
        device = x.get_device()
        path = self._path(device)
        if (
            path.path == "stock"
            or not _is_regular(x, weight, weight_scale, bias, out_dtype)
            or _tracks_gradients(x, weight_scale, bias, input_act_weight)
        ):
            return None
        n, k = weight.shape
        if (
            x.shape[-1] != k * _ACT_WIDTHS.get(input_act, 0)
            or (residual is not None and residual_scale is None)
            or (convrot and (k % convrot_groupsize or convrot_groupsize < 4))
        ):
            return None
        activated = functools.partial(
            self._activated, x, input_act, input_act_weight, input_act_eps
        )
        m = x.numel() // x.shape[-1]
        result: torch.Tensor | None
        if m == 0:
            # Stock's eager backend has nothing to put together then, and raises.
            result = activated().new_empty((0, n), dtype=out_dtype)
        else:
            run = self._dequantized if path.path in _COMPUTE else self._fused
            group = convrot_groupsize if convrot else 0
            scale = weight_scale.reshape(-1).float().contiguous()
            result = run(m, activated, group, weight, scale, bias, out_dtype)
        if result is None:
            return None
        result = result.reshape(*x.shape[:-1], n)
        if residual is None:
            return result
        return self._host._apply_residual(result, residual, residual_scale)  # type: ignore[no-any-return]

    def _path(self, device: int) -> DevicePath:
        path = self._paths.get(device)
        if path is None:
            gpu = profile(device, self._settings.assumed(device))
            path = self._paths[device] = device_path(gpu, self._settings.int8, self._backend)
            notices.say(device, gpu, self._backend, path)
        return path

    def _activated(
        self, x: torch.Tensor, act: str | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        if act in (None, "none"):
            return x
        extra = () if weight is None else (weight, eps)
        return self._host._apply_input_act(x, act, *extra)  # type: ignore[no-any-return]

    def _rotated(self, x: torch.Tensor, group: int) -> torch.Tensor:
        h = self._host._build_hadamard(group, device=x.device, dtype=x.dtype)
        return self._host._rotate_activation(x, h, group)  # type: ignore[no-any-return]

    def _fused(
        self,
        m: int,
        activated: Callable[[], torch.Tensor],
        group: int,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Quantize and multiply by our kernels."""
        n, k = weight.shape
        if bias is not None:
            bias = bias.detach().reshape(-1)
            bias = bias if bias.data_ptr() % 16 == 0 else bias.clone()
        device = weight.get_device()
        bias_dtype = None if bias is None else bias.dtype
        plan = self._gemm.plan(device, m, n, k, out_dtype, bias_dtype)
        # Ask before the activation is quantized: declining later would cost that.
        if plan is None or not self._gemm.ready(plan) or weight.data_ptr() % 16:
            return None
        if weight_scale.numel() != n or weight_scale.data_ptr() % 16:
            weight_scale = weight_scale.expand(n).clone(memory_format=torch.contiguous_format)
        x = activated()
        if group:
            x = self._rotated(x, group)
        # The host's quantizer as it is now: a slot of its own.
        quantized = getattr(self._host, self._quantizer)(x.reshape(m, k).contiguous())
        if bias is None:
            bias = weight_scale.new_empty(0)
        out = torch.empty((m, n), dtype=out_dtype, device=weight.device)
        stream = torch.cuda.current_stream(device).cuda_stream if device >= 0 else 0
        tensors = (quantized[0], weight, quantized[1], weight_scale, bias, out)
        return out if self._gemm.launch(plan, tensors, stream) else None

    def _dequantized(
        self,
        m: int,
        activated: Callable[[], torch.Tensor],
        group: int,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Multiply without quantizing, in the half-precision dtype that the path names."""
        device = weight.get_device()
        if self._failures.reason(device) is not None:
            return None
        x = activated().reshape(m, weight.shape[1])
        hadamard = None
        if group:
            hadamard = self._host._build_hadamard(group, device=x.device, dtype=x.dtype)
        path = self._path(device)
        compute = _COMPUTE[path.path]
        try:
            out = self._half(x, weight, weight_scale, bias, out_dtype, compute, hadamard)
        except Exception as error:
            self._failures.account(error, device)
            return None
        if log.paths_wanted():
            log.path(
                f"{self._operation} {m}x{weight.shape[0]}x{weight.shape[1]}, "
                f"{str(out_dtype).removeprefix('torch.')} output: {path.path} ({path.reason})"
            )
        return out


def _is_regular(x: Any, weight: Any, weight_scale: Any, bias: Any, out_dtype: Any) -> bool:
    plain = (torch.Tensor, torch.nn.Parameter)
    if not (type(x) in plain and type(weight) in plain and type(weight_scale) in plain):
        return False
    if bias is not None and not (
        type(bias) in plain
        and bias.dtype in CODES
        and bias.numel() == weight.shape[0]
        and bias.device == x.device
        and bias.is_contiguous()
        and not bias.is_neg()
    ):
        return False
    return (
        x.dim() > 0
        and weight.dim() == 2
        and weight.numel() > 0
        and x.dtype in CODES
        and out_dtype in CODES
        and weight.dtype == torch.int8
        and weight.is_contiguous()
        and weight_scale.dtype in CODES
        and weight_scale.numel() in (1, weight.shape[0])
        and weight.device == weight_scale.device == x.device
        # Their memory holds the values with the other sign.
        and not (x.is_neg() or weight.is_neg() or weight_scale.is_neg())
    )


def _tracks_gradients(*operands: Any) -> bool:
    """Whether stock's result would require a gradient; what is added to it decides for itself."""
    return torch.is_grad_enabled() and any(
        isinstance(operand, torch.Tensor) and operand.requires_grad for operand in operands
    )


def build_eager(stock: Function, context: OpContext) -> Int8Linear:
    """Make the op that replaces the eager backend's `int8_linear`."""
    if context.check_first:
        raise Refused("a release newer than the tested ones may do other things in int8_linear")
    return Int8Linear("eager", stock, stock, context)


def build_triton(stock: Function, context: OpContext) -> Int8Linear | triton_rows.RowChunks:
    """Make the op that replaces the Triton backend's, which fails at 2^31 elements: what is not
    ours goes to stock in chunks."""
    chunked = triton_rows.build_linear(stock, context)
    if context.check_first:
        return chunked
    return Int8Linear("triton", stock, chunked.function, context)
