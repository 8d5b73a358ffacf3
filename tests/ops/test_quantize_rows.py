"""The row quantizers of the three backends: who answers which call, and what stays stock's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext, Refused
from ck_patch.ops import quantize_rotated_rows, quantize_rows, triton_rows, watched
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings

pytestmark = pytest.mark.interpreter

K = 64
MODULES = {
    "cuda": ("comfy_kitchen.backends.cuda", "quantize_int8_rowwise"),
    "eager": ("comfy_kitchen.backends.eager.quantization", "quantize_int8_rowwise"),
    "triton": ("comfy_kitchen.backends.triton.quantization", "triton_quantize_rowwise"),
}
ROTATING = {
    "cuda_convrot": ("comfy_kitchen.backends.cuda", "quantize_int8_rowwise_convrot64"),
}


class Op:
    """One quantizer of ours around a stock function that records, and answers if it can."""

    def __init__(self, backend: str, breaker: Breaker, **settings: Any) -> None:
        module, name = {**MODULES, **ROTATING}[backend]
        self.backend = backend
        self.stock = getattr(pytest.importorskip(module), name)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        @functools.wraps(self.stock)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((args, kwargs))
            inspect.signature(self.stock).bind(*args, **kwargs)
            return "stock"

        context = OpContext(Settings(**settings), breaker, RELEASES[-1], check_first=False)
        self.op: Any = self.build()(recorded, context)
        self.function: Callable[..., Any] = self.op.function

    def build(self) -> Callable[..., Any]:
        """What makes the op."""
        if self.backend in ROTATING:
            return quantize_rotated_rows.build
        return cast("Callable[..., Any]", getattr(quantize_rows, f"build_{self.backend}"))

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the call is ours; one that is not must reach stock as it came."""
        self.calls.clear()
        result = self.function(*args, **kwargs)
        if result != "stock":
            return not self.calls
        ((seen, named),) = self.calls
        assert all(a is b for a, b in zip(seen, args, strict=True))
        assert named.keys() == kwargs.keys()
        assert all(named[name] is value for name, value in kwargs.items())
        return False


@pytest.fixture(params=MODULES)
def op(request: pytest.FixtureRequest, breaker: Breaker) -> Op:
    return Op(request.param, breaker)


@pytest.fixture(params=["cuda", "eager"])
def seeded(request: pytest.FixtureRequest, breaker: Breaker) -> Op:
    """Those that can round stochastically."""
    return Op(request.param, breaker)


def exact_rows(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, its values and its scales, where every way to divide by 127 gives the same."""
    scale = 2.0 ** torch.randint(-6, 0, (*shape[:-1], 1))
    q = torch.randint(-126, 127, shape)
    q[..., 3] = -127
    return (q * scale).to(dtype), q.to(torch.int8), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m", [1, 7])
def test_rows_are_quantized_by_ours(op: Op, dtype: torch.dtype, m: int) -> None:
    x, q, scale = exact_rows(m, K, dtype=dtype)
    ours = op.function(x)
    assert torch.equal(ours[0], q)
    assert (ours[0].dtype, ours[1].dtype) == (torch.int8, torch.float32)
    assert torch.equal(ours[1], scale)
    assert op.calls == []


@pytest.mark.parametrize("shape", [(K,), (2, 3, K), (1, 2, 3, K)], ids=str)
def test_leading_dimensions_are_kept(seeded: Op, shape: tuple[int, ...]) -> None:
    x, q, scale = exact_rows(*shape)
    ours = seeded.function(x)
    assert torch.equal(ours[0], q)
    assert torch.equal(ours[1], scale)
    assert seeded.calls == []


@pytest.mark.parametrize("shape", [(K,), (2, 3, K)], ids=str)
def test_the_triton_quantizer_leaves_all_but_matrices_to_stock_which_refuses_them(
    breaker: Breaker, shape: tuple[int, ...]
) -> None:
    op = Op("triton", breaker)
    assert not op.takes(torch.randn(shape))
    with pytest.raises(ValueError, match="unpack"):
        op.stock(torch.randn(shape))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x, x], dim=1)[:, K : 2 * K],
        lambda x: x[:1].expand(7, K),
    ],
    ids=["transposed", "columns", "expanded"],
)
def test_rows_that_are_not_contiguous_are_read_where_they_are(
    op: Op, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    x, _, _ = exact_rows(7, K)
    view = change(x)
    assert not view.is_contiguous()
    ours, contiguous = op.function(view), op.function(view.contiguous())
    assert torch.equal(ours[0], contiguous[0])
    assert torch.equal(ours[1], contiguous[1])
    assert ours[0].is_contiguous()
    assert op.calls == []


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((0,), {}),
        ((None,), {}),
        ((-1,), {}),
        ((), {"stochastic_rounding": 0}),
        ((), {"stochastic_rounding": None}),
        ((), {"stochastic_rounding": -5}),
    ],
    ids=str,
)
def test_a_seed_that_is_none_means_to_round_to_nearest(
    seeded: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    x, q, _ = exact_rows(3, K)
    assert seeded.takes(x, *args, **kwargs)
    assert torch.equal(seeded.function(x, *args, **kwargs)[0], q)


@pytest.mark.parametrize("seed", [1, 1234, 2**40, True, 0.5, torch.tensor(7)], ids=str)
def test_a_seed_is_stocks(seeded: Op, seed: Any) -> None:
    x = torch.randn(3, K)
    assert not seeded.takes(x, seed)
    assert not seeded.takes(x, stochastic_rounding=seed)
    assert seeded.function(x=x, stochastic_rounding=seed) == "stock"


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((0, 0), {}),
        ((0, None), {}),
        ((), {"transformer_options": None}),
        ((0,), {"transformer_options": 0}),
        ((0,), {"stochastic_rounding": 0}),
    ],
    ids=str,
)
def test_an_argument_that_stock_does_not_know_is_stocks_to_refuse(
    op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(TypeError):
        op.function(torch.randn(3, K), *args, **kwargs)
    assert len(op.calls) == 1


def test_the_triton_quantizer_takes_no_seed(breaker: Breaker) -> None:
    op = Op("triton", breaker)
    for kwargs in ({"stochastic_rounding": 0}, {"stochastic_rounding": 7}):
        with pytest.raises(TypeError):
            op.function(torch.randn(3, K), **kwargs)
    with pytest.raises(TypeError):
        op.function()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, K).double(),
        torch.ones(3, K, dtype=torch.int32),
        torch.empty(0, K),
        torch.empty(3, 0),
        torch.randn(3 * K + 1)[1:].view(3, K),
        torch.randn(3, K, requires_grad=True),
        torch.nn.Parameter(torch.randn(3, K)),
        torch.randn(3, K, device="meta"),
        torch._neg_view(torch.randn(3, K)),
        torch._efficientzerotensor(3, K),
        torch.randn(3, K).to_sparse(),
        torch.tensor(1.0),
        "x",
        None,
    ],
    ids=[
        *("float64", "int32", "no rows", "no columns", "unaligned", "gradient", "parameter"),
        *("meta", "negative bit", "zero tensor", "sparse", "0-d", "text", "None"),
    ],
)
def test_what_is_no_plain_matrix_is_stocks(op: Op, breaker: Breaker, x: Any) -> None:
    assert not op.takes(x)
    assert breaker.snapshot() == ()


def test_inference_tensors_work_inside_and_outside_of_inference_mode(op: Op) -> None:
    with torch.inference_mode():
        x, q, _ = exact_rows(3, K)
        assert torch.equal(op.function(x)[0], q)
    assert torch.equal(op.function(x)[0], q)
    assert op.calls == []


def test_results_are_new_at_each_call(op: Op) -> None:
    x, q, _ = exact_rows(3, K)
    op.function(x)[0].zero_()
    assert torch.equal(op.function(x)[0], q)


def test_the_quantizer_looks_like_stock(op: Op) -> None:
    assert op.function is op.op.function
    assert inspect.signature(op.function) == inspect.signature(op.stock)
    assert op.function.__name__ == op.stock.__name__
    assert op.function.__doc__ == op.stock.__doc__


def test_a_deactivated_quantizer_and_dynamo_have_stock(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(watched, "_is_compiling", lambda: True)
        assert not op.takes(torch.randn(3, K))
    assert op.takes(torch.randn(3, K))
    op.op.deactivate()
    assert not op.takes(torch.randn(3, K))


@pytest.mark.parametrize("backend", MODULES)
def test_the_setting_stock_is_obeyed(breaker: Breaker, backend: str) -> None:
    assert not Op(backend, breaker, int8="stock").takes(torch.randn(3, K))


@pytest.mark.parametrize("seed", [0, 7])
def test_the_cuda_quantizer_hands_over_to_the_eager_one_where_it_has_no_kernel(
    breaker: Breaker, seed: int
) -> None:
    op = Op("cuda", breaker, assume=((None, (7, 0)),))
    x = torch.randn(3, K)
    ours = op.function(x, stochastic_rounding=seed)
    eager = Op("eager", breaker).stock(x, stochastic_rounding=seed)
    assert torch.equal(ours[0], eager[0])
    assert torch.equal(ours[1], eager[1])
    parameter = op.function(torch.nn.Parameter(x, requires_grad=False), seed)
    assert torch.equal(parameter[0], eager[0])
    assert op.calls == []


def test_fp16_by_setting_does_not_keep_it_from_that(breaker: Breaker) -> None:
    op = Op("cuda", breaker, assume=((None, (7, 0)),), int8="fp16")
    x = torch.randn(3, K)
    assert torch.equal(op.function(x)[0], Op("eager", breaker).stock(x)[0])
    assert op.calls == []


def test_the_kernels_that_are_kept_have_a_limit(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_rows, "_MAX_KERNELS", 2)
    for k in (16, 32, 48, 64, 80, 16):
        x, q, _ = exact_rows(3, k)
        assert torch.equal(op.function(x)[0], q)
        assert len(op.op._kernels) <= 2


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_gpu_without_our_kernels_keeps_the_quantizer_of_its_backend(
    breaker: Breaker, backend: str
) -> None:
    assert not Op(backend, breaker, assume=((None, (7, 0)),)).takes(torch.randn(3, K))


def test_a_release_that_is_too_new_has_no_quantizer_of_ours(op: Op) -> None:
    newer = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=True)
    build = op.build()
    if op.backend == "triton":
        assert isinstance(build(op.stock, newer), triton_rows.RowChunks)
    else:
        with pytest.raises(Refused, match="newer"):
            build(op.stock, newer)
