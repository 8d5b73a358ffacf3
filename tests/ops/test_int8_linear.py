"""The linears of the eager and the Triton backend: the real host, our kernels interpreted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext, op_of
from ck_patch.ops import watched
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings
from tests import reference
from tests.ops.linear import Bench, Form, K, N, form

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def expected(bench: Bench, given: Form) -> torch.Tensor:
    """What the backend makes of the rows that our quantizer gives, every bit of it.

    On the CPU stock's eager function is that itself. Stock's Triton kernel is not, there: the
    interpreter does not fuse what the compiler does.
    """
    if bench.backend == "eager":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bench.host, bench.quantizer, bench.rows.function)
            return bench.stock(**given)
    from tests.interpreter_facts import interpreter_rounding

    x, weight, host = given["x"], given["weight"], bench.host
    names = ("input_act", "input_act_weight", "input_act_eps")
    if given.get("input_act") is not None:
        x = host._apply_input_act(x, *(given[name] for name in names if name in given))
    if given.get("convrot"):
        group = given.get("convrot_groupsize", 256)
        h = host._build_hadamard(group, device=x.device, dtype=x.dtype)
        x = host._rotate_activation(x, h, group)
    q, scale = bench.rows.function(x.reshape(-1, x.shape[-1]).contiguous())
    bias = given.get("bias")
    w_scale = given["weight_scale"].detach().float().reshape(-1).expand(len(weight))
    out = reference.gemm(
        *(q, weight, scale, w_scale, None if bias is None else bias.detach()),
        *(given["out_dtype"], interpreter_rounding(), "triton"),
    ).reshape(*x.shape[:-1], -1)
    if given.get("residual") is None:
        return out
    result: torch.Tensor = host._apply_residual(out, given["residual"], given["residual_scale"])
    return result


def skip_unless_known(bench: Bench, given: Form) -> None:
    """Skip what the installed release does not take yet."""
    from comfy_kitchen.backends._activations import INPUT_ACT_TO_CODE

    unknown = given.keys() - inspect.signature(bench.stock).parameters.keys()
    if unknown or given.get("input_act") not in INPUT_ACT_TO_CODE:
        pytest.skip(f"not in this release: {', '.join(unknown) or given['input_act']}")


def check(bench: Bench, given: Form) -> torch.Tensor:
    """Compute by ours alone and compare every bit; returns the result."""
    out = bench.ours(**given)
    bench.assert_ours()
    exact = expected(bench, given)
    assert (out.shape, out.dtype) == (exact.shape, exact.dtype)
    assert torch.equal(reference.bits(out), reference.bits(exact))
    assert out.is_contiguous()
    assert not out.requires_grad
    return out


FORMS: dict[str, Callable[[], Form]] = {
    "plain": form,
    "float16 output": lambda: form(out_dtype=torch.float16),
    "float16 x": lambda: form(torch.randn(5, K).half(), out_dtype=torch.float16),
    "float32 bias": lambda: form(bias=torch.randn(N)),
    "float16 bias": lambda: form(bias=torch.randn(N).half(), out_dtype=torch.float16),
    "bfloat16 bias": lambda: form(bias=torch.randn(N).bfloat16()),
    "float32 bias on float16": lambda: form(bias=torch.randn(N), out_dtype=torch.float16),
    "large and small bias": lambda: form(bias=torch.tensor([3e4, 1e-4]).repeat(N // 2)),
    "bias of two dimensions": lambda: form(bias=torch.randn(1, N)),
    "bias not on 16 bytes": lambda: form(bias=torch.randn(N + 1)[1:]),
    "scale 0-d": lambda: form(weight_scale=torch.tensor(0.01)),
    "scale [1]": lambda: form(weight_scale=torch.tensor([0.01])),
    "scale [1, 1]": lambda: form(weight_scale=torch.tensor([[0.01]])),
    "scale [N, 1]": lambda: form(weight_scale=torch.rand(N, 1)),
    "scale of float16": lambda: form(weight_scale=torch.rand(N).half()),
    "scale of bfloat16": lambda: form(weight_scale=torch.rand(N, 1).bfloat16()),
    "scale strided": lambda: form(weight_scale=torch.rand(2 * N)[::2]),
    "scale not on 16 bytes": lambda: form(weight_scale=torch.rand(N + 1)[1:]),
    "1-D": lambda: form(torch.randn(K)),
    "3-D": lambda: form(torch.randn(2, 7, K)),
    "4-D": lambda: form(torch.randn(1, 2, 7, K)),
    "columns of a larger x": lambda: form(torch.randn(6, 3 * K)[:, K : 2 * K]),
    "x transposed": lambda: form(torch.randn(K, 9).t()),
    "one row for all": lambda: form(torch.randn(1, K).expand(7, K)),
    "one value for all": lambda: form(torch.randn(1, 1).expand(4, K)),
    "rotated by 16": lambda: form(convrot=True, convrot_groupsize=16),
    "rotated by 64": lambda: form(torch.randn(2, 3, 128), convrot=True, convrot_groupsize=64),
    "rotated by 256": lambda: form(torch.randn(4, 512), convrot=True, convrot_groupsize=256),
    "rotated in float16": lambda: form(
        torch.randn(4, 256).half(), convrot=True, out_dtype=torch.float16
    ),
    "rotated beyond the fused limit": lambda: form(torch.randn(3, 24576), convrot=True),
    "rotated at the fused limit": lambda: form(torch.randn(3, 16384), convrot=True),
    "K of 48": lambda: form(torch.randn(33, 48)),
    "K of 2064": lambda: form(torch.randn(3, 2064)),
    "an outlier in each row": lambda: form(torch.randn(5, K).index_fill(1, torch.tensor([7]), 200)),
    "a row of zeros": lambda: form(torch.randn(5, K).index_fill(0, torch.tensor([2]), 0)),
    "no activation by name": lambda: form(input_act="none"),
    "gelu_tanh": lambda: form(input_act="gelu_tanh"),
    "swiglu": lambda: gated("swiglu"),
    "situ": lambda: gated("situ"),
    "swiglu, rotated": lambda: {**gated("swiglu"), "convrot": True, "convrot_groupsize": 16},
    "rms_norm": lambda: form(
        input_act="rms_norm", input_act_weight=torch.randn(K), input_act_eps=1e-5
    ),
    "residual": lambda: form(residual=torch.randn(5, N), residual_scale=torch.randn(N)),
    "residual with bias": lambda: form(
        bias=torch.randn(N), residual=torch.randn(5, N), residual_scale=torch.randn(N)
    ),
    "residual on float16": lambda: form(
        residual=torch.randn(5, N).half(),
        residual_scale=torch.randn(N),
        out_dtype=torch.float16,
    ),
    "residual in three dimensions": lambda: form(
        torch.randn(2, 3, K), residual=torch.randn(2, 3, N), residual_scale=torch.randn(N)
    ),
}


def gated(act: str) -> Form:
    return {**form(), "x": torch.randn(5, 2 * K), "input_act": act}


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_a_linear_is_exact_without_stock(
    bench: Bench, make: Callable[[], Form]
) -> None:
    given = make()
    skip_unless_known(bench, given)
    check(bench, given)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 40])
def test_every_number_of_rows_is_exact(bench: Bench, m: int) -> None:
    check(bench, form(torch.randn(m, K), bias=torch.randn(N)))


@pytest.mark.parametrize("x", [torch.randn(5, K), torch.randn(5, K).bfloat16()], ids=["32", "16"])
def test_bfloat16_is_as_near_as_the_interpreter_can_tell(bench: Bench, x: torch.Tensor) -> None:
    """It cuts values off where GPUs round them; tests/gpu compares the bits."""
    given = form(x, out_dtype=torch.bfloat16, bias=torch.randn(N))
    out = bench.ours(**given)
    bench.assert_ours()
    exact = x.double() @ (given["weight"].double().t() * given["weight_scale"].double())
    assert out.dtype == torch.bfloat16
    # Quantizing costs up to a tenth, and cutting off x in bfloat16 as much again.
    torch.testing.assert_close(out.double(), exact + given["bias"], rtol=0.02, atol=0.4)


def test_rows_not_on_16_bytes_are_quantized_by_stock(bench: Bench) -> None:
    given = form(torch.randn(5 * K + 1)[1:].view(5, K))
    out = bench.ours(**given)
    assert (bench.calls, bench.launches) == ([], ["gemm"])
    torch.testing.assert_close(out, bench.stock(**given), rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("bias", [None, torch.randn(N)], ids=["no bias", "bias"])
def test_stocks_eager_function_gives_the_same_bits_on_the_cpu(
    eager: Bench, bias: torch.Tensor | None
) -> None:
    """Where its scales are what a GPU makes of them, which multiplies by 1 / 127: in rows whose
    largest value is 127 by a power of two."""
    x = torch.randn(20, K)
    x[:, 5] = 127 * 2.0 ** torch.randint(-6, 0, (20,))
    given = form(x.half(), bias=bias, out_dtype=torch.float16)
    out = eager.ours(**given)
    eager.assert_ours()
    assert torch.equal(reference.bits(out), reference.bits(eager.stock(**given)))


@pytest.mark.parametrize("shape", [(0, K), (0, 77, K), (2, 0, K), (1, 0, 3, K)], ids=str)
@pytest.mark.parametrize("act", [None, "swiglu"])
def test_no_rows_give_no_rows(bench: Bench, shape: tuple[int, ...], act: str | None) -> None:
    given = form(torch.randn(shape), out_dtype=torch.float16)
    if act is not None:
        given |= {"x": torch.randn(*shape[:-1], 2 * K), "input_act": act}
    out = bench.ours(**given)
    assert (out.shape, out.dtype) == ((*shape[:-1], N), torch.float16)
    assert (bench.calls, bench.launches) == ([], [])


TO_STOCK: dict[str, Callable[[], Form]] = {
    **{f"K of {k}": functools.partial(lambda k: form(torch.randn(5, k)), k) for k in (17, 20, 100)},
    "N of 12": lambda: form(
        weight=torch.ones(12, K, dtype=torch.int8), weight_scale=torch.rand(12)
    ),
    "weight strided": lambda: form(weight=torch.ones(N, 2 * K, dtype=torch.int8)[:, ::2]),
    "weight not on 16 bytes": lambda: form(
        weight=torch.ones(N * K + 8, dtype=torch.int8)[8:].view(N, K)
    ),
    "x with the negative bit": lambda: form(torch._neg_view(torch.randn(5, K))),
    "weight with the negative bit": lambda: form(
        weight=torch._neg_view(torch.ones(N, K, dtype=torch.int8))
    ),
    "scale with the negative bit": lambda: form(weight_scale=torch._neg_view(torch.rand(N))),
    "bias with the negative bit": lambda: form(bias=torch._neg_view(torch.rand(N))),
}


@pytest.mark.parametrize("make", TO_STOCK.values(), ids=TO_STOCK.keys())
def test_what_is_not_ours_reaches_stock_with_the_very_same_objects(
    bench: Bench, breaker: Breaker, make: Callable[[], Form]
) -> None:
    given = make()
    out = bench.ours(**given)
    bench.assert_given_to_stock(given)
    assert torch.allclose(out, bench.stock(**given), rtol=1e-6)
    assert breaker.snapshot() == ()


def test_a_float64_x_is_stocks(eager: Bench) -> None:
    given = form(torch.randn(5, K).double())
    assert torch.equal(eager.ours(**given), eager.stock(**given))
    assert len(eager.calls) == 1


WRONG: dict[str, Callable[[], Form]] = {
    "unknown activation": lambda: form(input_act="foo"),
    "half the width of a gated pair": lambda: form(input_act="swiglu"),
    "rms_norm without a weight": lambda: form(input_act="rms_norm"),
    "twice the width": lambda: {**form(), "x": torch.randn(5, 2 * K)},
    "residual without a scale": lambda: form(residual=torch.randn(5, N)),
    "residual of another shape": lambda: form(
        residual=torch.randn(5, N + 1), residual_scale=torch.randn(N)
    ),
    "group that does not divide K": lambda: form(torch.randn(5, 48), convrot=True),
    "group of no power of four": lambda: form(convrot=True, convrot_groupsize=32),
    "group of zero": lambda: form(convrot=True, convrot_groupsize=0),
    "scale too short": lambda: form(weight_scale=torch.rand(N - 1)),
    "scale too long": lambda: form(weight_scale=torch.rand(2 * N)),
    "bias too short": lambda: form(bias=torch.randn(N - 1)),
    "weight of one dimension": lambda: form(weight=torch.ones(K, dtype=torch.int8)),
    "float weight": lambda: form(weight=torch.ones(N, K)),
    "no weight": lambda: form(weight=None),
    "x a number": lambda: form(x=None, weight_scale=torch.rand(N)) | {"x": 7},
    "x of no dimension": lambda: form() | {"x": torch.tensor(1.0)},
    "output of int32": lambda: form(out_dtype=torch.int32),
    "K of 0": lambda: form(torch.randn(5, 0)),
    "an unknown keyword": lambda: form(transformer_options={}),
}


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG.keys())
def test_what_stock_refuses_is_refused_by_stock(
    eager: Bench, breaker: Breaker, make: Callable[[], Form]
) -> None:
    given = make()
    try:
        theirs: Any = eager.stock(**given)
    except Exception as error:
        theirs = error
    if not isinstance(theirs, Exception):
        assert torch.equal(eager.ours(**given), theirs)
    else:
        with pytest.raises(type(theirs)) as ours:
            eager.ours(**given)
        assert str(ours.value) == str(theirs)
    eager.assert_given_to_stock(given)
    assert breaker.snapshot() == (), "a mistake of the caller's is no failure of ours"
    eager.calls.clear()
    eager.launches.clear()
    check(eager, form())


@pytest.mark.parametrize(
    "name",
    [
        "unknown activation",
        "rms_norm without a weight",
        "residual without a scale",
        "group of no power of four",
        "scale too short",
        "no weight",
        "x a number",
        "an unknown keyword",
    ],
)
def test_what_the_triton_backend_refuses_is_refused_by_it(triton: Bench, name: str) -> None:
    given = WRONG[name]()
    with pytest.raises(Exception) as theirs:  # noqa: PT011, whatever it is
        triton.stock(**given)
    with pytest.raises(theirs.type):
        triton.ours(**given)
    assert len(triton.calls) == 1


def test_one_more_argument_is_stocks_to_refuse(bench: Bench) -> None:
    count = len(inspect.signature(bench.stock).parameters)
    given = [*form().values(), *[None] * count][: count + 1]
    with pytest.raises(TypeError):
        bench.ours(*given)
    ((args, _),) = bench.calls
    assert all(a is b for a, b in zip(args, given, strict=True))


def test_an_argument_given_twice_is_stocks_to_refuse(bench: Bench) -> None:
    with pytest.raises(TypeError, match="multiple values"):
        bench.ours(torch.randn(5, K), **form())


def test_nothing_at_all_is_stocks_to_refuse(bench: Bench) -> None:
    with pytest.raises(TypeError):
        bench.ours()
    assert len(bench.calls) == 1


def test_arguments_by_position_are_understood(bench: Bench) -> None:
    given = form(bias=torch.randn(N))
    order = ("x", "weight", "weight_scale", "bias", "out_dtype")
    out = bench.ours(*(given[name] for name in order))
    bench.assert_ours()
    assert torch.equal(out, expected(bench, given))


def test_the_op_looks_like_stock(bench: Bench) -> None:
    function = bench.op.function
    assert function is bench.op.function
    assert inspect.signature(function) == inspect.signature(bench.stock)
    assert function.__name__ == bench.stock.__name__ == "int8_linear"
    assert function.__doc__ == bench.stock.__doc__
    assert function.__module__ == bench.stock.__module__


@pytest.mark.parametrize("name", ["x", "weight_scale", "bias", "input_act_weight"])
def test_what_needs_a_gradient_is_stocks_and_gets_one(eager: Bench, name: str) -> None:
    given = form(
        bias=torch.randn(N),
        input_act="rms_norm",
        input_act_weight=torch.randn(K),
        input_act_eps=1e-5,
    )
    skip_unless_known(eager, given)
    given[name] = given[name].clone().requires_grad_()
    theirs = eager.stock(**given)
    out = eager.ours(**given)
    assert len(eager.calls) == 1
    assert theirs.requires_grad
    assert out.requires_grad
    eager.calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(eager.ours(**given), out.detach())
    assert (eager.calls, eager.launches[-1]) == ([], "gemm")


def test_a_residual_that_needs_a_gradient_passes_it_on(eager: Bench) -> None:
    residual = torch.randn(5, N, requires_grad=True)
    given = form(residual=residual, residual_scale=torch.randn(N))
    skip_unless_known(eager, given)
    out = eager.ours(**given)
    eager.assert_ours()
    out.sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.ones(5, N))


def test_parameters_outside_no_grad_are_computed_without_an_autograd_error(bench: Bench) -> None:
    given = form(bias=torch.randn(N))
    for name in ("weight", "weight_scale", "bias"):
        given[name] = torch.nn.Parameter(given[name], requires_grad=False)
    check(bench, given)


def test_inference_tensors_work_inside_and_outside_of_inference_mode(bench: Bench) -> None:
    with torch.inference_mode():
        given = form(bias=torch.randn(N))
        inside = check(bench, given)
    bench.launches.clear()
    outside = check(bench, given)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize("elsewhere", ["weight", "weight_scale", "bias"])
def test_operands_of_two_devices_are_stocks_before_anything_is_launched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, elsewhere: str
) -> None:
    # Triton's kernels take a peer's memory by its address: stock may well compute such a call.
    given = form(bias=torch.randn(N))
    given[elsewhere] = given[elsewhere].to("meta")
    monkeypatch.setattr(bench, "stock", lambda **kwargs: "stock")
    for name in ("device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, None)
    assert bench.ours(**given) == "stock"
    bench.assert_given_to_stock(given)
    assert bench.launches == []


def test_callers_may_change_what_they_get(bench: Bench) -> None:
    given = form()
    first = bench.ours(**given)
    first.zero_()
    assert bench.ours(**given).abs().sum() > 0


def test_a_deactivated_op_passes_everything_on(bench: Bench) -> None:
    bench.op.deactivate()
    bench.ours(**form())
    assert (len(bench.calls), bench.launches) == (1, ["quantizer"])


def test_the_function_says_whose_it_is(bench: Bench) -> None:
    assert op_of(bench.op.function) is bench.op


def test_dynamo_traces_stock_instead(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_is_compiling", lambda: True)
    bench.ours(**form())
    assert (len(bench.calls), bench.launches) == (1, [])


def test_a_release_that_is_too_new_has_no_linear_of_ours(eager: Bench, triton: Bench) -> None:
    from ck_patch.context import Refused
    from ck_patch.ops import int8_linear, triton_rows

    newer = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=True)
    with pytest.raises(Refused, match="newer"):
        int8_linear.build_eager(eager.stock, newer)
    chunked = int8_linear.build_triton(triton.stock, newer)
    assert isinstance(chunked, triton_rows.RowChunks)
