"""What is decided for one shape of the INT8 GEMM on one device: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ck_patch.candidates import Candidate
from ck_patch.device import DeviceProfile
from ck_patch.kernels.replay import Replay
from ck_patch.ops.gemm_contract import PlanKey
from ck_patch.route import GemmCall
from ck_patch.trial import Trial


@dataclass(eq=False)
class Kernel:
    """A candidate on one device, and whether its first result was equal to stock's."""

    candidate: Candidate
    gemm: Any
    """A `kernels.launch.Gemm` or a `references.StockGemm`."""
    proven: bool = False


@dataclass
class Plan:
    """How one shape is computed on one device: by `kernel`, or, as long as `trial` has no winner,
    by its candidates in turn, `kernel` being the best one known.

    `call` and `gpu` are what it was decided from. `guarded` says that the tensors' device may not
    be the current one. `launches` has what is bound so far, of our kernels.
    """

    key: PlanKey
    call: GemmCall
    gpu: DeviceProfile
    guarded: bool
    kernel: Kernel
    trial: Trial | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    launches: dict[Kernel, Replay] = field(default_factory=dict)

    @property
    def device(self) -> int:
        return self.key[0]
