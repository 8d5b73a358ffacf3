"""The row chunks around the host's own kernels, in Triton's interpreter, with a small limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch import chunks
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.ops import triton_rows
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings

pytestmark = pytest.mark.interpreter

M, N, K = 150, 48, 64


@pytest.fixture
def host(triton_host: Any) -> Any:
    """Its own quantizer is in the chunks too, as when both slots are patched."""
    return triton_host


@pytest.fixture
def context() -> OpContext:
    return OpContext(Settings(), Breaker(), RELEASES[-1], check_first=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def shrink() -> None:
        monkeypatch.setattr(chunks, "LIMIT", 7000)
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * K * 40)

    return shrink


def stock_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize("scale", [torch.rand(N) * 0.01, torch.tensor(0.01)], ids=["[N]", "0-d"])
@pytest.mark.parametrize("input_act", [None, "swiglu"])
@pytest.mark.parametrize("convrot", [False, True])
def test_a_linear_in_chunks_is_the_whole(
    host: Any,
    context: OpContext,
    small: Callable[[], None],
    scale: torch.Tensor,
    input_act: str | None,
    convrot: bool,
) -> None:
    stock = stock_of(host.int8_linear)
    shapes: list[torch.Size] = []

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shapes.append(x.shape)
        return stock(x, *args, **kwargs)

    counted.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    op = triton_rows.build_linear(counted, context)
    given = {
        "x": torch.randn(2, M // 2, K * (2 if input_act else 1)),
        "weight": torch.randint(-128, 128, (N, K), dtype=torch.int8),
        "weight_scale": scale,
        "bias": torch.randn(N),
        "out_dtype": torch.float32,
        "convrot": convrot,
        "convrot_groupsize": 16,
        "input_act": input_act,
    }
    whole = stock(**given)
    small()
    assert torch.equal(op.function(**given), whole)
    assert len(shapes) > 3


def test_a_quantization_in_chunks_is_the_whole(
    host: Any, context: OpContext, small: Callable[[], None]
) -> None:
    stock = stock_of(host.triton_quantize_rowwise)
    op = triton_rows.build_quantizer(stock, context)
    x = torch.randn(M, K)
    whole = stock(x)
    small()
    for ours, theirs in zip(op.function(x), whole, strict=True):
        assert torch.equal(ours, theirs)
