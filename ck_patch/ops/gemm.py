"""The INT8 GEMM that the ops share: decides once per shape, proves each kernel, fails to stock."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ck_patch import log
from ck_patch.context import OpContext
from ck_patch.kernels.launch import Operands
from ck_patch.kernels.replay import Replay
from ck_patch.ops.exploring import Explorer
from ck_patch.ops.failures import Failures
from ck_patch.ops.first_use import FirstUse
from ck_patch.ops.gemm_contract import PlanKey, misaligned, operands, plan_key
from ck_patch.ops.gemm_plan import Kernel, Plan
from ck_patch.ops.gemm_planner import Planner
from ck_patch.ops.references import Reference, StockGemm
from ck_patch.route import Backend
from ck_patch.tuner import Tuner

# The first use of a kernel is compared with stock on so many rows at either end of the output. Rows
# of K or N elements start on 16 bytes, as stock needs, at each multiple of 16.
_CHECKED_ROWS = 128
# A process that meets more shapes than this plans them anew; each plan is a few hundred bytes.
_MAX_PLANS = 4096


class Int8Gemm:
    """`d = a @ b.T`, dequantized, by our kernels, for one op.

    The tensors are a int8 [M, K], b int8 [N, K], xs float32 with M values, ws float32 with N
    values, bias empty or N values, d [M, N], which is written in place, and, for the residual form,
    residual [M, N] and its scale of N values, of d's dtype. `code` is that of d's dtype (0 float32,
    1 float16, 2 bfloat16). `backend` is the one whose rounding is kept and whose policy counts;
    `reference` is its stock GEMM, which the first result of each kernel on each device is compared
    with. Where the tuner has a trial of several candidates, they take turns: each call's result is
    one of theirs, which are all the same.
    """

    def __init__(
        self, operation: str, backend: Backend, reference: Reference, context: OpContext
    ) -> None:
        self.useful = True
        """False once no device of this process can use our kernels: do not even ask."""
        self._operation = operation
        self._reference = reference
        self._check_all = context.check_first
        # None is a decision too: the call goes to stock.
        self._plans: dict[PlanKey, Plan | None] = {}
        self._first_use = FirstUse()
        # What is chosen among ours alone must not be kept for those who have not asked for that.
        tuner = context.tuner if context.settings.int8 == "auto" else Tuner()
        self._failures = Failures(operation, context.breaker)
        self._planner = Planner(operation, backend, reference, context, self._failures, tuner)
        self._explorer = Explorer(self._launch, self._failures, tuner)
        self._reviewed = False

    def run(self, tensors: Sequence[Any], code: object, stream: int) -> bool:
        """Write `d` on that stream and return True, or leave the call to stock.

        `tensors` and `code` may be anything. Raises nothing but what stock could not help: an error
        after which the CUDA context is dead.
        """
        if not type(code) is type(stream) is int:
            return False
        try:
            key = plan_key(tensors, code)
        except Exception:
            # A tensor that does not answer, a sparse one for instance: stock will say.
            return False
        plan = None if key is None else self.plan(*key)
        return plan is not None and self.launch(plan, tensors, stream)

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
        try:
            return self._plans[key]
        except KeyError:
            pass
        try:
            if not self._reviewed:
                self._review()
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            found = self._plans[key] = self._planner.decide(key)
            return found
        except Exception as error:
            self._failed(error, device)
            return None

    def ready(self, plan: Plan) -> bool:
        """Whether `launch` can do more than decline, as far as that can be told beforehand."""
        return (
            plan.kernel.proven
            or any(kernel.proven for kernel in plan.kernels.values())
            or self._first_use.possible(plan.device)
        )

    def direct(self, plan: Plan) -> Replay | None:
        """What launches the plan's kernel by the addresses of its tensors: for a caller that has
        made the checks of `launch`, and reports what is raised to `failed`. None where `launch` has
        to see to it.

        The tensors start on 16 bytes and are of the current device.
        """
        if plan.trial is not None and not plan.trial.rests():
            return None
        return plan.launches.get(plan.kernel)

    def failed(self, error: Exception, plan: Plan) -> None:
        """Account for a failure of what `direct` gave. Raises as `run` does."""
        self._failed(error, plan.device)

    def launch(self, plan: Plan, tensors: Sequence[Any], stream: int) -> bool:
        """Write `d` and return True, or leave a call that is well formed to stock. Raises as `run`
        does."""
        try:
            addresses = [tensor.data_ptr() for tensor in tensors]
            if misaligned(addresses):
                log.path(
                    f"{self._operation}, a tensor that does not start on a multiple of 16 bytes: "
                    "stock (vector loads and the copy engine need that)"
                )
                return False
            here = not plan.guarded or torch.cuda.current_device() == plan.device
            if plan.trial is None or plan.trial.rests():
                launch = plan.launches.get(plan.kernel)
                if launch is not None and here:
                    launch(addresses, stream)
                    return True
                run = self._compute
            else:
                run = self._explore
            with contextlib.nullcontext() if here else torch.cuda.device(plan.device):
                return run(plan, tensors, addresses, stream)
        except Exception as error:
            self._failed(error, plan.device)
            return False

    def _compute(
        self, plan: Plan, tensors: Sequence[Any], addresses: Sequence[int], stream: int
    ) -> bool:
        return self._launch(plan, plan.kernel, tensors, addresses, stream)

    def _explore(
        self, plan: Plan, tensors: Sequence[Any], addresses: Sequence[int], stream: int
    ) -> bool:
        done = self._explorer.run(plan, tensors, addresses, stream)
        if plan.trial is not None and plan.trial.winner is not None:
            self._plans.clear()
        return done

    def _launch(
        self,
        plan: Plan,
        kernel: Kernel,
        tensors: Sequence[Any],
        addresses: Sequence[int],
        stream: int,
    ) -> bool:
        """Compute a call of the plan by one of its kernels, which is proven first if it is new."""
        if not kernel.proven:
            return self._prove(kernel, plan.device, operands(tensors), stream)
        if isinstance(kernel.gemm, StockGemm):
            return kernel.gemm.run(operands(tensors), stream)
        launch = plan.launches.get(kernel)
        if launch is None:
            launch = plan.launches[kernel] = kernel.gemm.bind(operands(tensors))
        launch(addresses, stream)
        return True

    def _prove(self, kernel: Kernel, device: int, operands: Operands, stream: int) -> bool:
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
            self._failures.exclude(device, kernel.candidate.name, found)
            self._plans.clear()
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

    def _failed(self, error: Exception, device: int) -> None:
        """Account for a failure of ours; raises it again if stock cannot help."""
        if self._failures.account(error, device):
            self._plans.clear()
            self._review()

    def _review(self) -> None:
        """Note whether any device of this process can use our kernels at all."""
        self._reviewed = True
        self.useful = self._planner.has_use()
