"""Finds the fastest candidate of a GEMM in the calls that are made anyway: they take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ck_patch.breaker import classify
from ck_patch.ops import capture_mode
from ck_patch.ops.failures import Failures
from ck_patch.ops.first_use import stream_of
from ck_patch.ops.gemm_plan import Kernel, Plan
from ck_patch.ops.timer import EventTimer
from ck_patch.trial import Trial
from ck_patch.tuner import Tuner

Launch = Callable[[Plan, Kernel, Sequence[Any], Sequence[int], int], bool]
"""Computes a call of a plan by one of its kernels, which it proves first if that is new: plan,
kernel, tensors, their addresses, raw stream. False if that did not work."""


class Explorer:
    """Runs the trials of one op's plans.

    Each call's result is that of one candidate, which are all the same.
    """

    def __init__(self, launch: Launch, failures: Failures, tuner: Tuner) -> None:
        self._launch = launch
        self._failures = failures
        self._tuner = tuner
        self._timers: dict[int, EventTimer] = {}

    def run(
        self, plan: Plan, tensors: Sequence[Any], addresses: Sequence[int], stream: int
    ) -> bool:
        """Have the candidate whose turn it is compute the call, and time it if that can be done
        without waiting; under capture, by the best one known that has been proven."""
        trial = cast(Trial, plan.trial)
        on = stream_of(stream, plan.device)
        with torch.cuda.stream(on), capture_mode.relaxed() as relaxed:
            if not relaxed:
                return self._launch(plan, plan.kernel, tensors, addresses, stream)
            # Under capture too: the pass before it may have been the only one.
            self._timer(plan.device).collect()
            name = None if torch.cuda.is_current_stream_capturing() else trial.next()
            done = name is not None and self._sample(plan, name, tensors, addresses, on, stream)
            return done or self._best(plan, tensors, addresses, stream)

    def _sample(
        self,
        plan: Plan,
        name: str,
        tensors: Sequence[Any],
        addresses: Sequence[int],
        on: torch.cuda.Stream,
        stream: int,
    ) -> bool:
        """Compute the call by one candidate, timed if it is proven; False if that did not work."""
        trial, kernel = cast(Trial, plan.trial), plan.kernels[name]
        work = partial(self._launch, plan, kernel, tensors, addresses, stream)
        try:
            if self._excluded(plan, kernel):
                done = False
            elif kernel.proven:
                done = self._timer(plan.device).measure(on, work, partial(self._report, plan, name))
            else:
                try:
                    done = work()
                except BaseException:
                    trial.void(name)
                    raise
                trial.void(name, pause=False)
        except Exception as error:
            # What only this call was short of, the next may have.
            if classify(error) == "other":
                trial.drop(name)
            raise
        if not done and (kernel.proven or self._excluded(plan, kernel)):
            trial.drop(name)
        return done

    def _best(
        self, plan: Plan, tensors: Sequence[Any], addresses: Sequence[int], stream: int
    ) -> bool:
        """Compute the call by the best candidate known, of those that have been proven."""
        best = cast(Trial, plan.trial).best
        for name in (best, *plan.kernels):
            kernel = plan.kernels.get(name)
            if kernel is not None and kernel.proven:
                plan.kernel = kernel
                return self._launch(plan, kernel, tensors, addresses, stream)
        return False

    def _excluded(self, plan: Plan, kernel: Kernel) -> bool:
        return self._failures.excluded(plan.device, kernel.candidate.name)

    def _report(self, plan: Plan, name: str, microseconds: float | None) -> None:
        trial = cast(Trial, plan.trial)
        self._tuner.report(trial, name, microseconds, plan.device, plan.gpu, plan.call)

    def _timer(self, device: int) -> EventTimer:
        timer = self._timers.get(device)
        return self._timers.setdefault(device, EventTimer()) if timer is None else timer
