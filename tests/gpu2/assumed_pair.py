"""A program: what each of two GPUs does where CK_PATCH_ASSUME_DEVICE says that one is an sm_70.

Its argument is the device that is current at the first call, and whose tensors come first.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from tests.gpu2.devices import CALLS, GEMM, QUANTIZER, K, M, N, answer, kernels, launched, on

F16 = torch.float16


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(first: int) -> None:
    keep = _Keep()
    logging.getLogger("ck_patch").addHandler(keep)
    torch.cuda.set_device(first)
    generator = torch.Generator().manual_seed(0)
    layer: dict[str, Any] = {
        "weight": torch.randint(-127, 128, (N, K), dtype=torch.int8, generator=generator),
        "weight_scale": torch.rand(N, generator=generator) * 0.01 + 1e-3,
        "bias": torch.randn(N, generator=generator).to(F16),
        "out_dtype": F16,
    }
    layer["x"] = torch.randn(M, K, generator=generator).to(F16)
    import comfy_kitchen  # noqa: F401

    found = {device: _look(on(device, layer), device) for device in (first, 1 - first)}
    import ck_patch

    answer(
        current=torch.cuda.current_device(),
        devices=[found[0], found[1]],
        lines=keep.lines,
        breakers=[str(breaker) for breaker in ck_patch.status().breakers],
    )


def _look(given: dict[str, Any], device: int) -> dict[str, Any]:
    import comfy_kitchen
    from comfy_kitchen.backends import cuda, eager, triton

    x, weight, scale = given["x"], given["weight"], given["weight_scale"]
    exact = x.double() @ (weight.double() * scale.double()[:, None]).t() + given["bias"].double()
    exact_norm = exact.norm()
    outs: dict[str, list[torch.Tensor]] = {"eager": [], "triton": [], "registry": [], "cuda": []}

    def elsewhere() -> None:
        """Where tensors of any device are taken: with the current device as it is."""
        outs["eager"] += [eager.int8_linear(**given) for _ in range(CALLS)]
        outs["triton"] += [triton.int8_linear(**given) for _ in range(CALLS)]

    def there() -> None:
        """What stock refuses unless the tensors' device is the current one."""
        with torch.cuda.device(device):
            outs["registry"] += [comfy_kitchen.int8_linear(**given) for _ in range(CALLS)]
            outs["cuda"] += [cuda.int8_linear(**given) for _ in range(CALLS)]

    seen = launched(elsewhere)
    for where, others in launched(there).items():
        seen.setdefault(where, set()).update(others)
    with torch.cuda.device(device):
        stocks = {
            "eager": eager.int8_linear.__wrapped__(**given),
            "cuda": cuda.int8_linear.__wrapped__(**given),
        }
        stocks["registry"] = stocks["cuda"]
    return {
        "ran_on": sorted(seen),
        "gemms": sorted(kernels(seen[device], GEMM)),
        "quantizers": sorted(kernels(seen[device], QUANTIZER)),
        "error": {
            name: max(float((out.double() - exact).norm() / exact_norm) for out in results)
            for name, results in outs.items()
        },
        "stock_error": float((stocks["eager"].double() - exact).norm() / exact_norm),
        "equal": {
            name: all(torch.equal(out, stock) for out in outs[name])
            for name, stock in stocks.items()
        },
    }


if __name__ == "__main__":
    main(int(sys.argv[1]))
