"""The patched entry and its stock function on a GPU, called the way comfy_kitchen calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import to_dlpack

from ck_patch.measure import replayed

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@dataclass
class Call:
    """Random operands of one GEMM, the scales as large as real layers have them."""

    a: torch.Tensor
    b: torch.Tensor
    xs: torch.Tensor
    ws: torch.Tensor
    bias: torch.Tensor
    out_dtype: torch.dtype

    def run(self, function: Any) -> tuple[bool, torch.Tensor]:
        """Call `function` with fresh capsules; the output is poisoned before."""
        shape = self.a.shape[0], self.b.shape[0]
        d = torch.full(shape, torch.nan, dtype=self.out_dtype, device=self.a.device)
        return self.into(function, d), d

    def replay(self, function: Any) -> tuple[bool, torch.Tensor]:
        """The same from the replay of a CUDA graph, which runs our kernel at every size."""
        d = torch.empty_like(self.run(function)[1])

        def poisoned() -> bool:
            d.fill_(torch.nan)
            return self.into(function, d)

        return replayed(poisoned), d

    def into(self, function: Any, d: torch.Tensor, wrap: Callable[..., Any] = to_dlpack) -> bool:
        """Call `function` with capsules that `wrap` makes, to write d."""
        tensors = (self.a, self.b, self.xs, self.ws, self.bias, d)
        stream = torch.cuda.current_stream(d.device).cuda_stream
        done: bool = function(*map(wrap, tensors), CODES[self.out_dtype], stream)
        return done


def random_call(
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
) -> Call:
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    xs = torch.rand(m, 1, device="cuda") * 0.01 + 1e-4
    ws = torch.rand(n, device="cuda") * 0.01 + 1e-4
    if bias_dtype is None:
        bias = torch.empty(0, dtype=out_dtype, device="cuda")
    else:
        bias = (torch.randn(n, device="cuda") * 10).to(bias_dtype)
    return Call(a, b, xs, ws, bias, out_dtype)


def entry() -> Any:
    """The live `_C.cutlass_int8_dequant`; fails unless the installed .pth has patched it."""
    from comfy_kitchen.backends import cuda

    function = cuda._C.cutlass_int8_dequant
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return function


def stock() -> Any:
    return entry().__wrapped__


def stock_bias_dtype(out_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the installed release passes a bias to the entry."""
    from importlib.metadata import version

    from packaging.version import Version

    from ck_patch.releases import release_for

    release = release_for(Version(version("comfy-kitchen")))
    assert release is not None
    return torch.float32 if release.bias_dtype == "float32" else out_dtype
