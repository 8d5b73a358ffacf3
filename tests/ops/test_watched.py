"""Tracers, transforms, modes and forward derivatives: each sees stock's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ck_patch.breaker import Breaker
from ck_patch.ops import watched
from tests.ops.linear import Bench, Form, K, form
from tests.ops.slot import RecordingStock, make_call

pytestmark = [
    pytest.mark.interpreter,
    # torch says that stock's operations have no batching rule of their own, and that a trace keeps
    # what is read from a tensor.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

Function = Callable[[torch.Tensor], torch.Tensor]


class Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_mode(f: Function, x: torch.Tensor) -> torch.Tensor:
    with Mode():
        return f(x)


class FunctionMode(TorchFunctionMode):
    """One that has no use for a function that ours calls and stock does not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.fill_:
            raise TypeError("fill_ is not for this mode")
        return func(*args, **(kwargs or {}))


def in_a_function_mode(f: Function, x: torch.Tensor) -> torch.Tensor:
    with FunctionMode():
        return f(x)


def dual(f: Function, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        out: torch.Tensor = forward_ad.unpack_dual(
            f(forward_ad.make_dual(x, torch.ones_like(x)))
        ).primal
        return out


WATCHERS: dict[str, Callable[[Function, torch.Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x[None])[0],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[0],
    "dual numbers": dual,
    "make_fx": lambda f, x: make_fx(f)(x)(x),
    "jit.trace": lambda f, x: torch.jit.trace(f, (x,), check_trace=False)(x),
    "a mode": in_a_mode,
    "a function mode": in_a_function_mode,
    "compile": lambda f, x: torch.compile(f, fullgraph=True, backend="eager")(x),
}
every_watcher = pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS.keys())


@every_watcher
def test_each_is_noticed_while_it_lasts(watch: Callable[[Function, torch.Tensor], Any]) -> None:
    seen = []

    def ask(x: torch.Tensor) -> torch.Tensor:
        seen.append(watched.watched())
        return x * 2

    assert not watched.watched()
    watch(ask, torch.randn(3, K))
    assert seen
    assert all(seen)
    assert not watched.watched()


@every_watcher
@pytest.mark.parametrize("capability", [None, (7, 0)], ids=["triton", "float16"])
def test_a_linear_and_the_quantizer_that_it_calls_are_stocks(
    eager_host: Any,
    breaker: Breaker,
    watch: Callable[[Function, torch.Tensor], Any],
    capability: tuple[int, int] | None,
) -> None:
    settings: Form = {} if capability is None else {"assume": ((None, capability),)}
    bench = Bench("eager", eager_host, breaker, **settings)
    given = form()
    x = given.pop("x")
    out = watch(lambda x: bench.op.function(x, **given), x)
    assert torch.equal(out, bench.stock(x, **given))
    q, scale = eager_host.quantize_int8_rowwise(x)
    assert torch.equal(watch(lambda x: bench.rows.function(x)[0], x), q)
    assert torch.equal(watch(lambda x: bench.rows.function(x)[1], x), scale)
    assert breaker.snapshot() == ()


def test_a_default_device_is_no_watcher() -> None:
    with torch.device("cpu"):
        assert not watched.watched()
        with FunctionMode(), torch.device("cpu"):
            assert watched.watched()
        assert not watched.watched()


def test_the_quantizer_is_stocks_where_stock_calls_it_in_a_transform(eager: Bench) -> None:
    given = form()
    x = given.pop("x")
    out = torch.vmap(lambda x: eager.ours(x, **given))(x[None])[0]
    assert torch.equal(out, eager.stock(x, **given))
    assert eager.launches == []
    eager.calls.clear()
    eager.ours(x, **given)
    eager.assert_ours()


def test_the_entry_of_the_gemm_is_stocks_in_a_mode(make_op: Callable[..., Any]) -> None:
    stock = RecordingStock()
    op, call = make_op(stock), make_call()
    arguments = call.arguments()
    with Mode():
        assert op.function(*arguments)
    assert len(stock.calls) == 1
    assert op.function(*call.arguments())
    assert len(stock.calls) == 1
    assert call.is_exact()
