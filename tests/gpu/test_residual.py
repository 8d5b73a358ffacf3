"""The residual form of the GEMM entry on a GPU: `resid + rscale * (acc * xs * ws + bias)`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from ck_patch import shapes, tiles
from ck_patch.dlpack import to_dlpack
from ck_patch.measure import graph_times
from ck_patch.tiles import TileConfig
from tests.gpu.conftest import Record
from tests.gpu.slot import CODES, Call, random_call

pytestmark = pytest.mark.gpu


@dataclasses.dataclass
class ResidualCall:
    """A call of the plain entry, and what is added to its result."""

    plain: Call
    scale: torch.Tensor
    residual: torch.Tensor

    def run(self, function: Any, d: torch.Tensor | None = None) -> torch.Tensor:
        """Call `function`; the output is poisoned before."""
        call = self.plain
        if d is None:
            d = torch.full_like(self.residual, torch.nan)
        tensors = (call.a, call.b, call.xs, call.ws, call.bias, self.scale, self.residual, d)
        stream = torch.cuda.current_stream(d.device).cuda_stream
        assert function(*map(to_dlpack, tensors), CODES[call.out_dtype], stream)
        return d


def entries() -> tuple[Any, Any]:
    """Ours and stock's."""
    from comfy_kitchen.backends import cuda

    ours = getattr(cuda._C, "cutlass_int8_dequant_residual", None)
    if ours is None:
        pytest.skip("this release has no residual form")
    assert hasattr(ours, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return ours, ours.__wrapped__


def residual_call(m: int, n: int, k: int, dtype: torch.dtype, biased: bool) -> ResidualCall:
    plain = random_call(m, n, k, dtype, dtype if biased else None)
    scale = torch.randn(n, device="cuda").to(dtype)
    return ResidualCall(plain, scale, (torch.randn(m, n, device="cuda") * 30).to(dtype))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def test_the_result_is_stocks_bit_for_bit(record: Record) -> None:
    ours, stock = entries()
    sizes = [shape for shape in shapes.unique() if shape[0] * shape[1] < 2**29]
    sizes += [(1, 8, 16), (3, 520, 256), (300, 1032, 512), (129, 264, 2064), (1000, 3072, 1024)]
    count = 0
    for (m, n, k), biased in itertools.product(sizes, (True, False)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            if dtype == torch.float32 and m * n > 2**26:
                continue
            call = residual_call(m, n, k, dtype, biased)
            assert same(call.run(ours), call.run(stock)), (m, n, k, dtype, biased)
            count += 1
    record.add("equal_residual", calls=count, equal=True)


@pytest.mark.parametrize("config", tiles.EVERY, ids=lambda config: config.name)
def test_every_configuration_equals_stock(config: TileConfig) -> None:
    from ck_patch.kernels.launch import Operands
    from ck_patch.kernels.registry import GEMMS

    _, stock = entries()
    for m, n, k, dtype in ((300, 520, 1024, torch.bfloat16), (77, 1032, 528, torch.float16)):
        call = residual_call(m, n, k, dtype, biased=True)
        plain = call.plain
        d = torch.full_like(call.residual, torch.nan)
        tensors = (plain.a, plain.b, plain.xs, plain.ws, plain.bias)
        gemm = GEMMS[config.family]()(config)
        gemm.run(Operands(*tensors, d, call.residual, call.scale))
        assert same(d, call.run(stock)), (m, n, k)


def test_it_is_not_slower_than_stock(record: Record) -> None:
    ours, stock = entries()
    for m, n, k in ((4608, 4096, 12288), (1024, 4096, 4096), (16384, 5376, 14336)):
        call = residual_call(m, n, k, torch.bfloat16, biased=True)
        d = torch.empty_like(call.residual)
        times = graph_times(
            {"stock": lambda: call.run(stock, d), "ours": lambda: call.run(ours, d)},  # noqa: B023
            rounds=5,
        )
        row = {name: round(value, 4) for name, value in times.items()}
        record.add("residual", m=m, n=n, k=k, stock_ms=row["stock"], ours_ms=row["ours"])
        assert times["ours"] <= 1.02 * times["stock"], (m, n, k)
