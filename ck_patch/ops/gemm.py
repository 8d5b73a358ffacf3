"""The INT8 GEMM that the ops share: decides once per shape, proves each kernel, fails to stock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch

from ck_patch import log
from ck_patch.context import OpContext
from ck_patch.device import DeviceProfile, interpreting, profile
from ck_patch.kernels.launch import Gemm, Launch, Operands, Rounding
from ck_patch.ops.failures import Failures
from ck_patch.ops.first_use import FirstUse
from ck_patch.ops.gemm_contract import (
    DTYPE_NAMES,
    call_key,
    misaligned,
    operands,
    well_formed,
)
from ck_patch.route import Backend, GemmCall, Route, decide, device_path

# The first use of a kernel is compared with stock on so many rows at either end of the output. Rows
# of K or N elements start on 16 bytes, as stock needs, at each multiple of 16.
_CHECKED_ROWS = 128
# A process that meets more shapes than this plans them anew; each plan is a few hundred bytes.
_MAX_PLANS = 4096


_ROUNDINGS: Mapping[Backend, Rounding] = MappingProxyType(
    {"cuda": "cutlass", "triton": "triton", "eager": "eager"}
)
_MISSING = object()

Reference = Callable[[Operands, int], bool]
"""Writes stock's result of a GEMM into its `d`, on a raw stream that is current; False if stock
declines the call."""


class _Kernel:
    """A GEMM, and whether its first result was equal to stock's."""

    def __init__(self, gemm: Gemm) -> None:
        self.gemm = gemm
        self.proven = False


@dataclass
class Plan:
    """One shape that our kernels take on one device.

    `launch` is there once the kernel is proven; `guarded` says that the tensors' device may not be
    the current one.
    """

    device: int
    kernel: _Kernel
    guarded: bool
    launch: Launch | None = None


class Int8Gemm:
    """`d = a @ b.T`, dequantized, by our kernels, for one op.

    The tensors are a int8 [M, K], b int8 [N, K], xs float32 with M values, ws float32 with N
    values, bias empty or N values, d [M, N], which is written in place, and, for the residual form,
    residual [M, N] and its scale of N values, of d's dtype. `code` is that of d's dtype (0 float32,
    1 float16, 2 bfloat16). `backend` is the one whose rounding is kept and whose policy counts;
    `reference` is its stock GEMM, which the first result of each kernel on each device is compared
    with.
    """

    def __init__(
        self, operation: str, backend: Backend, reference: Reference, context: OpContext
    ) -> None:
        self.useful = True
        """False once no device of this process can use our kernels: do not even ask."""
        self._operation = operation
        self._backend: Backend = backend
        self._reference = reference
        self._settings = context.settings
        self._failures = Failures(operation, context.breaker)
        # Only the CUDA backend's kernel reads the bias in the dtype that it expects.
        self._any_bias = backend != "cuda" or context.release.bias_dtype == "float32"
        self._check_all = context.check_first
        # None is a decision too: the call goes to stock.
        self._plans: dict[tuple[object, ...], Plan | None] = {}
        self._by_tensors: dict[tuple[object, ...], Plan | None] = {}
        self._kernels: dict[tuple[object, ...], _Kernel] = {}
        self._first_use = FirstUse()
        self._reviewed = False

    def run(self, tensors: Sequence[Any], code: object, stream: int) -> bool:
        """Write `d` on that stream and return True, or leave the call to stock.

        `tensors` and `code` may be anything. Raises nothing but what stock could not help: an error
        after which the CUDA context is dead.
        """
        try:
            key = call_key(tensors, code, stream)
        except Exception:
            # A tensor that does not answer, a sparse one for instance: stock will say.
            return False
        if key is None:
            return False
        plan = self._by_tensors.get(key, _MISSING)
        if plan is _MISSING:
            plan = self._plan_tensors(key, tensors, code)
        return plan is not None and self.launch(cast(Plan, plan), tensors, stream)

    def plan(
        self,
        device: int,
        m: int,
        n: int,
        k: int,
        out_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
        residual: bool = False,
    ) -> Plan | None:
        """How our kernels do this GEMM, or None if it is stock's. Raises as `run` does."""
        key = (device, m, n, k, out_dtype, bias_dtype, residual)
        plan = self._plans.get(key, _MISSING)
        if plan is not _MISSING:
            return cast("Plan | None", plan)
        try:
            if not self._reviewed:
                self._review()
            if len(self._plans) >= _MAX_PLANS:
                self._forget()
            found = self._plans[key] = self._decide(*key)
            return found
        except Exception as error:
            self._failed(error, device)
            return None

    def ready(self, plan: Plan) -> bool:
        """Whether `launch` can do more than decline, as far as that can be told beforehand."""
        return plan.kernel.proven or self._first_use.possible(plan.device)

    def launch(self, plan: Plan, tensors: Sequence[Any], stream: int) -> bool:
        """Write `d` and return True, or leave a call that is well formed to stock. Raises as `run`
        does."""
        try:
            return self._run(plan, tensors, stream)
        except Exception as error:
            self._failed(error, plan.device)
            return False

    def _run(self, plan: Plan, tensors: Sequence[Any], stream: int) -> bool:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if misaligned(pointers):
            if log.paths_wanted():
                log.path(
                    f"{self._operation}, a tensor that does not start on a multiple of 16 bytes: "
                    "stock (vector loads and the copy engine need that)"
                )
            return False
        if plan.guarded and torch.cuda.current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return self._launch(plan, tensors, pointers, stream)
        return self._launch(plan, tensors, pointers, stream)

    def _launch(
        self, plan: Plan, tensors: Sequence[Any], pointers: Sequence[int], stream: int
    ) -> bool:
        if plan.launch is None:
            if not plan.kernel.proven:
                return self._prove(plan.kernel, plan.device, operands(tensors), stream)
            plan.launch = plan.kernel.gemm.bind(operands(tensors))
        plan.launch(tensors, pointers, stream)
        return True

    def _prove(self, kernel: _Kernel, device: int, operands: Operands, stream: int) -> bool:
        """Run a kernel that is new to this device, and compare its result with stock's."""

        def run() -> None:
            # What is not written must not pass for right: the allocator may have handed out the
            # memory of an equal result.
            operands.d.fill_(torch.nan)
            kernel.gemm.run(operands)

        def fault() -> str | None:
            return self._compare(operands, stream)

        ran, found = self._first_use.prove(device, stream, run, fault)
        if found is not None:
            self._failures.open(device, f"{kernel.gemm.config.name} {found}")
            self._reconsider()
            return False
        # What the interpreter ran was not compared.
        kernel.proven = ran and device >= 0
        return ran

    def _compare(self, operands: Operands, stream: int) -> str | None:
        """What is wrong with `d`, measured by stock in its first and last rows; None if nothing.

        On a release newer than any tested in all rows. A row of stock's does not depend on the
        other rows, so that the comparison needs no second output. NaN equals NaN: the inputs may
        hold some.
        """
        m = operands.m
        tail = max(0, m - _CHECKED_ROWS) // 16 * 16
        blocks = range(0, m, _CHECKED_ROWS) if self._check_all else {0, tail}
        for first in blocks:
            last = m if first == tail else min(m, first + _CHECKED_ROWS)
            ours = operands.d[first:last]
            part = operands.rows(first, last, torch.full_like(ours, torch.nan))
            if not self._reference(part, stream):
                return "cannot be compared: stock declines the same call"
            if not bool(((ours == part.d) | (ours.isnan() & part.d.isnan())).all()):
                return "differs from stock"
        return None

    def _plan_tensors(
        self, key: tuple[object, ...], tensors: Sequence[torch.Tensor], code: object
    ) -> Plan | None:
        plan = None
        if well_formed(tensors, code):
            a, b, _, _, bias, d, *residual = tensors
            n, k = b.shape
            bias_dtype = bias.dtype if bias.numel() else None
            plan = self.plan(a.get_device(), a.shape[0], n, k, d.dtype, bias_dtype, bool(residual))
        if len(self._by_tensors) >= _MAX_PLANS:
            self._forget()
        self._by_tensors[key] = plan
        return plan

    def _decide(
        self,
        device: int,
        m: int,
        n: int,
        k: int,
        out_dtype: torch.dtype,
        bias_dtype: torch.dtype | None,
        residual: bool,
    ) -> Plan | None:
        call = GemmCall(
            m,
            n,
            k,
            DTYPE_NAMES[out_dtype],
            None if bias_dtype is None else DTYPE_NAMES[bias_dtype],
            accepts_bias=self._any_bias or bias_dtype in (None, out_dtype),
            residual=residual,
            backend=self._backend,
        )
        gpu = self._profile(device)
        route = decide(call, gpu, self._settings.int8)
        if device < 0 and not interpreting():
            route = Route(None, "Triton runs on the CPU only in its interpreter")
        broken = self._failures.reason(device)
        if broken is not None:
            route = Route(None, broken)
        if log.paths_wanted():
            bias = "no" if call.bias_dtype is None else call.bias_dtype
            extra = ", residual" if residual else ""
            log.path(
                f"{self._operation} {m}x{n}x{k}, {call.out_dtype} output, {bias} bias{extra}, "
                f"on {gpu.name}: {route.path} ({route.reason})"
            )
        if route.config is None:
            return None
        # Triton is imported by the first call that needs it, and no earlier.
        from ck_patch.kernels.registry import GEMMS

        gemm = GEMMS[route.config.family]()
        variant = gemm.variant(route.config, k)
        key = (device, route.config, out_dtype, bias_dtype, residual, variant)
        made = gemm(route.config, gpu.sm_count, _ROUNDINGS[self._backend])
        kernel = self._kernels.setdefault(key, _Kernel(made))
        return Plan(device, kernel, guarded=device >= 0 and torch.cuda.device_count() > 1)

    def _forget(self) -> None:
        """Plan everything anew. `_by_tensors` goes first: it is filled from the other."""
        self._by_tensors.clear()
        self._plans.clear()

    def _failed(self, error: Exception, device: int) -> None:
        """Account for a failure of ours; raises it again if stock cannot help."""
        if self._failures.account(error, device):
            self._reconsider()

    def _reconsider(self) -> None:
        self._forget()
        self._review()

    def _review(self) -> None:
        """Note whether any device of this process can use our kernels at all."""
        self._reviewed = True
        indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else (-1,)
        self.useful = any(self._can_use(index) for index in indices)

    def _can_use(self, device: int) -> bool:
        if self._failures.reason(device) is not None:
            return False
        try:
            path = device_path(self._profile(device), self._settings.int8, self._backend)
            return path.path == "triton"
        except Exception:
            # A driver that does not answer: if a call needs this device, its breaker will say why.
            return False

    def _profile(self, device: int) -> DeviceProfile:
        return profile(device, self._settings.assumed(device))
