"""A program: linears on two GPUs, on the second of which our GEMM fails.

Its argument says how. What the process gives up for good ends with it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu2.devices import CALLS, GEMM, QUANTIZER, K, M, N, answer, kernels, launched, on

BF16 = torch.bfloat16
BAD = 1
STICKY = "CUDA error: an illegal memory access was encountered"


def plant(kind: str) -> None:
    """Have every GEMM of ours fail on the bad GPU: `wrong` and `crashing` at each of its runs,
    `sticky` once, as if the GPU's context were dead."""
    from ck_patch.kernels import registry

    struck: list[None] = []

    def planted(real: type[Any]) -> type[Any]:
        class Planted(real):  # type: ignore[misc]
            def run(self, call: Any) -> None:
                here = call.d.get_device() == BAD
                if here and kind == "crashing":
                    raise OSError("planted")
                if here and kind == "sticky" and not struck:
                    struck.append(None)
                    raise RuntimeError(STICKY)
                super().run(call)
                if here and kind == "wrong":
                    call.d[-1, -1] = torch.nan

        return Planted

    def made(factory: Callable[[], type[Any]]) -> Callable[[], type[Any]]:
        return lambda: planted(factory())

    registry.GEMMS = {family: made(factory) for family, factory in registry.GEMMS.items()}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(kind: str) -> None:
    warnings = _Warnings()
    logging.getLogger("ck_patch").addHandler(warnings)
    import comfy_kitchen
    from comfy_kitchen.backends import cuda, eager

    import ck_patch
    from tests.gpu.slot import entry, random_call, stock_bias_dtype

    plant(kind)
    given: dict[str, Any] = {
        "x": torch.randn(M, K, device="cuda", dtype=BF16),
        "weight": torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda"),
        "weight_scale": torch.rand(N, device="cuda") * 0.01 + 1e-3,
        "bias": torch.randn(N, device="cuda", dtype=BF16),
        "out_dtype": BF16,
    }
    gemm = random_call(M, N, K, BF16, stock_bias_dtype(BF16))

    def made(device: int) -> dict[str, Callable[[], torch.Tensor]]:
        there, call = on(device, given), on(device, gemm)
        return {
            # As they are in their modules at each call.
            "registry": lambda: comfy_kitchen.int8_linear(**there),
            "eager": lambda: eager.int8_linear(**there),
            "entry": lambda: call.run(cuda._C.cutlass_int8_dequant)[1],
        }

    calls = [made(0), made(1)]
    ck_patch.disable()
    expected = [{name: call() for name, call in calls[0].items()}]
    with torch.cuda.device(1):
        expected.append({name: call() for name, call in calls[1].items()})
    ck_patch.enable()
    entry()  # Fails unless the slot is patched.

    equal = [True, True]
    raised: list[str] = []

    def work(device: int) -> None:
        with torch.cuda.device(device):
            for name, call in calls[device].items():
                try:
                    equal[device] &= torch.equal(call(), expected[device][name])
                except RuntimeError as error:
                    raised.append(f"{device} {name}: {error}")

    def both() -> None:
        for _ in range(CALLS):
            work(BAD)
            work(1 - BAD)

    both()  # What is to fail has failed.
    seen = launched(both)
    status = ck_patch.status()
    answer(
        equal=equal,
        raised=raised,
        gemms=[sorted(kernels(seen[device], GEMM)) for device in (0, 1)],
        quantizers=[sorted(kernels(seen[device], QUANTIZER)) for device in (0, 1)],
        slots=sorted({slot.state for slot in status.slots}),
        breakers=[[b.operation, b.device, b.reason] for b in status.breakers],
        warnings=warnings.lines,
    )


if __name__ == "__main__":
    main(sys.argv[1])
