"""Drop-in for `_C.cutlass_int8_dequant`: our GEMM where the policy says so, stock everywhere else."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
import wrapt

from ck_patch import log
from ck_patch.breaker import classify
from ck_patch.context import Function, OpContext
from ck_patch.device import profile
from ck_patch.dlpack import open_capsules, renewed
from ck_patch.kernels.launch import Gemm, Operands
from ck_patch.route import GemmCall, Route, decide, device_reason

OPERATION = "cutlass_int8_dequant"

_OUT_DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
)
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_CODES = {dtype: code for code, dtype in _OUT_DTYPES.items()}

# Rows at either end of the output that the first use of a kernel is compared on.
_CHECKED_ROWS = 128
# A process that meets more shapes than this plans them anew; each plan is a few hundred bytes.
_MAX_PLANS = 4096


@dataclass
class _Plan:
    """What was decided for one shape, and the kernel that it needs, shared with other shapes."""

    route: Route
    kernel: _Kernel | None


class _Kernel:
    """A GEMM that may be used once its first result was equal to stock's."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self.proven = False


class CutlassInt8Dequant:
    """The op behind the slot: opens the capsules, asks the policy, runs the kernel or stock.

    Stock's contract, read from its wheels: `a` int8 [M, K], `b` int8 [N, K], `xs` float32 with M
    values, `ws` float32 with N values, `bias` empty or N values, `d` [M, N] written in place, the
    code of its dtype (0 float32, 1 float16, 2 bfloat16) and a raw CUDA stream. True means that `d`
    was written, False that the caller should use cuBLAS. Whatever is not exactly this goes to
    stock, which answers with its own error.
    """

    def __init__(self, stock: Function, context: OpContext) -> None:
        self._stock = stock
        self._int8 = context.settings.int8
        self._breaker = context.breaker
        self._bias_float32 = context.release.bias_dtype == "float32"
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._kernels: dict[tuple[object, ...], _Kernel] = {}
        self._first_use = threading.Lock()
        self._useful: bool | None = None
        self._active = True
        self._function = wrapt.FunctionWrapper(stock, self._call)

    @property
    def function(self) -> Function:
        """The wrapper to install: signature, name and docstring are stock's."""
        return cast(Function, self._function)

    def deactivate(self) -> None:
        """Pass every further call straight to stock."""
        self._active = False

    def _call(
        self, stock: Function, instance: object, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if not self._active or kwargs or len(args) != 8:
            return stock(*args, **kwargs)
        opened = open_capsules(args[:6])
        device: int | None = None
        try:
            operands = _operands(opened, args[6])
            if operands is not None:
                device = operands.a.get_device()
                if self._compute(operands, device, args[7]):
                    return True
        except Exception as error:
            self._failed(error, device)
        return stock(*renewed(args[:6], opened), *args[6:])

    def _compute(self, operands: Operands, device: int, stream: int) -> bool:
        """Write `d` and return True, or leave the call to stock."""
        if self._useful is None:
            self._review()
        if self._breaker.reason(OPERATION, device) is not None:
            return False
        plan = self._plan(operands, device)
        kernel = plan.kernel
        if kernel is None:
            return False
        if device < 0:
            kernel.gemm(operands, stream)
            return True
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self._launch(kernel, operands, device, stream)
        return self._launch(kernel, operands, device, stream)

    def _launch(self, kernel: _Kernel, operands: Operands, device: int, stream: int) -> bool:
        if kernel.proven:
            kernel.gemm(operands, stream)
            return True
        # Another thread compiles this or another kernel: stock is quicker than to wait for it.
        if not self._first_use.acquire(blocking=False):
            return False
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):
                # Compiling, loading a module and comparing are all forbidden under capture.
                if torch.cuda.is_current_stream_capturing():
                    return False
                kernel.gemm(operands, stream)
                verdict = self._equals_stock(operands, stream)
        finally:
            self._first_use.release()
        if verdict is False:
            self._open_breaker(device, f"{kernel.gemm.config.name} differs from stock")
            return False
        kernel.proven = verdict is True
        return verdict is True

    def _equals_stock(self, operands: Operands, stream: int) -> bool | None:
        """Whether `d` is what stock writes, in its first and last rows; None if stock declines.

        A row of stock's does not depend on the other rows, so that the comparison needs no second
        output. NaN equals NaN: the inputs may hold some.
        """
        bias = operands.bias
        if bias is None:
            bias = operands.d.new_empty(0)
        elif self._bias_float32:
            bias = bias.float()
        rows = min(operands.m, _CHECKED_ROWS)
        # Rows of K or N elements start on 16 bytes, as stock needs, at each multiple of 16.
        for first in {0, (operands.m - rows) // 16 * 16}:
            ours = operands.d[first : first + rows]
            part = operands.rows(first, first + rows, torch.full_like(ours, torch.nan))
            values = (part.a, part.b, part.x_scale, part.w_scale, bias, part.d)
            capsules = renewed([None] * len(values), values)
            if not self._stock(*capsules, _CODES[part.d.dtype], stream):
                return None
            if not bool(((ours == part.d) | (ours.isnan() & part.d.isnan())).all()):
                return False
        return True

    def _plan(self, operands: Operands, device: int) -> _Plan:
        bias = operands.bias
        bias_dtype = None if bias is None else bias.dtype
        key = (
            device,
            operands.m,
            operands.n,
            operands.k,
            operands.d.dtype,
            bias_dtype,
            _aligned(operands),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(operands, device)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _make_plan(self, operands: Operands, device: int) -> _Plan:
        d, bias = operands.d, operands.bias
        call = GemmCall(
            operands.m,
            operands.n,
            operands.k,
            _DTYPE_NAMES[d.dtype],
            None if bias is None else _DTYPE_NAMES[bias.dtype],
            accepts_bias=bias is None or self._bias_float32 or bias.dtype == d.dtype,
            aligned=_aligned(operands),
        )
        gpu = profile(device)
        route = decide(call, gpu, self._int8)
        if log.paths_wanted():
            with_bias = "no bias" if bias is None else f"{call.bias_dtype} bias"
            log.path(
                f"{OPERATION} {call.m}x{call.n}x{call.k} {call.out_dtype}, {with_bias}, "
                f"on {gpu.name}: {route.path} ({route.reason})"
            )
        if route.config is None:
            return _Plan(route, None)
        # Triton is imported by the first call that needs it, and no earlier.
        from ck_patch.kernels.registry import GEMMS

        gemm = GEMMS[route.config.family]()
        variant = gemm.variant(route.config, call.k)
        key = (device, route.config, d.dtype, call.bias_dtype, variant)
        kernel = self._kernels.setdefault(key, _Kernel(gemm(route.config, gpu.sm_count)))
        return _Plan(route, kernel)

    def _failed(self, error: Exception, device: int | None) -> None:
        """Account for a failure of ours; raises it again if stock cannot help."""
        failure = classify(error)
        if failure == "sticky":
            raise error
        if failure == "memory":
            log.once(f"{OPERATION} memory", f"{OPERATION}: out of memory, this call goes to stock")
            return
        lines = str(error).strip().splitlines() or [""]
        self._open_breaker(device, f"{type(error).__name__}: {lines[0]}")

    def _open_breaker(self, device: int | None, reason: str) -> None:
        if self._breaker.open(OPERATION, device, reason):
            log.warn(
                f"{OPERATION} breaker {device}",
                f"{OPERATION} stays on stock on device {device} ({reason}); "
                "CK_PATCH_INT8=stock avoids the attempt, CK_PATCH=0 turns ck_patch off",
            )
        self._review()

    def _review(self) -> None:
        """Pass calls straight to stock from now on if no device of this process can use ours."""
        indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else (-1,)
        self._useful = any(
            self._breaker.reason(OPERATION, index) is None
            and device_reason(profile(index), self._int8) is None
            for index in indices
        )
        if not self._useful:
            self.deactivate()


def _operands(opened: Sequence[object], code: object) -> Operands | None:
    """The operands of a call that keeps stock's contract to the letter, or None."""
    if not all(type(value) is torch.Tensor for value in opened):
        return None
    a, b, xs, ws, bias, d = cast("Sequence[torch.Tensor]", opened)
    if a.dim() != 2 or b.dim() != 2:
        return None
    m, k = a.shape
    n = b.shape[0]
    device = a.get_device()
    if (
        b.shape[1] != k
        or d.shape != (m, n)
        or xs.numel() != m
        or ws.numel() != n
        or bias.numel() not in (0, n)
        or a.dtype != torch.int8
        or b.dtype != torch.int8
        or xs.dtype != torch.float32
        or ws.dtype != torch.float32
        or d.dtype != _OUT_DTYPES.get(cast(int, code))
        or bias.dtype not in _DTYPE_NAMES
    ):
        return None
    if not all(t.is_contiguous() and t.get_device() == device for t in (a, b, xs, ws, bias, d)):
        return None
    return Operands(a, b, xs, ws, bias if bias.numel() else None, d)


def _aligned(operands: Operands) -> bool:
    """Whether every tensor starts on 16 bytes, which vector loads and the copy engine need."""
    tensors = (operands.a, operands.b, operands.x_scale, operands.w_scale, operands.d)
    bias = 0 if operands.bias is None else operands.bias.data_ptr()
    return not any(tensor.data_ptr() % 16 for tensor in tensors) and bias % 16 == 0


def build(stock: Function, context: OpContext) -> CutlassInt8Dequant:
    """Make the op that replaces `stock`."""
    return CutlassInt8Dequant(stock, context)
