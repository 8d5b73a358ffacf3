"""Drop-in for `backends.cuda.int8_linear`: who computes a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from ck_patch import log, notices
from ck_patch.context import Function, Op, OpContext, Refused
from ck_patch.device import profile
from ck_patch.ops import eager_host
from ck_patch.ops.failures import decline, hand_over
from ck_patch.ops.quantized_linear import QuantizedLinear
from ck_patch.ops.watched import watched
from ck_patch.route import DevicePath, device_path

_NO_DEVICE = DevicePath("stock", "the device does not answer")


class CudaInt8Linear(Op):
    """The op behind the slot.

    What the registry passes, keywords only, is computed by `QuantizedLinear`, and what that does
    not take goes to stock whole.

    On a device that stock's kernels cannot run on, which a registry that was validated against
    another device of the host does not know, and where CK_PATCH_INT8=fp16 asks for it, the eager
    backend's `int8_linear` gets the call; in the latter case only if it is ours.
    """

    def __init__(self, stock: Function, context: OpContext) -> None:
        if context.check_first:
            raise Refused("a release newer than the tested ones may do other things in int8_linear")
        self._settings = context.settings
        self._signature = inspect.signature(stock)
        self._linear = QuantizedLinear("cuda_int8_linear", stock, context)
        self._paths: dict[int, DevicePath] = {}

        # Not a wrapt.FunctionWrapper: Dynamo traces through a plain function as it does stock's.
        @functools.wraps(stock)
        def function(*args: Any, **kwargs: Any) -> Any:
            # A tracer must not see a launch, nor a transform miss one.
            if not self._active or watched():
                return stock(*args, **kwargs)
            return self._call(stock, args, kwargs)

        super().__init__(function)

    def _call(self, stock: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        path = self._path(args[0] if args else kwargs.get("x"))
        if path.path != "stock" and not path.ours:
            return self._redirect(stock, path, args, kwargs)
        linear = self._linear
        if (
            not path.ours
            or args
            or not linear.gemm.useful
            or (linear.unknown and not linear.unknown.isdisjoint(kwargs))
        ):
            return stock(*args, **kwargs)
        try:
            out = linear.compute(**kwargs)
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


def build(stock: Function, context: OpContext) -> CudaInt8Linear:
    """Make the op that replaces `stock`."""
    return CudaInt8Linear(stock, context)
