"""The capsule slot without a GPU: what is not a plain CUDA tensor goes to stock, as it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.ops.wrap_for_dlpack import WrapForDlpack, build
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings


class Stock:
    """Records what it was called with; the signature is that of the real function."""

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []

    def function(self) -> Callable[..., Any]:
        def _wrap_for_dlpack(tensor: torch.Tensor) -> str:
            """Stock's own words."""
            self.calls.append(tensor)
            return "stock's capsule"

        return _wrap_for_dlpack


def built(stock: Stock) -> WrapForDlpack:
    context = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=False)
    return build(stock.function(), context)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        None,
        7,
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_no_plain_cuda_tensor_reaches_stock_untouched(value: object) -> None:
    stock = Stock()
    assert built(stock).function(value) == "stock's capsule"
    assert stock.calls[0] is value


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`on_device(0, current=1)` puts all tensors on one device of a GPU and makes one current."""

    def put(device: int, current: int) -> None:
        monkeypatch.setattr(torch.Tensor, "get_device", lambda _: device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)

    return put


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0)[1::2],
        torch.arange(6.0).view(6, 1),
        torch.arange(3.0, requires_grad=True),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        torch.empty(0, dtype=torch.bfloat16),
    ],
    ids=["plain", "strided", "column", "with gradient", "parameter", "frozen parameter", "empty"],
)
def test_a_tensor_of_the_current_device_is_exported_here(
    on_device: Callable[..., None], tensor: torch.Tensor
) -> None:
    on_device(1, current=1)
    stock = Stock()
    opened = from_dlpack(built(stock).function(tensor))
    assert stock.calls == []
    assert torch.equal(opened, tensor.detach())
    assert opened.data_ptr() == tensor.data_ptr()
    assert (opened.dtype, opened.requires_grad) == (tensor.dtype, False)
    assert built(stock).function(tensor=tensor) != "stock's capsule"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3).to_sparse(),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(type("Subclass", (torch.Tensor,), {})),
    ],
    ids=["sparse", "conjugate", "without memory", "subclass"],
)
def test_what_no_capsule_can_hold_is_for_stock_to_refuse(
    on_device: Callable[..., None], tensor: torch.Tensor
) -> None:
    on_device(0, current=0)
    stock = Stock()
    assert built(stock).function(tensor) == "stock's capsule"
    assert stock.calls[0] is tensor


def test_a_tensor_of_another_device_is_for_stock_to_refuse(on_device: Callable[..., None]) -> None:
    on_device(0, current=1)
    assert built(Stock()).function(torch.ones(2)) == "stock's capsule"


def test_the_replacement_looks_like_stock() -> None:
    function = built(Stock()).function
    assert function.__doc__ == "Stock's own words."
    assert function.__name__ == "_wrap_for_dlpack"
    assert hasattr(function, "__wrapped__")


def test_a_deactivated_replacement_passes_everything_to_stock() -> None:
    stock = Stock()
    replacement = built(stock)
    replacement.deactivate()
    replacement.function(torch.ones(2))
    assert len(stock.calls) == 1
