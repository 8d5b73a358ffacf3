"""The INT8 GEMM that the ops share: decides once per shape, proves each kernel, fails to stock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch

from ck_patch import candidates, log
from ck_patch.candidates import STOCK, Candidate, Candidates
from ck_patch.context import OpContext
from ck_patch.device import DeviceProfile, interpreting, profile
from ck_patch.kernels.launch import Operands, Rounding
from ck_patch.kernels.replay import Replay
from ck_patch.ops import capture_mode
from ck_patch.ops.failures import Failures
from ck_patch.ops.first_use import FirstUse, stream_of
from ck_patch.ops.gemm_contract import (
    DTYPE_NAMES,
    call_key,
    misaligned,
    operands,
    well_formed,
)
from ck_patch.ops.references import Reference, StockGemm, cutlass_config
from ck_patch.ops.timer import EventTimer
from ck_patch.route import Backend, GemmCall, device_path
from ck_patch.trial import Trial
from ck_patch.tuner import Tuner

# The first use of a kernel is compared with stock on so many rows at either end of the output. Rows
# of K or N elements start on 16 bytes, as stock needs, at each multiple of 16.
_CHECKED_ROWS = 128
# A process that meets more shapes than this plans them anew; each plan is a few hundred bytes.
_MAX_PLANS = 4096


_ROUNDINGS: Mapping[Backend, Rounding] = MappingProxyType(
    {"cuda": "cutlass", "triton": "triton", "eager": "eager"}
)
_MISSING = object()

PlanKey = tuple[int, int, int, int, torch.dtype, torch.dtype | None, bool]
"""Device, M, N, K, output dtype, bias dtype, and whether there is a residual."""


@dataclass(eq=False)
class _Kernel:
    """A candidate on one device, and whether its first result was equal to stock's."""

    candidate: Candidate
    gemm: Any
    """A `kernels.launch.Gemm` or a `references.StockGemm`."""
    proven: bool = False


@dataclass
class Plan:
    """How one shape is computed on one device: by `kernel`, or, as long as `trial` has no winner,
    by its candidates in turn, `kernel` being the best one known.

    `launches` has what is bound so far, of our kernels; `guarded` says that the tensors' device may
    not be the current one.
    """

    key: PlanKey
    guarded: bool
    kernel: _Kernel
    trial: Trial | None = None
    kernels: Mapping[str, _Kernel] = field(default_factory=dict)
    launches: dict[_Kernel, Replay] = field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.key[0]


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
        # What is chosen among ours alone must not be kept for those who have not asked for that.
        self._tuner = context.tuner if context.settings.int8 == "auto" else Tuner()
        self._timers: dict[int, EventTimer] = {}
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
        if plan.trial is None or plan.trial.rests():
            launch = plan.launches.get(plan.kernel)
            if launch is not None and not plan.guarded:
                launch(pointers, stream)
                return True
            run = self._launch
        else:
            run = self._explore
        if plan.guarded and torch.cuda.current_device() != plan.device:
            with torch.cuda.device(plan.device):
                return run(plan, tensors, pointers, stream)
        return run(plan, tensors, pointers, stream)

    def _launch(
        self, plan: Plan, tensors: Sequence[Any], pointers: Sequence[int], stream: int
    ) -> bool:
        kernel = plan.kernel
        if not kernel.proven:
            return self._prove(kernel, plan.device, operands(tensors), stream)
        return _launched(plan, kernel, tensors, pointers, stream)

    def _explore(
        self, plan: Plan, tensors: Sequence[Any], pointers: Sequence[int], stream: int
    ) -> bool:
        """Have the candidate whose turn it is compute the call, and time it if that can be done
        without waiting; under capture, by the best one known that has been proven."""
        trial = cast(Trial, plan.trial)
        on = stream_of(stream, plan.device)
        with torch.cuda.stream(on), capture_mode.relaxed() as relaxed:
            if not relaxed:
                return self._launch(plan, tensors, pointers, stream)
            # Under capture too: the pass before it may have been the only one.
            self._timer(plan.device).collect()
            if trial.winner is not None:
                return self._settle(plan, tensors, stream)
            name = None if torch.cuda.is_current_stream_capturing() else trial.next()
            done = name is not None and self._sample(plan, name, tensors, pointers, on, stream)
            return done or self._best(plan, tensors, pointers, stream)

    def _sample(
        self,
        plan: Plan,
        name: str,
        tensors: Sequence[Any],
        pointers: Sequence[int],
        on: torch.cuda.Stream,
        stream: int,
    ) -> bool:
        """Compute the call by one candidate, timed if it is proven; False if that did not work."""
        trial, kernel = cast(Trial, plan.trial), plan.kernels[name]
        try:
            if self._excluded(plan.device, kernel.candidate):
                done = False
            elif kernel.proven:
                work = partial(_launched, plan, kernel, tensors, pointers, stream)
                done = self._timer(plan.device).measure(on, work, partial(self._report, plan, name))
            else:
                try:
                    done = self._prove(kernel, plan.device, operands(tensors), stream)
                finally:
                    trial.void(name, pause=False)
        except Exception:
            trial.drop(name)
            raise
        if not done and (kernel.proven or self._excluded(plan.device, kernel.candidate)):
            trial.drop(name)
        return done

    def _best(
        self, plan: Plan, tensors: Sequence[Any], pointers: Sequence[int], stream: int
    ) -> bool:
        """Compute the call by the best candidate known, of those that have been proven."""
        best = cast(Trial, plan.trial).best
        for name in (best, *plan.kernels):
            kernel = plan.kernels.get(name)
            if kernel is not None and kernel.proven:
                plan.kernel = kernel
                return _launched(plan, kernel, tensors, pointers, stream)
        return False

    def _settle(self, plan: Plan, tensors: Sequence[Any], stream: int) -> bool:
        """Plan anew what a trial has decided, and compute the call by that."""
        self._forget()
        settled = self.plan(*plan.key)
        if settled is None:
            return self._reference(operands(tensors), stream)
        return self._run(settled, tensors, stream)

    def _report(self, plan: Plan, name: str, microseconds: float | None) -> None:
        trial = cast(Trial, plan.trial)
        call, gpu = self._call(plan.key), self._profile(plan.device)
        self._tuner.report(trial, name, microseconds, plan.device, gpu, call)

    def _timer(self, device: int) -> EventTimer:
        timer = self._timers.get(device)
        return self._timers.setdefault(device, EventTimer()) if timer is None else timer

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
            self._failures.exclude(device, kernel.candidate.name, found)
            self._forget()
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

    def _decide(self, *key: Any) -> Plan | None:
        device, _, _, _, out_dtype, bias_dtype, residual = key
        call, gpu = self._call(key), self._profile(device)
        found = self._candidates(call, gpu, device)
        chosen = self._tuner.choose(device, gpu, call, found)
        first = found.ordered[0] if isinstance(chosen, Trial) else chosen
        if log.paths_wanted():
            bias = "no" if call.bias_dtype is None else call.bias_dtype
            extra = ", residual" if residual else ""
            many = f", {len(found.ordered)} candidates" if isinstance(chosen, Trial) else ""
            why = found.reason if first == found.ordered[0] else "measured on this machine"
            log.path(
                f"{self._operation} {call.m}x{call.n}x{call.k}, {call.out_dtype} output, {bias} "
                f"bias{extra}, on {_named(gpu, device)}: {first.path} ({why}{many})"
            )
        if chosen == STOCK:
            return None

        def kernel(candidate: Candidate) -> _Kernel:
            return self._kernel(candidate, gpu, call.k, (device, out_dtype, bias_dtype, residual))

        guarded = device >= 0 and torch.cuda.device_count() > 1
        if not isinstance(chosen, Trial):
            return Plan(cast(PlanKey, key), guarded, kernel(chosen))
        kernels = {name: kernel(candidates.parse(name)) for name in chosen.names}
        return Plan(cast(PlanKey, key), guarded, kernels[first.name], chosen, kernels)

    def _call(self, key: Sequence[Any]) -> GemmCall:
        _, m, n, k, out_dtype, bias_dtype, residual = key
        return GemmCall(
            m,
            n,
            k,
            DTYPE_NAMES[out_dtype],
            None if bias_dtype is None else DTYPE_NAMES[bias_dtype],
            accepts_bias=self._any_bias or bias_dtype in (None, out_dtype),
            residual=residual,
            backend=self._backend,
        )

    def _candidates(self, call: GemmCall, gpu: DeviceProfile, device: int) -> Candidates:
        """What the policy offers, less what has failed here; stock where nothing is left."""
        if device < 0 and not interpreting():
            return Candidates((STOCK,), "Triton runs on the CPU only in its interpreter")
        broken = self._failures.reason(device)
        if broken is not None:
            return Candidates((STOCK,), broken)
        configs = 0 if cutlass_config(0) is None else candidates.STOCK_CONFIGS
        found = candidates.chosen(call, gpu, self._settings.int8, self._settings.force, configs)
        if found.problem:
            log.warn(f"{self._operation} {found.problem}", f"{self._operation}: {found.problem}")
        left = tuple(one for one in found.ordered if not self._excluded(device, one))
        if left:
            return Candidates(left, found.reason)
        return Candidates((STOCK,), "no candidate is left")

    def _excluded(self, device: int, candidate: Candidate) -> bool:
        return self._failures.excluded(device, candidate.name)

    def _kernel(
        self, candidate: Candidate, gpu: DeviceProfile, k: int, use: tuple[object, ...]
    ) -> _Kernel:
        """The kernel of a candidate, the same one for all shapes that one binary serves."""
        if candidate.config is None:
            number = candidate.stock_config
            run = self._reference if number is None else cast(Reference, cutlass_config(number))
            return _Kernel(candidate, StockGemm(run), proven=True)
        # Triton is imported by the first call that needs it, and no earlier.
        from ck_patch.kernels.registry import GEMMS

        gemm = GEMMS[candidate.config.family]()
        key = (*use, candidate, gemm.variant(candidate.config, k))
        made = gemm(candidate.config, _ROUNDINGS[self._backend])
        return self._kernels.setdefault(key, _Kernel(candidate, made))

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
            return path.ours
        except Exception:
            # A driver that does not answer: if a call needs this device, its breaker will say why.
            return False

    def _profile(self, device: int) -> DeviceProfile:
        return profile(device, self._settings.assumed(device))


def _named(gpu: DeviceProfile, device: int) -> str:
    """The device in a line: twins have one name."""
    return f"{gpu.name} (cuda:{device})" if device > 0 else gpu.name


def _launched(
    plan: Plan,
    kernel: _Kernel,
    tensors: Sequence[Any],
    pointers: Sequence[int],
    stream: int,
) -> bool:
    """Launch a kernel that is proven; False if it is one of stock's, and declines."""
    if isinstance(kernel.gemm, StockGemm):
        return kernel.gemm.run(operands(tensors), stream)
    launch = plan.launches.get(kernel)
    if launch is None:
        launch = plan.launches[kernel] = kernel.gemm.bind(operands(tensors))
    launch(pointers, stream)
    return True
