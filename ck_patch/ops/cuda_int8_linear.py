"""Drop-in for `backends.cuda.int8_linear`: quantizer and GEMM without capsules in between.

comfy_kitchen passes every tensor of a call to its extension in a DLPack capsule, and what replaces
the GEMM entry has to open six of them again. Here the tensors are at hand.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch

from ck_patch import log, notices
from ck_patch.context import Function, OpContext, Refused
from ck_patch.device import profile
from ck_patch.ops import eager_host, references
from ck_patch.ops.cutlass_int8_dequant import CutlassInt8Dequant
from ck_patch.ops.failures import decline, hand_over
from ck_patch.ops.gemm import Int8Gemm, Plan
from ck_patch.ops.gemm_contract import CODES, misaligned
from ck_patch.ops.watched import watched
from ck_patch.route import DevicePath, device_path

_NO_DEVICE = DevicePath("stock", "the device does not answer")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
# A process that meets more shapes than this asks anew.
_MAX_SHAPES = 4096


class CudaInt8Linear:
    """The op behind the slot.

    It takes what the registry passes, keywords only, for a plain or a rotated linear: x [..., K]
    float32, float16 or bfloat16 with at least three rows, weight int8 [N, K], weight_scale float32
    with one or N values, bias of N values in the output dtype or none. Input activations,
    residuals, rotations that stock does in two steps, one or two rows (which have kernels of their
    own) and everything else go to stock whole. The activation is quantized by what stands in the
    host's module; where that is ours, its kernel is launched from here once it has been proven.

    On a device that stock's kernels cannot run on, which a registry that was validated against
    another device of the host does not know, and where CK_PATCH_INT8=fp16 asks for it, the eager
    backend's `int8_linear` gets the call; in the latter case only if it is ours.
    """

    def __init__(self, stock: Function, context: OpContext) -> None:
        if context.check_first:
            raise Refused("a release newer than the tested ones may do other things in int8_linear")
        self._host: Any = sys.modules[stock.__module__]
        self._entry = self._host._C.cutlass_int8_dequant
        reference = references.cutlass(_stock_of(self._entry), context)
        self._gemm = Int8Gemm("cuda_int8_linear", "cuda", reference, context)
        self._settings = context.settings
        self._signature = inspect.signature(stock)
        self._paths: dict[int, DevicePath] = {}
        # By device, rows, K and group size: whether stock rotates and quantizes in one kernel.
        self._in_one_step: dict[tuple[object, ...], bool] = {}
        self._device_type = "cuda"
        # A CPU build of torch has neither of the two.
        self._current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
        self._current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._active = True

        # Not a wrapt.FunctionWrapper: Dynamo traces through a plain function as it does stock's.
        @functools.wraps(stock)
        def function(*args: Any, **kwargs: Any) -> Any:
            # A tracer must not see a launch, nor a transform miss one.
            if not self._active or watched():
                return stock(*args, **kwargs)
            return self._call(stock, args, kwargs)

        self._function = function

    @property
    def function(self) -> Function:
        """The function to install; signature and docstring are stock's."""
        return self._function

    def deactivate(self) -> None:
        """Pass every further call straight to stock."""
        self._active = False

    def _call(self, stock: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        path = self._path(args[0] if args else kwargs.get("x"))
        if path.path != "stock" and not path.ours:
            return self._redirect(stock, path, args, kwargs)
        if (
            not path.ours
            or args
            or not self._gemm.useful
            # Whoever replaced the entry since wants it called.
            or self._host._C.cutlass_int8_dequant is not self._entry
        ):
            return stock(*args, **kwargs)
        try:
            out = self._linear(**kwargs)
        except Exception as error:
            # The GEMM accounts for its own failures.
            hand_over("cuda_int8_linear", error)
            out = None
        if out is not None:
            return out
        decline("cuda_int8_linear", kwargs.get("x"))
        return stock(**kwargs)

    def _redirect(
        self, stock: Function, path: DevicePath, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Have the eager backend compute what ours cannot, or what is to be had in FP16."""
        if path.path != "eager" and not eager_host.linear_is_ours():
            return stock(*args, **kwargs)
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return stock(*args, **kwargs)  # Which says so.
        x = given["x"]
        if log.paths_wanted():
            shape = "x".join(map(str, x.shape))
            log.path(f"cuda_int8_linear, x {shape}: the eager backend ({path.reason})")
        return eager_host.module().int8_linear(
            **{**given, "out_dtype": given.get("out_dtype") or x.dtype}
        )

    def _path(self, x: object) -> DevicePath:
        """The path of the device that x is on."""
        try:
            device = x.get_device()  # type: ignore[attr-defined]
            path = self._paths.get(device)
            if path is None:
                gpu = profile(device, self._settings.assumed(device))
                found = device_path(gpu, self._settings.int8)
                notices.say(device, gpu, "cuda", found)
                path = self._paths[device] = found
            return path
        except Exception:
            # Not a tensor, or a driver that does not answer: stock will say.
            return _NO_DEVICE

    def _linear(
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
        """The result, or None where the call is stock's."""
        if unknown or residual is not None or input_act not in (None, "none"):
            return None
        if not type(x) is type(weight) is type(weight_scale) is torch.Tensor:
            return None
        shape, weight_shape = x.shape, weight.shape
        if len(weight_shape) != 2 or not shape or shape[-1] != weight_shape[1]:
            return None
        n, k = weight_shape
        rows = shape[0] if len(shape) == 2 else math.prod(shape[:-1])
        on, device = x.device, x.get_device()
        dtype = out_dtype or x.dtype
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
            or weight_scale.numel() not in (1, n)
            or not (weight.is_contiguous() and weight_scale.is_contiguous())
            or not device == weight.get_device() == weight_scale.get_device()
            # Stock exports no tensor of a device that is not the current one.
            or device != self._current_device()
            or self._host._DISABLE_CUTLASS_INT8
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
        plan = self._gemm.plan(device, rows, n, k, dtype, None if bias is None else dtype)
        # Ask before the activation is quantized: declining later would cost that.
        if plan is None or not self._gemm.ready(plan):
            return None
        if misaligned(
            (
                weight.data_ptr(),
                weight_scale.data_ptr() if weight_scale.numel() == n else 0,
                0 if bias is None else bias.data_ptr(),
            )
        ):
            return None
        if convrot and not self._rotates_in_one_step(x, rows, k, convrot_groupsize):
            return None
        if weight_scale.numel() != n:
            weight_scale = weight_scale.reshape(-1).expand(n).contiguous()
        x = x.contiguous()
        host = self._host
        quantize = host.quantize_int8_rowwise_convrot64 if convrot else host.quantize_int8_rowwise
        out = torch.empty((*shape[:-1], n), dtype=dtype, device=on)
        stream = self._current_stream(device)
        if self._by_addresses(plan, quantize, x, weight, weight_scale, bias, out, stream):
            return out
        x = x.view(rows, k)
        q, x_scale = quantize(x, 256) if convrot else quantize(x)
        if bias is None:
            bias = host._empty_cuda_tensor(on, dtype)
        tensors = (q, weight, x_scale, weight_scale, bias, out.view(rows, n))
        return out if self._gemm.launch(plan, tensors, stream) else None

    def _by_addresses(
        self,
        plan: Plan,
        quantize: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        stream: int,
    ) -> bool:
        """Launch both kernels and return True, if the quantizer is ours and both were proven.

        What lies between them is no tensor: one allocation holds the quantized rows and, behind
        them, their scales.
        """
        op: Any = getattr(quantize, "ck_patch_op", None)
        # What wraps ours may have its attributes.
        if op is None or op.function is not quantize:
            return False
        device, m, _, k, *_ = plan.key
        launch_quantizer = op.launch(device, x.dtype, m, k)
        launch_gemm = None if launch_quantizer is None else self._gemm.direct(plan)
        if launch_gemm is None:
            return False
        scratch = torch.empty(m * (k + 4), dtype=torch.int8, device=x.device)
        start, q, d = x.data_ptr(), scratch.data_ptr(), out.data_ptr()
        scale = q + m * k
        if not start or misaligned((start, q, scale, d)):
            return False
        try:
            launch_quantizer((start, q, scale), stream)
        except Exception as error:
            op.failed(error, device)
            return False
        bias_start = 0 if bias is None else bias.data_ptr()
        addresses = (q, weight.data_ptr(), scale, weight_scale.data_ptr(), bias_start, d)
        try:
            launch_gemm(addresses, stream)
        except Exception as error:
            self._gemm.failed(error, plan)
            return False
        return True

    def _rotates_in_one_step(self, x: torch.Tensor, m: int, k: int, group: object) -> bool:
        """Whether stock rotates and quantizes these rows in one kernel; its own condition."""
        key = (x.get_device(), m, k, group)
        found = self._in_one_step.get(key)
        if found is None:
            if len(self._in_one_step) >= _MAX_SHAPES:
                self._in_one_step.clear()
            found = self._in_one_step[key] = (
                group == 256
                and k % 256 == 0
                and k <= self._host._CONVROT_FUSED_MAX_K
                and self._host._convrot_fused_shared_memory_fits(x.reshape(m, k), k, group)
            )
        return found


def _stock_of(entry: Any) -> Function:
    """The stock function behind the entry; refuses one that another patcher has replaced."""
    if not hasattr(entry, "__wrapped__"):
        return cast(Function, entry)
    wrapper = getattr(entry, "_self_wrapper", None)
    if isinstance(getattr(wrapper, "__self__", None), CutlassInt8Dequant):
        return cast(Function, entry.__wrapped__)
    raise Refused("another patcher has replaced _C.cutlass_int8_dequant")


def build(stock: Function, context: OpContext) -> CudaInt8Linear:
    """Make the op that replaces `stock`."""
    return CudaInt8Linear(stock, context)
