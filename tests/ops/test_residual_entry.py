"""The residual form of the GEMM entry: two more capsules, in stock's order, never dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ck_patch import releases
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.settings import Settings
from tests import reference
from tests.ops.slot import CODES, DTYPES, STREAM, Call, make_call

pytestmark = pytest.mark.interpreter

NAMES = ("a", "b", "xs", "ws", "bias", "residual_scale", "residual", "d")
Tensors = dict[str, torch.Tensor]


def tensors(m: int = 5, dtype: torch.dtype = torch.float32, **changes: torch.Tensor) -> Tensors:
    """A well-formed call; scales are powers of two, so that few roundings are left."""
    call: Call = make_call(m)
    n = call.b.shape[0]
    given = {
        "a": call.a,
        "b": call.b,
        "xs": call.xs,
        "ws": call.ws,
        "bias": torch.arange(n).to(dtype),
        "residual_scale": torch.linspace(-2, 2, n).to(dtype),
        "residual": torch.randn(m, n).to(dtype),
        "d": torch.full((m, n), torch.nan, dtype=dtype),
    }
    return {**given, **changes}


def arguments(given: Tensors) -> list[Any]:
    """Capsules in the order of stock's parameters, the dtype's code and a stream."""
    return [*(to_dlpack(given[name]) for name in NAMES), CODES[given["d"].dtype], STREAM]


def exact(given: Tensors) -> torch.Tensor:
    from tests.interpreter_facts import interpreter_rounding

    bias = given["bias"] if given["bias"].numel() else None
    return reference.gemm(
        *(given["a"], given["b"], given["xs"], given["ws"], bias, given["d"].dtype),
        interpreter_rounding(),
        residual=given["residual"],
        residual_scale=given["residual_scale"],
    )


class Stock:
    """Opens each capsule itself, so that a spent one fails here, and computes exactly."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> bool:
        self.calls.append(args)
        if len(args) != 10:
            raise TypeError("incompatible function arguments")
        opened: Sequence[torch.Tensor] = [from_dlpack(capsule) for capsule in args[:8]]
        given = dict(zip(NAMES, opened, strict=True))
        assert DTYPES[args[8]] == given["d"].dtype
        given["d"].copy_(exact(given))
        return True


@pytest.fixture
def make(breaker: Breaker) -> Callable[..., Any]:
    from ck_patch.ops import cutlass_int8_dequant

    def make(stock: Callable[..., Any]) -> Any:
        context = OpContext(Settings(), breaker, releases.RELEASES[-1], check_first=False)
        return cutlass_int8_dequant.build_residual(stock, context)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 5, 33])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_well_formed_call_is_computed_here(
    make: Callable[..., Any], dtype: torch.dtype, m: int, biased: bool
) -> None:
    stock, given = Stock(), tensors(m, dtype)
    if not biased:
        given["bias"] = torch.empty(0, dtype=dtype)
    residual = given["residual"].clone()
    assert make(stock).function(*arguments(given)) is True
    assert torch.equal(reference.bits(given["d"]), reference.bits(exact(given)))
    assert torch.equal(given["residual"], residual)
    assert stock.calls == []


TO_STOCK: dict[str, Callable[[], Tensors]] = {
    "residual of another dtype": lambda: tensors(residual=torch.randn(5, 16).half()),
    "scale of another dtype": lambda: tensors(residual_scale=torch.randn(16).half()),
    "scale of one value": lambda: tensors(residual_scale=torch.ones(1)),
    "residual strided": lambda: tensors(residual=torch.randn(16, 5).t()),
    "residual not on 16 bytes": lambda: tensors(residual=torch.randn(81)[1:].view(5, 16)),
    "scale not on 16 bytes": lambda: tensors(residual_scale=torch.randn(17)[1:]),
    "bias of another dtype": lambda: tensors(bias=torch.ones(16).half()),
}


@pytest.mark.parametrize("make_tensors", TO_STOCK.values(), ids=TO_STOCK.keys())
def test_what_ours_leaves_reaches_stock_with_fresh_capsules(
    make: Callable[..., Any], breaker: Breaker, make_tensors: Callable[[], Tensors]
) -> None:
    stock, given = Stock(), make_tensors()
    assert make(stock).function(*arguments(given)) is True
    assert torch.equal(reference.bits(given["d"]), reference.bits(exact(given)))
    assert len(stock.calls) == 1
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("change", [lambda v: v[:-1], lambda v: [*v, 0], lambda v: v[:8]])
def test_another_number_of_arguments_reaches_stock_untouched(
    make: Callable[..., Any], change: Callable[[list[Any]], list[Any]]
) -> None:
    stock, values = Stock(), change(arguments(tensors()))
    with pytest.raises(TypeError):
        make(stock).function(*values)
    assert all(a is b for a, b in zip(stock.calls[0], values, strict=True))


def test_the_real_entry_refuses_what_ours_hands_on(
    make: Callable[..., Any], breaker: Breaker
) -> None:
    cuda = pytest.importorskip("comfy_kitchen.backends.cuda")
    real = getattr(cuda._C, "cutlass_int8_dequant_residual", None)
    if real is None:
        pytest.skip("this release has no residual entry")
    op = make(real)
    for name in NAMES:
        given = {**tensors(), name: torch.zeros(3, 3, 3)}
        with pytest.raises(TypeError):
            op.function(*arguments(given))
    assert breaker.snapshot() == ()
    assert op.function.__doc__ == real.__doc__


def test_a_kernel_that_fails_leaves_the_call_to_stock_and_opens_its_own_breaker(
    make: Callable[..., Any], breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.kernels.int8_gemm import PointerGemm

    def broken(*args: Any) -> None:
        raise OSError("planted")

    monkeypatch.setattr(PointerGemm, "run", broken)
    stock = Stock()
    op = make(stock)
    for _ in range(2):
        given = tensors()
        assert op.function(*arguments(given)) is True
        assert torch.equal(reference.bits(given["d"]), reference.bits(exact(given)))
    assert len(stock.calls) == 2
    (opened,) = breaker.snapshot()
    assert opened.operation == "cutlass_int8_dequant_residual"


def test_the_first_result_is_compared_with_stocks_residual_form(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.kernels.launch import Operands

    op, given = make(Stock()), tensors(300)
    given["d"].copy_(exact(given))
    order = ("a", "b", "xs", "ws", "bias", "d", "residual", "residual_scale")
    a, b, xs, ws, bias, d, residual, scale = (given[name] for name in order)
    call = Operands(a, b, xs, ws, bias, d, residual, scale)
    assert op._gemm._compare(call, STREAM) is None
    call.d[299, 15] += 1
    assert op._gemm._compare(call, STREAM) == "differs from stock"
