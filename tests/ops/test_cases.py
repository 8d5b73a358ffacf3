"""Reported failures of INT8 linears as whole calls: interpreted kernels, and the FP16 path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from tests import reference
from tests.ops.linear import Bench, Form, K, N, form
from tests.ops.slot import RecordingStock, make_call
from tests.ops.test_int8_linear import check, expected, skip_unless_known

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALVES = (F16, BF16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_one_nan_spoils_no_other_row_and_its_own_as_stock_does(
    bench: Bench, dtype: torch.dtype
) -> None:
    given = form(torch.randn(8, K).to(dtype), bias=torch.randn(N))
    clean = bench.ours(**given)
    given["x"] = given["x"].clone()
    given["x"][3, 7] = torch.nan
    bench.launches.clear()
    out = check(bench, given)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(out[others], clean[others])
    assert bench.backend == "triton" or out[3].isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_an_infinity_spoils_no_other_row_and_none_of_the_triton_backend(
    bench: Bench, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.randn(4, 5376).to(dtype)
    x[3, 7] = largest
    given = form(x, weight_scale=torch.full((N,), 2.0**-20))
    clean = bench.ours(**{**given, "x": x[[0, 3]]})
    x[1, 5], x[2, 5375] = torch.inf, -torch.inf
    bench.launches.clear()
    out = check(bench, given)
    assert torch.equal(out[[0, 3]], clean)
    if bench.backend == "triton":
        # What remains of the row is the infinity, at the end of its dtype.
        step, weight = largest / 127 * 2.0**-20, given["weight"].float()
        assert torch.allclose(out[1], 127 * weight[:, 5] * step, rtol=1e-5)
        assert torch.allclose(out[2], -128 * weight[:, 5375] * step, rtol=1e-5)


@pytest.mark.interpreter
def test_a_sum_beyond_float16_is_infinite_there_and_finite_elsewhere(bench: Bench) -> None:
    weight = torch.full((N, 5376), 127, dtype=torch.int8)
    for dtype in (F32, F16, BF16):
        given = form(torch.full((3, 5376), 127.0), weight=weight, weight_scale=torch.ones(1))
        out = bench.ours(**{**given, "out_dtype": dtype})
        if dtype == F16:
            assert (out == torch.inf).all()
        else:
            assert torch.allclose(out.float(), torch.tensor(86_709_504.0), rtol=2.0**-7)
    assert bench.calls == []


@pytest.mark.interpreter
def test_such_a_sum_is_infinite_in_the_order_of_the_cuda_backend_too(
    make_op: Callable[..., Any],
) -> None:
    for dtype in (F32, F16, BF16):
        call = make_call(
            a=torch.full((5, 5376), 127, dtype=torch.int8),
            b=torch.full((16, 5376), 127, dtype=torch.int8),
            xs=torch.ones(5, 1),
            ws=torch.ones(16),
            d=torch.full((5, 16), torch.nan, dtype=dtype),
        )
        stock = RecordingStock()
        assert make_op(stock).function(*call.arguments()) is True
        assert stock.calls == []
        if dtype == F16:
            assert (call.d == torch.inf).all()
        else:
            assert torch.allclose(call.d.float(), torch.tensor(86_709_504.0), rtol=2.0**-7)


@pytest.mark.interpreter
@pytest.mark.parametrize("n", [17, 24, 40])
def test_columns_that_fill_no_tile_leak_into_no_number_of_rows(bench: Bench, n: int) -> None:
    """N of 17 is stock's: nothing of its own is compared there, only that it is right."""
    given = form(
        torch.randn(40, 272),
        weight=torch.randint(-127, 128, (n, 272), dtype=torch.int8),
        weight_scale=torch.rand(n) * 0.01,
    )
    whole = expected(bench, given)
    for m in (*range(1, 18), 31, 32, 33, 40):
        out = bench.ours(**{**given, "x": given["x"][:m]})
        if n == 17:
            assert torch.allclose(out, whole[:m], rtol=1e-3, atol=0.05), m
        else:
            assert torch.equal(reference.bits(out), reference.bits(whole[:m])), m
    assert bool(bench.calls) == (n == 17)


@pytest.fixture
def volta(eager_host: Any, breaker: Breaker) -> Bench:
    """The eager backend where the weight is dequantized to FP16."""
    return Bench("eager", eager_host, breaker, assume=((None, (7, 0)),))


def exact(given: Form) -> torch.Tensor:
    """A plain or rotated linear in float64."""
    x = given["x"].double()
    if given.get("convrot"):
        from comfy_kitchen.backends.eager.quantization import _build_hadamard

        group = given["convrot_groupsize"]
        h = _build_hadamard(group, dtype=torch.float64)
        x = (x.reshape(-1, group) @ h).reshape(x.shape)
    scale = given["weight_scale"].double().reshape(1, -1)
    out: torch.Tensor = x @ given["weight"].double().t() * scale
    bias = given.get("bias")
    return out if bias is None else out + bias.double()


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error of a row, by norms."""
    truth = truth.reshape(-1, truth.shape[-1])
    difference = out.reshape(truth.shape).double() - truth
    return float((difference.norm(dim=1) / truth.norm(dim=1)).max())


def right(volta: Bench, given: Form) -> torch.Tensor:
    """Computed in FP16, not by stock, and as near to the exact result as float16 allows."""
    out = volta.ours(**given)
    assert volta.calls == []
    assert out.is_contiguous()
    assert error(out, exact(given)) < 2e-3
    return out


@pytest.mark.parametrize("m", [1, 2, 40])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_products_that_cancel_leave_exactly_zero_in_fp16(
    volta: Bench, dtype: torch.dtype, m: int
) -> None:
    weight = torch.ones(8, 16_384, dtype=torch.int8)
    weight[:, 8192:] = -1
    x = torch.full((m, 16_384), 8.0, dtype=dtype)
    given = form(x, weight=weight, weight_scale=torch.ones(1), out_dtype=F16)
    assert (volta.ours(**given) == 0).all()
    assert volta.calls == []


@pytest.mark.parametrize("m", [1, 2, 3, 8, 15, 16, 17, 32])
def test_every_number_of_rows_is_right_in_fp16(volta: Bench, m: int) -> None:
    right(volta, form(torch.randn(m, K), bias=torch.randn(N)))


@pytest.mark.parametrize("shape", [(0, K), (0, 77, K), (2, 0, K)], ids=str)
def test_no_rows_give_no_rows_in_fp16(volta: Bench, shape: tuple[int, ...]) -> None:
    out = volta.ours(**form(torch.randn(shape), out_dtype=BF16))
    assert (out.shape, out.dtype) == ((*shape[:-1], N), BF16)
    assert volta.calls == []


@pytest.mark.parametrize("n", [51_865, 51_866, 51_868])
def test_any_number_of_columns_is_right_in_fp16(volta: Bench, n: int) -> None:
    weight = torch.randint(-127, 128, (n, 32), dtype=torch.int8)
    right(volta, form(torch.randn(5, 32), weight=weight, weight_scale=torch.rand(n) * 0.01))


@pytest.mark.parametrize("k", [17, 20, 24, 48, 100, 2064])
@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_any_depth_is_right_in_fp16_at_the_end_of_the_memory_of_x(
    volta: Bench, dtype: torch.dtype, k: int
) -> None:
    memory = torch.full((100 + 33 * k,), torch.nan, dtype=dtype)
    x = memory[100:].view(33, k).copy_(torch.randn(33, k))
    right(volta, form(x))
    assert memory[:100].isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[0],
        lambda x: x[:14].view(2, 7, K),
        lambda x: x[:14].view(1, 2, 7, K),
        lambda x: torch.cat([x, x, x], 1)[:, K : 2 * K],
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(7, K),
        lambda x: torch.cat([x, x], 1)[:, ::2],
    ],
    ids=["1-D", "3-D", "4-D", "columns", "transposed", "expanded", "every second value"],
)
def test_dimensions_and_strides_change_nothing_in_fp16(
    volta: Bench, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    given = form(change(torch.randn(20, K)), bias=torch.randn(N))
    out = right(volta, given)
    assert out.shape == (*given["x"].shape[:-1], N)
    assert torch.equal(out, volta.ours(**{**given, "x": given["x"].contiguous()}))


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor(0.01),
        torch.tensor([0.01]),
        torch.tensor([[0.01]]),
        torch.rand(N) + 0.01,
        torch.rand(N, 1) + 0.01,
        torch.rand(N).half() + 0.01,
        torch.rand(N).bfloat16() + 0.01,
    ],
    ids=["0-d", "[1]", "[1, 1]", "[N]", "[N, 1]", "float16", "bfloat16"],
)
def test_every_form_of_scale_is_right_in_fp16(volta: Bench, scale: torch.Tensor) -> None:
    right(volta, form(weight_scale=scale))


@pytest.mark.parametrize("group", [16, 64, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_rotation_of_outliers_is_no_worse_than_stocks_in_fp16(
    volta: Bench, dtype: torch.dtype, group: int
) -> None:
    x = torch.randn(24, 1024)
    x[:, 7::group] *= 200
    given = form(x.to(dtype), convrot=True, convrot_groupsize=group)
    ours = volta.ours(**given)
    assert volta.calls == []
    truth = exact(given)
    assert error(ours, truth) <= error(volta.stock(**given), truth)


@pytest.mark.parametrize("k", [15_360, 16_384, 24_576])
def test_either_side_of_the_limit_of_the_fused_rotation_is_right_in_fp16(
    volta: Bench, k: int
) -> None:
    right(volta, form(torch.randn(3, k), convrot=True, convrot_groupsize=256))


def test_a_residual_is_never_dropped_in_fp16(volta: Bench) -> None:
    given = form(torch.randn(40, K).half(), out_dtype=F16)
    more = {"residual": torch.randn(40, N).half(), "residual_scale": torch.randn(N)}
    skip_unless_known(volta, {**given, **more})
    out = volta.ours(**given, **more)
    assert volta.calls == []
    truth = more["residual"].double() + more["residual_scale"].double() * exact(given)
    assert error(out, truth) < 2e-3


@pytest.mark.parametrize(
    "make",
    [
        lambda: form(input_act="foo"),
        lambda: form(input_act="swiglu"),
        lambda: form(torch.randn(5, 48), convrot=True),
        lambda: form(bias=torch.randn(N - 1)),
        lambda: form(weight_scale=torch.rand(N - 1)),
        lambda: form(torch.randn(5, 0)),
    ],
    ids=["activation", "half of a pair", "group", "bias", "scale", "K of 0"],
)
def test_what_stock_refuses_is_refused_by_stock_where_fp16_runs(
    volta: Bench, breaker: Breaker, make: Callable[[], Form]
) -> None:
    given = make()
    try:
        theirs: Any = volta.stock(**given)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            volta.ours(**given)
    else:
        assert torch.equal(volta.ours(**given), theirs)
    volta.assert_given_to_stock(given)
    assert breaker.snapshot() == ()


def test_out_of_memory_in_ours_and_in_stock_reaches_the_caller_and_closes_nothing(
    volta: Bench, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = form()
    with monkeypatch.context() as patch:

        def exhausted(*args: Any, **kwargs: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

        patch.setattr(torch, "empty", exhausted)
        patch.setattr(volta, "stock", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            volta.ours(**given)
    assert len(volta.calls) == 1
    assert breaker.snapshot() == ()
    volta.calls.clear()
    right(volta, given)


def test_each_gpu_of_a_mixed_host_has_its_own_path(
    eager_host: Any, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the device of the tensors, whichever was asked first."""
    mixed = Bench("eager", eager_host, breaker, assume=((0, (6, 1)), (1, (7, 0)), (None, (7, 5))))
    given = form()
    for device, by_stock in ((0, True), (1, False), (2, True), (1, False), (0, True)):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        mixed.calls.clear()
        mixed.ours(**given)
        assert bool(mixed.calls) == by_stock, device
