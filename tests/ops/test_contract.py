"""What callers see: results, errors of stock's own class, and the face of the wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from ck_patch import releases
from ck_patch.breaker import Breaker
from tests.ops.slot import RecordingStock, make_call

pytestmark = pytest.mark.interpreter

MakeOp = Callable[..., Any]


@pytest.fixture(scope="module")
def real_stock() -> Callable[..., Any]:
    """The entry of the installed comfy-kitchen; it refuses tensors of the CPU."""
    pytest.importorskip("comfy_kitchen")
    from comfy_kitchen.backends import cuda

    function: Callable[..., Any] = cuda._C.cutlass_int8_dequant
    return function


def bfloat16_bias(count: int) -> torch.Tensor:
    return torch.arange(count).to(torch.bfloat16)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": torch.arange(16.0)},
        {"d": torch.full((5, 16), torch.nan, dtype=torch.float16)},
        {"xs": torch.ones(5)},
        {"ws": torch.ones(16, 1)},
        {"xs": torch.full((5, 1), torch.inf)},
    ],
    ids=["plain", "bias", "float16 output", "flat xs", "ws of two dimensions", "infinite scale"],
)
def test_a_well_formed_call_is_computed_here_and_not_by_stock(
    make_op: MakeOp, changes: dict[str, Any]
) -> None:
    stock, call = RecordingStock(), make_call(**changes)
    assert make_op(stock).function(*call.arguments()) is True
    assert call.is_exact()
    assert not stock.calls


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "a": torch.ones(5, 24, dtype=torch.int8),
                "b": torch.ones(16, 24, dtype=torch.int8),
            },
            id="K of 24",
        ),
        pytest.param(
            {
                "b": torch.ones(15, 32, dtype=torch.int8),
                "ws": torch.ones(15),
                "d": torch.full((5, 15), torch.nan),
            },
            id="N of 15",
        ),
        pytest.param({"xs": torch.ones(6)[1:].view(5, 1)}, id="xs not on 16 bytes"),
        pytest.param({"ws": torch.ones(20)[2:18]}, id="ws not on 16 bytes"),
        pytest.param({"bias": torch.ones(20)[3:19]}, id="bias not on 16 bytes"),
        pytest.param({"d": torch.full((84,), torch.nan)[1:81].view(5, 16)}, id="d not on 16 bytes"),
        pytest.param(
            {"d": torch.full((5, 16), torch.nan).half(), "bias": torch.ones(16)},
            id="bias of another dtype than the output",
        ),
    ],
)
def test_what_ours_leaves_to_stock_reaches_it_with_fresh_capsules(
    make_op: MakeOp, changes: dict[str, Any]
) -> None:
    stock, call = RecordingStock(), make_call(**changes)
    assert make_op(stock).function(*call.arguments()) is True
    assert call.is_exact()
    assert len(stock.calls) == 1


@pytest.mark.parametrize("result", [True, False])
def test_the_result_of_stock_is_handed_through(make_op: MakeOp, result: bool) -> None:
    stock, call = RecordingStock(result), make_call(k=24)
    assert make_op(stock).function(*call.arguments()) is result
    assert call.is_exact() == result


def test_a_release_that_reads_float32_gets_a_bias_of_any_dtype_computed(make_op: MakeOp) -> None:
    stock = RecordingStock()
    half = make_call(d=torch.full((5, 16), torch.nan, dtype=torch.float16))
    for bias in (torch.arange(16.0), torch.arange(16.0).half(), bfloat16_bias(16)):
        call = make_call(d=half.d.clone(), bias=bias)
        assert make_op(stock, release="0.2.31").function(*call.arguments()) is True
        assert call.is_exact()
    assert not stock.calls


def test_an_empty_call_goes_to_stock(make_op: MakeOp) -> None:
    stock = RecordingStock()
    call = make_call(
        a=torch.empty(0, 32, dtype=torch.int8), xs=torch.empty(0, 1), d=torch.empty(0, 16)
    )
    assert make_op(stock).function(*call.arguments()) is True
    assert len(stock.calls) == 1


def _changed(index: int, value: Any) -> Callable[[], list[Any]]:
    def arguments() -> list[Any]:
        values = make_call().arguments()
        values[index] = to_dlpack(value) if isinstance(value, torch.Tensor) else value
        return values

    return arguments


def _spent() -> list[Any]:
    values = make_call().arguments()
    for value in values[:6]:
        from_dlpack(value)
    return values


def _one_spent() -> list[Any]:
    values = make_call().arguments()
    from_dlpack(values[5])
    return values


MALFORMED = {
    "a of uint8": _changed(0, torch.zeros(5, 32, dtype=torch.uint8)),
    "a of one dimension": _changed(0, torch.zeros(32, dtype=torch.int8)),
    "a of three dimensions": _changed(0, torch.zeros(1, 5, 32, dtype=torch.int8)),
    "a transposed": _changed(0, torch.zeros(32, 5, dtype=torch.int8).t()),
    "a of another K": _changed(0, torch.zeros(5, 48, dtype=torch.int8)),
    "b of float32": _changed(1, torch.zeros(16, 32)),
    "b with a gap between rows": _changed(1, torch.zeros(16, 64, dtype=torch.int8)[:, :32]),
    "xs too short": _changed(2, torch.ones(4, 1)),
    "xs too long": _changed(2, torch.ones(6, 1)),
    "xs of float16": _changed(2, torch.ones(5, 1, dtype=torch.float16)),
    "ws too short": _changed(3, torch.ones(15)),
    "ws of one value": _changed(3, torch.ones(1)),
    "ws of float64": _changed(3, torch.ones(16, dtype=torch.float64)),
    "xs with gaps": _changed(2, torch.ones(5, 2)[:, :1]),
    "ws expanded": _changed(3, torch.ones(1).expand(16)),
    "bias of one value": _changed(4, torch.ones(1)),
    "bias with gaps": _changed(4, torch.ones(32)[::2]),
    "bias of int32": _changed(4, torch.ones(16, dtype=torch.int32)),
    "d transposed": _changed(5, torch.zeros(16, 5).t()),
    "d of another shape": _changed(5, torch.zeros(5, 24)),
    "d of another dtype than the code's": _changed(5, torch.zeros(5, 16, dtype=torch.float16)),
    "d of int32": _changed(5, torch.zeros(5, 16, dtype=torch.int32)),
    "code of another dtype": _changed(6, 2),
    "code 3": _changed(6, 3),
    "code -1": _changed(6, -1),
    "code None": _changed(6, None),
    "code a text": _changed(6, "0"),
    "a None": _changed(0, None),
    "bias None": _changed(4, None),
    "d a number": _changed(5, 1.0),
    "capsules spent": _spent,
    "one capsule spent": _one_spent,
    "one argument too many": lambda: [*make_call().arguments(), 0],
    "one argument too few": lambda: make_call().arguments()[:-1],
    "no argument": list,
}


@pytest.mark.parametrize("arguments", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_call_fails_as_stock_does_and_changes_nothing(
    make_op: MakeOp,
    real_stock: Callable[..., Any],
    arguments: Callable[[], list[Any]],
    breaker: Breaker,
) -> None:
    with pytest.raises(TypeError) as theirs:
        real_stock(*arguments())
    op = make_op(real_stock)
    for _ in range(2):  # Also where the same shapes have been computed before.
        with pytest.raises(type(theirs.value)) as ours:
            op.function(*arguments())
        assert ours.type is theirs.type
        assert breaker.snapshot() == (), "a mistake of the caller's is no failure of ours"
        good = make_call()
        assert op.function(*good.arguments()) is True
        assert good.is_exact()


@pytest.mark.parametrize("bare", range(6))
def test_what_is_no_capsule_reaches_stock_as_it_is(make_op: MakeOp, bare: int) -> None:
    """nanobind takes tensors too, whose memory may hold the values with the other sign."""
    seen: list[tuple[Any, ...]] = []

    def stock(*args: Any) -> bool:
        seen.append(args)
        return True

    call = make_call(bias=torch.ones(16))
    arguments = call.arguments()
    arguments[bare] = torch._neg_view(call.tensors[bare])
    assert make_op(stock).function(*arguments) is True
    ((*values, code, stream),) = seen
    assert (code, stream) == (arguments[6], arguments[7])
    assert values[bare] is arguments[bare]
    for index, value in enumerate(values):
        if index != bare:
            assert from_dlpack(value).data_ptr() == call.tensors[index].data_ptr()


def test_a_code_that_cannot_be_hashed_is_the_callers_mistake(
    make_op: MakeOp, real_stock: Callable[..., Any], breaker: Breaker
) -> None:
    op = make_op(real_stock)
    with pytest.raises(TypeError):
        op.function(*_changed(6, [0])())
    assert breaker.snapshot() == ()


@pytest.mark.parametrize(("index", "value"), [(6, False), (7, None), (7, 0.0), (7, False)])
def test_a_code_or_a_stream_that_is_no_plain_integer_is_for_stock_to_judge(
    make_op: MakeOp, index: int, value: object
) -> None:
    stock, call = RecordingStock(), make_call()
    arguments = call.arguments()
    arguments[index] = value
    assert make_op(stock).function(*arguments) is True
    assert stock.calls[0][index] is value
    assert call.is_exact()


@pytest.mark.parametrize("name", ["stream_ptr", "unknown"])
def test_keywords_reach_stock_untouched(make_op: MakeOp, name: str) -> None:
    seen: list[Any] = []

    def stock(*args: Any, **kwargs: Any) -> bool:
        seen.append((args, kwargs))
        return False

    *values, stream = make_call().arguments()
    assert make_op(stock).function(*values, **{name: stream}) is False
    ((args, kwargs),) = seen
    assert all(a is b for a, b in zip(args, values, strict=True))
    assert kwargs == {name: stream}


def test_an_additional_argument_reaches_stock_untouched(make_op: MakeOp) -> None:
    seen: list[Any] = []

    def stock(*args: Any) -> bool:
        seen.append(args)
        return True

    values = [*make_call().arguments(), "new in a later release"]
    assert make_op(stock).function(*values) is True
    assert all(a is b for a, b in zip(seen[0], values, strict=True))


def test_the_wrapper_looks_like_stock(make_op: MakeOp, real_stock: Callable[..., Any]) -> None:
    op = make_op(real_stock)
    function = op.function
    assert function is op.function
    assert function.__name__ == "cutlass_int8_dequant"
    assert function.__doc__ == real_stock.__doc__
    assert function.__module__ == real_stock.__module__
    assert function.__wrapped__ is real_stock
    expected = releases.RELEASES[-1].signatures["cutlass_int8_dequant"]
    assert function.__doc__.splitlines()[0] == expected


def test_the_signature_of_a_python_function_is_kept(make_op: MakeOp) -> None:
    def stock(a: int, b: int, *, c: int = 0) -> bool:
        return True

    assert inspect.signature(make_op(stock).function) == inspect.signature(stock)
