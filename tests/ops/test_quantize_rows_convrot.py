"""The row quantizer that rotates: which calls are ours, and what stays stock's."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext, Refused
from ck_patch.kernels.input_acts import INPUT_ACTS, InputAct, columns
from ck_patch.ops import quantize_rotated_rows, watched
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings
from tests.kernels import test_quantize_rows_convrot as rotating
from tests.kernels.test_quantize_rows_convrot import expected
from tests.ops.test_quantize_rows import Op

pytestmark = pytest.mark.interpreter

K = 256


@pytest.fixture
def op(breaker: Breaker) -> Op:
    return Op("cuda_convrot", breaker)


def assert_expected(found: Any, x: torch.Tensor) -> None:
    q, scale = expected(x)
    assert (found[0].dtype, found[1].dtype) == (torch.int8, torch.float32)
    assert torch.equal(found[0], q)
    assert torch.equal(found[1], scale[:, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [256, 1280])
@pytest.mark.parametrize("m", [1, 7])
def test_rows_are_rotated_and_quantized_by_ours(op: Op, m: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k).to(dtype)
    assert_expected(op.function(x, 256), x)
    assert op.calls == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"group_size": 256}),
        ((256, 0), {}),
        ((256, None, None), {}),
        ((256, -3), {"input_act": None}),
        ((256,), {"stochastic_rounding": 0}),
        ((256,), {"stochastic_rounding": None}),
    ],
    ids=str,
)
def test_what_says_no_more_than_the_group_is_ours(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x = torch.randn(3, K)
    assert op.takes(x, *args, **kwargs)
    assert_expected(op.function(x, *args, **kwargs), x)
    if not args:
        assert_expected(op.function(weight_2d=x, **kwargs), x)
        assert op.calls == []


def test_the_arguments_of_later_releases_at_their_defaults_are_ours(op: Op) -> None:
    if "input_act_eps" not in inspect.signature(op.stock).parameters:
        pytest.skip("this release has no norm in the quantizer")
    assert op.takes(torch.randn(3, K), 256, 0, None, None, 0.0)
    assert op.takes(torch.randn(3, K), 256, input_act_weight=None, input_act_eps=1e-6)
    assert not op.takes(torch.randn(3, K), 256, input_act_weight=torch.ones(K))


def run_act(op: Op, act: str, x: torch.Tensor, weight: torch.Tensor) -> Any:
    norm = (weight, 1e-3) if act == "rms_norm" else ()
    return op.function(x, 256, 0, act, *norm)


def skip_without(op: Op, act: str) -> None:
    from comfy_kitchen.backends import _activations

    if act not in _activations.INPUT_ACT_TO_CODE:
        assert not op.takes(torch.randn(3, 2 * K), 256, 0, act)
        pytest.skip("this release does not have it")


@pytest.mark.parametrize("act", INPUT_ACTS)
def test_activations_are_ours(op: Op, act: InputAct) -> None:
    skip_without(op, act)
    x, weight = torch.randn(3, K * columns(act)), torch.randn(K)
    q, scale = run_act(op, act, x, weight)
    right = rotating.run_act(act, x, weight)
    assert torch.equal(q, right[0])
    assert torch.equal(scale, right[1][:, None])
    assert op.calls == []


def test_pairs_give_rows_of_half_the_columns_up_to_the_longest_of_stocks(op: Op) -> None:
    q, scale = op.function(torch.randn(1, 32_768), 256, input_act="swiglu")
    assert (q.shape, scale.shape, op.calls) == ((1, 16_384), (1, 1), [])
    for wide in (K, 3 * K, 33_280):
        assert not op.takes(torch.randn(1, wide), 256, input_act="swiglu")
    assert op.takes(torch.randn(3, K), 256, input_act="none")


@pytest.mark.parametrize(
    ("m", "weight", "eps"),
    [
        (1, torch.ones(K), 1e-6),
        (3, None, 1e-6),
        (3, torch.ones(2 * K), 1e-6),
        (3, torch.ones(1, K), 1e-6),
        (3, torch.ones(K, device="meta"), 1e-6),
        (3, torch.ones(K + 1)[1:], 1e-6),
        (3, torch.ones(K, requires_grad=True), 1e-6),
        (3, [1.0] * K, 1e-6),
        (3, torch.ones(K), torch.tensor(1e-6)),
        (3, torch.ones(K), None),
    ],
    ids=[
        *("one row", "no weight", "long", "2-d", "elsewhere", "unaligned", "gradient", "a list"),
        *("a tensor of eps", "no eps"),
    ],
)
def test_other_norms_are_stocks(op: Op, m: int, weight: Any, eps: Any) -> None:
    skip_without(op, "rms_norm")
    assert not op.takes(torch.randn(m, K), 256, 0, "rms_norm", weight, eps)


def test_a_weight_is_taken_in_the_dtype_of_x(op: Op) -> None:
    skip_without(op, "rms_norm")
    x, weight = torch.randn(3, K).half(), torch.randn(K)
    q, scale = run_act(op, "rms_norm", x, weight)
    right = rotating.run_act("rms_norm", x, weight.half())
    assert torch.equal(q, right[0])
    assert torch.equal(scale, right[1][:, None])
    assert op.calls == []


def test_an_activation_that_stocks_release_does_not_have_is_stocks(breaker: Breaker) -> None:
    def stock(weight_2d: Any, group_size: int, seed: int = 0, input_act: Any = None) -> str:
        return "stock"

    context = OpContext(Settings(), breaker, RELEASES[-1], check_first=False)
    function = quantize_rotated_rows.build(stock, context).function
    assert function(torch.randn(3, 2 * K), 256, 0, "swiglu") == "stock"
    assert function(torch.randn(3, 2 * K), 256, 0, "none") != "stock"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((64,), {}),
        ((16,), {}),
        ((256.0,), {}),
        ((torch.tensor(256),), {}),
        ((256, 7), {}),
        ((256, True), {}),
        ((256,), {"stochastic_rounding": 2**40}),
        ((256, 7, "swiglu"), {}),
        ((256,), {"input_act": "silu"}),
        ((256,), {"input_act": 2}),
    ],
    ids=str,
)
def test_other_groups_seeds_and_unknown_activations_are_stocks(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert not op.takes(torch.randn(3, K), *args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((256,), {"group_size": 256}),
        ((256, 0), {"stochastic_rounding": 0}),
        ((256,), {"transformer_options": None}),
        ((256, 0, None, None, 0.0, 0), {}),
    ],
    ids=str,
)
def test_what_stock_does_not_take_is_stocks_to_refuse(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        op.function(torch.randn(3, K), *args, **kwargs)
    assert len(op.calls) == 1
    with pytest.raises(TypeError):
        op.function()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(K),
        torch.randn(2, 3, K),
        torch.randn(3, 300),
        torch.randn(1, 16_640),
        torch.randn(3, K).double(),
        torch.empty(0, K),
        torch.empty(3, 0),
        torch.randn(K, 2 * K).t(),
        torch.randn(3, 3 * K)[:, K : 2 * K],
        torch.randn(3 * K + 1)[1:].view(3, K),
        torch.randn(3, K, requires_grad=True),
        torch.nn.Parameter(torch.randn(3, K)),
        torch.randn(3, K, device="meta"),
        "x",
        None,
    ],
    ids=[
        *("a row", "3-d", "no whole groups", "longer than stock's rows", "float64", "no rows"),
        *("no columns", "transposed", "columns", "unaligned", "gradient", "parameter", "meta"),
        *("text", "None"),
    ],
)
def test_what_is_no_plain_matrix_is_stocks(op: Op, breaker: Breaker, x: Any) -> None:
    assert not op.takes(x, 256)
    assert breaker.snapshot() == ()


def test_the_longest_row_of_stocks_is_ours(op: Op) -> None:
    x = torch.randn(1, 16_384)
    assert_expected(op.function(x, 256), x)
    assert op.calls == []


def test_the_quantizer_looks_like_stock_and_its_results_are_new(op: Op) -> None:
    assert inspect.signature(op.function) == inspect.signature(op.stock)
    assert (op.function.__name__, op.function.__doc__) == (op.stock.__name__, op.stock.__doc__)
    x = torch.randn(3, K)
    op.function(x, 256)[0].zero_()
    assert_expected(op.function(x, 256), x)
    with torch.inference_mode():
        assert_expected(op.function(x.clone(), 256), x)


def test_a_deactivated_quantizer_and_dynamo_have_stock(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(3, K)
    with monkeypatch.context() as patch:
        patch.setattr(watched, "_is_compiling", lambda: True)
        assert not op.takes(x, 256)
    assert op.takes(x, 256)
    op.op.deactivate()
    assert not op.takes(x, 256)


@pytest.mark.parametrize(
    "settings", [{"int8": "stock"}, {"assume": ((None, (7, 0)),)}, {"assume": ((None, (8, 9)),)}]
)
def test_where_the_policy_has_no_kernel_of_ours_it_is_stocks(
    breaker: Breaker, settings: dict[str, Any]
) -> None:
    """The eager backend, which takes over the plain quantizer on a V100, has none that rotates."""
    assert not Op("cuda_convrot", breaker, **settings).takes(torch.randn(3, K), 256)


def test_a_release_that_is_too_new_has_no_quantizer_of_ours(op: Op) -> None:
    newer = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=True)
    with pytest.raises(Refused, match="newer"):
        quantize_rotated_rows.build(op.stock, newer)
