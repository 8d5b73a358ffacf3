"""The capsule slot without a GPU: what is not a plain CUDA tensor goes to stock, as it came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.ops.wrap_for_dlpack import WrapForDlpack, build
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings


class Stock:
    """Records what it was called with; the signature is that of the real function."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def function(self) -> Callable[..., Any]:
        def _wrap_for_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
            """Stock's own words."""
            self.calls.append(((tensor, *args), kwargs))
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
    ((arguments, keywords),) = stock.calls
    assert arguments[0] is value
    assert keywords == {}


def test_arguments_that_the_host_may_add_one_day_reach_stock() -> None:
    stock = Stock()
    tensor = torch.ones(2)
    built(stock).function(tensor, 1, stream=2)
    built(stock).function(tensor=tensor)
    assert [(len(arguments), keywords) for arguments, keywords in stock.calls] == [
        (2, {"stream": 2}),
        (1, {}),
    ]


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
