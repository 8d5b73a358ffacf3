"""A program: linears whose tensors are on several devices, and what becomes of each."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu2.devices import CALLS, GEMM, answer, back, kernels, launched

BF16 = torch.bfloat16
# Ours takes three quarters of stock's time on an H200, and the CPU is done with it in a second.
M, N, K = 274, 2048, 2048
Outcome = list[str]


def main() -> None:
    import comfy_kitchen
    from comfy_kitchen.backends import cuda, eager
    from comfy_kitchen.backends.triton import quantization as triton

    # Stock's Triton kernels in one configuration: all compute the same, and tuning takes long.
    for name in ("_int8_matmul_dequant_kernel", "_int8_matmul_dequant_per_row_kernel"):
        tuner = getattr(triton, name)
        tuner.configs = tuner.configs[-1:]
    torch.manual_seed(0)  # The same in every process.
    cpu = {
        "x": torch.randn(M, K).to(BF16),
        "weight": torch.randint(-127, 128, (N, K), dtype=torch.int8),
        "weight_scale": torch.rand(N) * 0.01 + 1e-3,
        "bias": torch.randn(N).to(BF16),
    }
    residual = {
        "residual": torch.randn(M, N).to(BF16),
        "residual_scale": torch.randn(N).to(BF16),
    }
    good = {name: tensor.to("cuda:0") for name, tensor in cpu.items()}
    forms: dict[str, dict[str, Any]] = {"good": good}
    for name, tensor in cpu.items():
        for place in ("cpu", "cuda:1"):
            forms[f"{name} on {place}"] = {**good, name: tensor.to(place)}
    forms["all but x on the CPU"] = {**cpu, "x": good["x"]}
    for place in ("cpu", "cuda:1"):
        there = {name: tensor.to(place) for name, tensor in residual.items()}
        forms[f"residual on {place}"] = {**good, **there}
        forms[f"rotated, weight on {place}"] = {
            **good,
            "weight": cpu["weight"].to(place),
            "convrot": True,
        }
    functions: dict[str, Callable[..., Any]] = {
        # First of all: the others copy from one GPU to another, and from then on a kernel of either
        # may read what it should not.
        "triton": triton.int8_linear,
        "eager": eager.int8_linear,
        "registry": comfy_kitchen.int8_linear,
        "cuda": cuda.int8_linear,
    }
    outcomes: dict[str, Outcome] = {}
    ours: dict[str, bool] = {}
    for name, function in functions.items():
        for form, given in forms.items():
            outcomes[f"{name}, {form}"] = _outcome(function, **given)
            outcomes[f"{name}, good after {form}"] = _outcome(function, **good)
        seen = launched(lambda: [function(**good) for _ in range(CALLS)])  # noqa: B023
        ours[name] = bool(kernels(seen[0], GEMM))
    outcomes |= _entries(good)

    import ck_patch

    answer(
        outcomes=outcomes,
        ours=ours,
        breakers=[str(breaker) for breaker in ck_patch.status().breakers],
        current=torch.cuda.current_device(),
    )


def _entries(good: dict[str, Any]) -> dict[str, Outcome]:
    """The GEMM entry with one capsule of the CPU. Last of all: a kernel that reads it is deadly."""
    from comfy_kitchen.backends import cuda

    from tests.gpu.slot import Call

    a = torch.randint(-128, 128, (M, K), dtype=torch.int8).to("cuda:0")
    xs = torch.rand(M, 1).to("cuda:0")
    call = Call(a, good["weight"], xs, good["weight_scale"], good["bias"], BF16)
    return {
        f"entry, {name} on cpu": _outcome(
            lambda wrong: wrong.run(cuda._C.cutlass_int8_dequant)[1],
            wrong=dataclasses.replace(call, **{name: getattr(call, name).cpu()}),
        )
        for name in ("b", "xs", "ws", "bias")
    }


def _outcome(function: Callable[..., torch.Tensor], **given: Any) -> Outcome:
    """The class of the error, or device, dtype and a digest of the result."""
    try:
        result = function(**given)
        torch.cuda.synchronize()
    except Exception as error:
        return [type(error).__name__]
    (values,) = back(result)
    bits = values.contiguous().view(torch.int16).flatten().long()
    return [str(result.device), str(result.dtype), str(int(bits @ torch.arange(bits.numel())))]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # A dead context would make a crash of the exit.
