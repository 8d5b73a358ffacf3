"""Decides how the INT8 GEMM of one op is computed: policy, failures so far, measured choices."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import torch

from ck_patch import candidates, log
from ck_patch.candidates import STOCK, Candidate, Candidates
from ck_patch.context import OpContext
from ck_patch.device import DeviceProfile, interpreting, profile
from ck_patch.kernels.launch import Rounding
from ck_patch.ops.failures import Failures
from ck_patch.ops.gemm_contract import DTYPE_NAMES, PlanKey
from ck_patch.ops.gemm_plan import Kernel, Plan
from ck_patch.ops.references import Reference, StockGemm, cutlass_config
from ck_patch.route import Backend, GemmCall, device_path
from ck_patch.trial import Trial
from ck_patch.tuner import Tuner

_ROUNDINGS: Mapping[Backend, Rounding] = MappingProxyType(
    {"cuda": "cutlass", "triton": "triton", "eager": "eager"}
)


class Planner:
    """Makes the plans of one op. It keeps none of them, but the kernels that they share.

    The arguments are those of `Int8Gemm`; `failures` and `tuner` are the op's.
    """

    def __init__(
        self,
        operation: str,
        backend: Backend,
        reference: Reference,
        context: OpContext,
        failures: Failures,
        tuner: Tuner,
    ) -> None:
        self._operation = operation
        self._backend: Backend = backend
        self._reference = reference
        self._settings = context.settings
        self._failures = failures
        self._tuner = tuner
        # Only the CUDA backend's kernel reads the bias in the dtype that it expects.
        self._any_bias = backend != "cuda" or context.release.bias_dtype == "float32"
        self._kernels: dict[tuple[object, ...], Kernel] = {}

    def decide(self, key: PlanKey) -> Plan | None:
        """How our kernels do this GEMM, or None if it is stock's."""
        device = key[0]
        call, gpu = self._call(key), self._profile(device)
        found = self._candidates(call, gpu, device)

        def runs(candidate: Candidate) -> bool:
            return candidate in (STOCK, *found.ordered) or (
                not self._failures.excluded(device, candidate.name)
                and candidate in candidates.every(call, gpu, _stock_configs())
            )

        chosen = self._tuner.choose(device, gpu, call, found, runs)
        first = _first(chosen, found) if isinstance(chosen, Trial) else chosen
        if log.paths_wanted():
            bias = "no" if call.bias_dtype is None else call.bias_dtype
            extra = ", residual" if call.residual else ""
            many = f", {len(found.ordered)} candidates" if isinstance(chosen, Trial) else ""
            why = found.reason if first == found.ordered[0] else "measured on this machine"
            log.path(
                f"{self._operation} {call.m}x{call.n}x{call.k}, {call.out_dtype} output, {bias} "
                f"bias{extra}, on {_named(gpu, device)}: {first.path} ({why}{many})"
            )
        if chosen == STOCK or (isinstance(chosen, Trial) and first.name not in chosen.names):
            return None
        guarded = device >= 0 and torch.cuda.device_count() > 1
        if not isinstance(chosen, Trial):
            return Plan(key, call, gpu, guarded, self._kernel(chosen, key))
        kernels = {name: self._kernel(candidates.parse(name), key) for name in chosen.names}
        return Plan(key, call, gpu, guarded, kernels[first.name], chosen, kernels)

    def has_use(self) -> bool:
        """Whether any device of this process can use our kernels at all."""
        indices = range(torch.cuda.device_count()) if torch.cuda.is_available() else (-1,)
        return any(self._can_use(index) for index in indices)

    def _can_use(self, device: int) -> bool:
        if self._failures.reason(device) is not None:
            return False
        try:
            path = device_path(self._profile(device), self._settings.int8, self._backend)
            return path.ours
        except Exception:
            # A driver that does not answer: if a call needs this device, its breaker will say why.
            return False

    def _call(self, key: PlanKey) -> GemmCall:
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
        force, configs = self._settings.force, _stock_configs()
        found = candidates.chosen(call, gpu, self._settings.int8, force, configs)
        if found.problem:
            log.warn(f"{self._operation} {found.problem}", f"{self._operation}: {found.problem}")
        left = tuple(one for one in found.ordered if not self._failures.excluded(device, one.name))
        if left:
            return Candidates(left, found.reason)
        return Candidates((STOCK,), "no candidate is left")

    def _kernel(self, candidate: Candidate, key: PlanKey) -> Kernel:
        """The kernel of a candidate, the same one for all shapes that one binary serves."""
        if candidate.config is None:
            number = candidate.stock_config
            run = self._reference if number is None else cast(Reference, cutlass_config(number))
            return Kernel(candidate, StockGemm(run), proven=True)
        # Triton is imported by the first call that needs it, and no earlier.
        from ck_patch.kernels.registry import GEMMS

        gemm = GEMMS[candidate.config.family]()
        device, _, _, k, out_dtype, bias_dtype, residual = key
        variant = gemm.variant(candidate.config, k)
        use = (device, out_dtype, bias_dtype, residual, candidate, variant)
        made = gemm(candidate.config, _ROUNDINGS[self._backend])
        return self._kernels.setdefault(use, Kernel(candidate, made))

    def _profile(self, device: int) -> DeviceProfile:
        return profile(device, self._settings.assumed(device))


def _first(trial: Trial, found: Candidates) -> Candidate:
    """The candidate to start a trial with, which may be that of another op, where others have
    failed; stock if none is left of it."""
    return next((one for one in found.ordered if one.name in trial.names), STOCK)


def _stock_configs() -> int:
    """How many of its configurations the installed release runs by number."""
    return 0 if cutlass_config(0) is None else candidates.STOCK_CONFIGS


def _named(gpu: DeviceProfile, device: int) -> str:
    """The device in a line: twins have one name."""
    return f"{gpu.name} (cuda:{device})" if device > 0 else gpu.name
