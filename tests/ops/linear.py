"""Calls of the linears of the eager and the Triton backend, and a bench that says who answers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings

Form = dict[str, Any]
N, K = 48, 64


def form(x: torch.Tensor | None = None, **changes: Any) -> Form:
    """Keywords of a plain call: N outputs of the depth that x has."""
    x = torch.randn(5, K) if x is None else x
    given = {
        "x": x,
        "weight": torch.randint(-127, 128, (N, x.shape[-1]), dtype=torch.int8),
        "weight_scale": torch.rand(N) * 0.01,
        "out_dtype": torch.float32,
    }
    return {**given, **changes}


class Bench:
    """One backend: its stock function, and our op with a stock that records what it is given.

    `host` is the backend's module `quantization`. Both of our functions of it are built, and stand
    in the host's place only while `ours` runs.
    """

    def __init__(self, backend: str, host: Any, breaker: Breaker, **settings: Any) -> None:
        from ck_patch.ops import int8_linear, quantize_rows

        self.backend, self.host = backend, host
        self.stock: Callable[..., torch.Tensor] = host.int8_linear
        self.calls: list[tuple[tuple[Any, ...], Form]] = []
        self.launches: list[str] = []

        @functools.wraps(self.stock)
        def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls.append((args, kwargs))
            return self.stock(*args, **kwargs)

        context = OpContext(Settings(**settings), breaker, RELEASES[-1], check_first=False)
        self.op: Any = getattr(int8_linear, f"build_{backend}")(recorded, context)
        self.quantizer = (
            "quantize_int8_rowwise" if backend == "eager" else "triton_quantize_rowwise"
        )
        stock_quantizer = getattr(host, self.quantizer)
        self.rows: Any = getattr(quantize_rows, f"build_{backend}")(stock_quantizer, context)

    def ours(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The op's result, with our quantizer in the host's place; notes what is launched."""
        from ck_patch.kernels.int8_gemm import PointerGemm
        from ck_patch.kernels.quantize_rows import RowQuantizer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.host, self.quantizer, self.rows.function)
            patch.setattr(PointerGemm, "run", self._noted("gemm", PointerGemm.run))
            patch.setattr(RowQuantizer, "run", self._noted("quantizer", RowQuantizer.run))
            out: torch.Tensor = self.op.function(*args, **kwargs)
            return out

    def _noted(self, name: str, run: Callable[..., None]) -> Callable[..., None]:
        def noted(*args: Any) -> None:
            self.launches.append(name)
            run(*args)

        return noted

    def assert_ours(self) -> None:
        """Nothing reached stock, and both kernels ran, once."""
        assert self.calls == []
        assert self.launches == ["quantizer", "gemm"]

    def assert_given_to_stock(self, given: Form) -> None:
        """Stock got one call, with the very same objects by keyword."""
        ((args, kwargs),) = self.calls
        assert args == ()
        assert kwargs.keys() == given.keys()
        assert all(kwargs[name] is value for name, value in given.items())
