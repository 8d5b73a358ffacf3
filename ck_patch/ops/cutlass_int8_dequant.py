"""Drop-in for `_C.cutlass_int8_dequant`: our GEMM where the policy says so, else stock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
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
from ck_patch.kernels.launch import Gemm, Launch, Operands
from ck_patch.route import GemmCall, Route, decide, device_reason

OPERATION = "cutlass_int8_dequant"

_OUT_DTYPES: Mapping[int, torch.dtype] = MappingProxyType(
    {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}
)
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_CODES = {dtype: code for code, dtype in _OUT_DTYPES.items()}

# The first use of a kernel is compared with stock on so many rows at either end of the output. Rows
# of K or N elements start on 16 bytes, as stock needs, at each multiple of 16.
_CHECKED_ROWS = 128
# A process that meets more shapes than this plans them anew; each plan is a few hundred bytes.
_MAX_PLANS = 4096


class _Kernel:
    """A GEMM, and whether its first result was equal to stock's."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self.proven = False


@dataclass
class _Plan:
    """What was decided for one shape.

    `kernel` is None where the call goes to stock; without `eager` it goes there outside of a CUDA
    graph once the kernel is proven. `launch` is there once the kernel is proven. `guarded` says
    that the tensors' device may not be the current one.
    """

    device: int
    kernel: _Kernel | None = None
    eager: bool = True
    guarded: bool = False
    launch: Launch | None = None


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
        self._check_all = context.check_first
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._kernels: dict[tuple[object, ...], _Kernel] = {}
        self._first_use = threading.Lock()
        self._reviewed = False
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
        key = _key(opened, args[6])
        if key is not None:
            device = cast("torch.Tensor", opened[0]).get_device()
            try:
                plan = self._plans.get(key) or self._make_plan(key, opened, args[6])
                if plan.kernel is not None and self._run(plan, opened, args[7]):
                    return True
            except Exception as error:
                self._failed(error, device)
        return stock(*renewed(args[:6], opened), *args[6:])

    def _run(self, plan: _Plan, opened: Sequence[Any], stream: int) -> bool:
        """Write `d` and return True, or leave the call to stock."""
        pointers = [tensor.data_ptr() for tensor in opened]
        if _misaligned(pointers):
            return False
        if not plan.eager and cast(_Kernel, plan.kernel).proven and not _capturing():
            return False
        if plan.guarded and torch.cuda.current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self._launch(plan, opened, pointers, stream)
        return self._launch(plan, opened, pointers, stream)

    def _launch(
        self, plan: _Plan, opened: Sequence[Any], pointers: Sequence[int], stream: int
    ) -> bool:
        if plan.launch is None:
            kernel = cast(_Kernel, plan.kernel)
            if not kernel.proven:
                return self._prove(kernel, plan.device, _operands(opened), stream)
            plan.launch = kernel.gemm.bind(_operands(opened))
        plan.launch(opened, pointers, stream)
        return True

    def _prove(self, kernel: _Kernel, device: int, operands: Operands, stream: int) -> bool:
        """Run a kernel that is new to this device, and compare its result with stock's."""
        if device < 0:  # The interpreter: nothing to compile, and stock refuses CPU tensors.
            kernel.gemm.run(operands)
            return True
        # Another thread compiles this or another kernel: stock is quicker than to wait for it.
        if not self._first_use.acquire(blocking=False):
            return False
        try:
            with torch.cuda.stream(_stream(stream, device)):
                # Compiling, loading a module and comparing are all forbidden under capture.
                if _capturing():
                    return False
                kernel.gemm.run(operands)
                fault = self._compare(operands, stream)
        finally:
            self._first_use.release()
        kernel.proven = fault is None
        if fault is not None:
            self._open_breaker(device, f"{kernel.gemm.config.name} {fault}")
        return kernel.proven

    def _compare(self, operands: Operands, stream: int) -> str | None:
        """What is wrong with `d`, measured by stock in its first and last rows; None if nothing.

        On a release newer than any tested in all rows. A row of stock's does not depend on the
        other rows, so that the comparison needs no second output. NaN equals NaN: the inputs may
        hold some.
        """
        bias = operands.bias
        if bias is None:
            bias = operands.d.new_empty(0)
        elif self._bias_float32:
            bias = bias.float()
        m = operands.m
        tail = max(0, m - _CHECKED_ROWS) // 16 * 16
        blocks = range(0, m, _CHECKED_ROWS) if self._check_all else {0, tail}
        for first in blocks:
            last = m if first == tail else min(m, first + _CHECKED_ROWS)
            ours = operands.d[first:last]
            part = operands.rows(first, last, torch.full_like(ours, torch.nan))
            values = (part.a, part.b, part.x_scale, part.w_scale, bias, part.d)
            capsules = renewed([None] * len(values), values)
            if not self._stock(*capsules, _CODES[part.d.dtype], stream):
                return "cannot be compared: stock declines the same call"
            if not bool(((ours == part.d) | (ours.isnan() & part.d.isnan())).all()):
                return "differs from stock"
        return None

    def _make_plan(self, key: tuple[object, ...], opened: Sequence[object], code: object) -> _Plan:
        if not self._reviewed:
            self._review()
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        plan = self._plans[key] = self._decide(opened, code)
        return plan

    def _decide(self, opened: Sequence[Any], code: object) -> _Plan:
        device = opened[0].get_device()
        stays = _Plan(device)
        if not _well_formed(opened, code):
            return stays
        operands = _operands(opened)
        gpu = profile(device)
        call = self._describe(operands)
        route = decide(call, gpu, self._int8)
        broken = self._breaker.reason(OPERATION, device)
        if broken is not None:
            route = Route(None, broken)
        if log.paths_wanted():
            bias = "no" if call.bias_dtype is None else call.bias_dtype
            log.path(
                f"{OPERATION} {call.m}x{call.n}x{call.k}, {call.out_dtype} output, {bias} bias, "
                f"on {gpu.name}: {route.path} ({route.reason})"
            )
        if route.config is None:
            return stays
        # Triton is imported by the first call that needs it, and no earlier.
        from ck_patch.kernels.registry import GEMMS

        gemm = GEMMS[route.config.family]()
        variant = gemm.variant(route.config, call.k)
        key = (device, route.config, call.out_dtype, call.bias_dtype, variant)
        kernel = self._kernels.setdefault(key, _Kernel(gemm(route.config, gpu.sm_count)))
        guarded = device >= 0 and torch.cuda.device_count() > 1
        return _Plan(device, kernel, route.eager, guarded)

    def _describe(self, operands: Operands) -> GemmCall:
        bias = operands.bias
        return GemmCall(
            operands.m,
            operands.n,
            operands.k,
            _DTYPE_NAMES[operands.d.dtype],
            None if bias is None else _DTYPE_NAMES[bias.dtype],
            accepts_bias=bias is None or self._bias_float32 or bias.dtype == operands.d.dtype,
        )

    def _failed(self, error: Exception, device: int) -> None:
        """Account for a failure of ours; raises it again if stock cannot help."""
        failure = classify(error)
        if failure == "sticky":
            raise error
        if failure == "memory":
            log.once(f"{OPERATION} memory", f"{OPERATION}: out of memory, this call goes to stock")
            return
        lines = str(error).strip().splitlines() or [""]
        self._open_breaker(device, f"{type(error).__name__}: {lines[0]}")

    def _open_breaker(self, device: int, reason: str) -> None:
        if self._breaker.open(OPERATION, device, reason):
            log.warn(
                f"{OPERATION} breaker {device}",
                f"{OPERATION} stays on stock on device {device} ({reason}); "
                "CK_PATCH_INT8=stock avoids the attempt, CK_PATCH=0 turns ck_patch off",
            )
        self._plans.clear()
        self._review()

    def _review(self) -> None:
        """Pass calls straight to stock from now on if no device of this process can use ours."""
        self._reviewed = True
        indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else (-1,)
        if all(
            self._breaker.reason(OPERATION, index) is not None
            or device_reason(profile(index), self._int8) is not None
            for index in indices
        ):
            self.deactivate()


def _key(opened: Sequence[Any], code: object) -> tuple[object, ...] | None:
    """All that a plan depends on, addresses aside; None unless all six are tensors.

    This runs at every call: plain attribute reads, and everything that can be told from them is
    decided once per key.
    """
    a, b, xs, ws, bias, d = opened
    if not type(a) is type(b) is type(xs) is type(ws) is type(bias) is type(d) is torch.Tensor:
        return None
    return (
        code,
        a.shape,
        b.shape,
        xs.shape,
        ws.shape,
        bias.shape,
        d.shape,
        a.dtype,
        b.dtype,
        xs.dtype,
        ws.dtype,
        bias.dtype,
        d.dtype,
        a.device,
        b.device,
        xs.device,
        ws.device,
        bias.device,
        d.device,
        a.is_contiguous()
        and b.is_contiguous()
        and xs.is_contiguous()
        and ws.is_contiguous()
        and bias.is_contiguous()
        and d.is_contiguous(),
    )


def _well_formed(opened: Sequence[torch.Tensor], code: object) -> bool:
    """Whether a call keeps stock's contract to the letter; stock answers the others itself."""
    a, b, xs, ws, bias, d = opened
    if a.dim() != 2 or b.dim() != 2:
        return False
    m, k = a.shape
    n = b.shape[0]
    return (
        b.shape[1] == k
        and d.shape == (m, n)
        and xs.numel() == m
        and ws.numel() == n
        and bias.numel() in (0, n)
        and a.dtype == b.dtype == torch.int8
        and xs.dtype == ws.dtype == torch.float32
        and d.dtype == _OUT_DTYPES.get(cast(int, code))
        and bias.dtype in _DTYPE_NAMES
        and all(t.is_contiguous() and t.device == a.device for t in opened)
    )


def _operands(opened: Sequence[torch.Tensor]) -> Operands:
    a, b, xs, ws, bias, d = opened
    return Operands(a, b, xs, ws, bias if bias.numel() else None, d)


# What torch.cuda.is_current_stream_capturing() calls where CUDA is there.
_capturing: Callable[[], bool] = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def _stream(pointer: int, device: int) -> torch.cuda.Stream:
    # ExternalStream(0) would be a new stream out of torch's pool.
    if pointer == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device)


def _misaligned(pointers: Sequence[int]) -> int:
    """Non-zero unless every tensor starts on 16 bytes, as vector loads and the copy engine need;
    an empty bias starts at zero."""
    a, b, xs, ws, bias, d = pointers
    return (a | b | xs | ws | bias | d) & 15


def build(stock: Function, context: OpContext) -> CutlassInt8Dequant:
    """Make the op that replaces `stock`."""
    return CutlassInt8Dequant(stock, context)
