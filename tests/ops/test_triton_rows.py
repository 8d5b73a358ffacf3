"""The Triton backend's slots without a GPU: who gets which call, and how the pieces are put
together; stock is a stand-in that computes row by row and says what it was called with."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ck_patch import chunks, log
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.ops import triton_rows
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings

SMALL_LIMIT, SMALL_BYTES = 4000, 4 * 700

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Stock:
    """The two functions with the signatures of 0.2.40, in float64 and so without rounding."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        calls = self.calls

        def int8_linear(
            x: torch.Tensor,
            weight: torch.Tensor,
            weight_scale: torch.Tensor,
            bias: torch.Tensor | None = None,
            out_dtype: torch.dtype = torch.bfloat16,
            convrot: bool = False,
            convrot_groupsize: int = 256,
            input_act: str | None = None,
            input_act_weight: torch.Tensor | None = None,
            input_act_eps: float = 0.0,
            residual: torch.Tensor | None = None,
            residual_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Stock's own words."""
            calls.append(((x, weight), {"residual": residual, "out_dtype": out_dtype}))
            if input_act == "swiglu":
                gate, up = x.double().chunk(2, dim=-1)
                x = gate * up
            elif input_act is not None:
                raise ValueError(f"unsupported input_act: {input_act!r}")
            n = weight.shape[0]
            rows = x.reshape(-1, x.shape[-1]).double()
            if isinstance(weight_scale, torch.Tensor) and weight_scale.numel() != 1:
                weight_scale = weight_scale.reshape(n)
            elif isinstance(weight_scale, torch.Tensor):
                weight_scale = weight_scale.reshape(1)
            out = rows @ weight.double().t() * weight_scale
            if bias is not None:
                out = out + bias
            out = out.to(out_dtype).reshape(*x.shape[:-1], n)
            if residual is None:
                return out
            if residual_scale is None:
                raise ValueError("residual requires residual_scale")
            return torch.addcmul(residual.to(out.dtype), out, residual_scale.to(out.dtype))

        def triton_quantize_rowwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            calls.append(((x,), {}))
            m, _ = x.shape
            return (x * 3).to(torch.int8), x.float().abs().amax(dim=1).reshape(m, 1)

        self.int8_linear: Callable[..., Any] = int8_linear
        self.triton_quantize_rowwise: Callable[..., Any] = triton_quantize_rowwise


def linear(stock: Stock) -> triton_rows.RowChunks:
    return triton_rows.build_linear(stock.int8_linear, context())


def quantizer(stock: Stock) -> triton_rows.RowChunks:
    return triton_rows.build_quantizer(stock.triton_quantize_rowwise, context())


def context() -> OpContext:
    return OpContext(Settings(), Breaker(), RELEASES[-1], check_first=False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit and the chunks at a size that a CPU computes at once."""
    monkeypatch.setattr(chunks, "LIMIT", SMALL_LIMIT)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", SMALL_BYTES)


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-9, 10, shape).to(dtype)


# The arithmetic.


@given(st.integers(0, 10**7), st.integers(1, 10**5))
def test_chunks_cover_every_row_and_all_but_a_single_one_have_the_step(
    size: int, step: int
) -> None:
    parts = list(itertools.islice(chunks.chunks(size, max(step, size // 1000)), 2000))
    lengths = {part.stop - part.start for part in parts}
    assert lengths == {size} if len(parts) == 1 else lengths == {max(step, size // 1000)}
    assert (parts[0].start, parts[-1].stop) == (0, size)
    for before, after in itertools.pairwise(parts):
        assert before.start < after.start <= before.stop


@given(st.integers(1, 2**31 - 1))
def test_a_chunk_stays_below_the_limit_and_within_its_memory(widest: int) -> None:
    rows = chunks.rows_per_chunk(widest)
    assert rows >= 1
    assert rows * widest < chunks.LIMIT
    assert rows == 1 or 4 * rows * widest <= chunks.CHUNK_BYTES
    assert rows < 128 or rows % 128 == 0
    columns = chunks.columns_per_chunk(widest)
    assert columns >= 1
    assert columns * widest < chunks.LIMIT


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_whatever_reaches_the_limit_by_rows_has_many_chunks(n: int, width: int, m: int) -> None:
    """So that the rows computed twice are few: at most one in 31."""
    widest = max(n, width)
    if m * widest >= chunks.LIMIT:
        assert chunks.rows_per_chunk(widest) * 31 < m or chunks.rows_per_chunk(widest) == 1


# Who gets the call: on meta tensors, which have a size and no memory.


@pytest.mark.parametrize(
    ("m", "n", "width", "pieces"),
    [
        (99_864, 21_504, 16, 1),  # M * N is 2^31 - 8,192.
        (99_865, 21_504, 16, 33),
        (149_796, 128, 14_336, 1),  # M * K is 2^31 - 8,192.
        (149_797, 128, 14_336, 33),
        (74_899, 64, 28_672, 33),
        (2**20 - 1, 2**11, 2**11, 1),
        (2**20, 2**11, 2**11, 32),
        (16, 2**17, 2**14, 2),  # The weight alone reaches it.
        (1, 2**17, 2**14 - 1, 1),
    ],
)
def test_a_call_is_cut_up_exactly_from_the_limit_on(
    m: int, n: int, width: int, pieces: int
) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    def stock(x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, weight.shape))
        return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)

    op = triton_rows.build_linear(stock, context())
    x = torch.empty(m, width, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(n, width, dtype=torch.int8, device="meta")
    out = op.function(x, weight, torch.empty(n, device="meta"))
    assert out.shape == (m, n)
    assert len(seen) == pieces
    assert len(set(seen)) == 1, "every piece has the same shape, so the autotuner meets one"
    for x_shape, weight_shape in seen:
        assert x_shape[0] * weight_shape[0] < 2**31
        assert x_shape.numel() < 2**31
        assert weight_shape.numel() < 2**31


@pytest.mark.parametrize(("m", "pieces"), [(149_796, 1), (149_797, 33)])
def test_a_quantization_is_cut_up_exactly_from_the_limit_on(m: int, pieces: int) -> None:
    stock = Stock()
    x = torch.empty(m, 14_336, dtype=torch.bfloat16, device="meta")
    q, scale = quantizer(stock).function(x)
    assert (q.shape, q.dtype) == (x.shape, torch.int8)
    assert (scale.shape, scale.dtype) == ((m, 1), torch.float32)
    assert len(stock.calls) == pieces


def test_below_the_limit_the_very_same_objects_reach_stock() -> None:
    calls: list[Call] = []
    answer = object()

    def stock(*args: Any, **kwargs: Any) -> object:
        calls.append((args, kwargs))
        return answer

    x, weight, scale = integers(2, 3, 8).transpose(0, 1), integers(4, 8), integers(4)
    forms: list[Call] = [
        ((x, weight, scale), {}),
        ((x, weight), {"weight_scale": scale, "bias": None}),
        ((x,), {"weight_scale": scale, "weight": weight}),
        ((), {"out_dtype": torch.float16, "weight": weight, "x": x, "weight_scale": scale}),
        ((x, weight, scale, None, 1, 2, 3, 4, 5, 6), {"transformer_options": {}}),
        ((x[:0], weight, scale), {}),
        ((x[..., :0], weight, scale), {}),
        ((torch.tensor(1.0), torch.tensor(1)), {}),
        ((None, weight), {}),
        (([[1.0]], weight), {}),
        ((x, 3), {}),
        ((x,), {}),
        ((), {}),
    ]
    for op in (
        triton_rows.build_linear(stock, context()),
        triton_rows.build_quantizer(stock, context()),
    ):
        calls.clear()
        for args, kwargs in forms:
            assert op.function(*args, **kwargs) is answer
        for (args, kwargs), (got_args, got_kwargs) in zip(forms, calls, strict=True):
            assert len(got_args) == len(args)
            assert all(got is given for got, given in zip(got_args, args, strict=True))
            assert got_kwargs.keys() == kwargs.keys()
            assert all(got_kwargs[name] is value for name, value in kwargs.items())


def test_a_deactivated_replacement_passes_everything_to_stock(small: None) -> None:
    stock = Stock()
    for op, arguments in (
        (linear(stock), (integers(500, 8), integers(16, 8), 1.0)),
        (quantizer(stock), (integers(600, 8),)),
    ):
        op.deactivate()
        stock.calls.clear()
        op.function(*arguments)
        assert len(stock.calls) == 1


def test_the_replacement_looks_like_stock() -> None:
    stock = Stock()
    function = linear(stock).function
    assert function.__doc__ == "Stock's own words."
    assert function.__name__ == "int8_linear"
    assert function.__wrapped__ is stock.int8_linear  # type: ignore[attr-defined]
    assert inspect.signature(function) == inspect.signature(stock.int8_linear)


@pytest.mark.parametrize("dynamic", [False, True])
def test_below_the_limit_dynamo_traces_through_without_a_break(dynamic: bool) -> None:
    def stock_linear(
        x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
    ) -> torch.Tensor:
        return x @ weight.t() * weight_scale

    def stock_quantizer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.to(torch.int8), x.amax(dim=1, keepdim=True)

    multiply = triton_rows.build_linear(stock_linear, context()).function
    quantize = triton_rows.build_quantizer(stock_quantizer, context()).function

    def model(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
        return multiply(x=x, weight=weight, weight_scale=scale), quantize(x)[0]

    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        given = integers(rows, 8), integers(4, 8), integers(4)
        for ours, theirs in zip(compiled(*given), model(*given), strict=True):
            assert torch.equal(ours, theirs)
    torch._dynamo.reset()


# What the pieces make, compared with stock computing the whole.


M, N, K = 150, 40, 12

WEIGHT_SCALES: dict[str, Callable[[], Any]] = {
    "per channel": lambda: integers(N),
    "per channel, as a column": lambda: integers(N, 1),
    "one": lambda: integers(1),
    "one, without a dimension": lambda: torch.tensor(3.0),
    "no tensor": lambda: 2.0,
}
ADDENDS: dict[str, tuple[int, ...]] = {
    "rows": (5, 30, N),
    "rows, one value in each": (5, 30, 1),
    "rows of the last dimension": (30, N),
    "some rows": (5, 1, N),
    "one row": (1, 1, N),
    "channels": (N,),
    "one value": (1,),
    "no dimension": (),
}


def compare(stock: Stock, **arguments: Any) -> torch.Tensor:
    """The op against stock on the same call; there is more than one piece, and none too large."""
    theirs: torch.Tensor = stock.int8_linear(**arguments)
    stock.calls.clear()
    ours: torch.Tensor = linear(stock).function(**arguments)
    assert len(stock.calls) > 1
    for (x, weight), _ in stock.calls:
        assert x.is_contiguous()
        assert max(x.shape[0] * weight.shape[0], x.numel(), weight.numel()) < SMALL_LIMIT
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert ours.is_contiguous()
    assert torch.equal(ours, theirs)
    return ours


@pytest.mark.parametrize("form", WEIGHT_SCALES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_every_form_of_scale_and_bias(
    small: None, form: str, out_dtype: torch.dtype, bias: bool
) -> None:
    compare(
        Stock(),
        x=integers(M, K),
        weight=integers(N, K, dtype=torch.int8),
        weight_scale=WEIGHT_SCALES[form](),
        bias=integers(N) if bias else None,
        out_dtype=out_dtype,
    )


@pytest.mark.parametrize(
    "x",
    [
        integers(M, K),
        integers(2, M // 2, K),
        integers(1, 3, M // 3, K),
        integers(M, 3 * K)[:, K : 2 * K],
        integers(K, M).t(),
        integers(3, M // 3, K).transpose(0, 1),
        integers(1, K).expand(M, K),
        torch.nn.Parameter(integers(M, K), requires_grad=False),
    ],
    ids=["2-D", "3-D", "4-D", "columns", "transposed", "permuted", "expanded", "Parameter"],
)
def test_every_form_of_activation(small: None, x: torch.Tensor) -> None:
    weight = integers(N, K, dtype=torch.int8)
    ours = compare(Stock(), x=x, weight=weight, weight_scale=integers(N), out_dtype=torch.float32)
    assert ours.data_ptr() != x.data_ptr()


def test_an_activation_whose_raw_row_is_twice_as_wide(small: None) -> None:
    """M*N and M*K are below the limit, M times the raw width is not."""
    m, n, k = 60, 8, 40
    compare(
        Stock(),
        x=integers(m, 2 * k),
        weight=integers(n, k, dtype=torch.int8),
        weight_scale=1.0,
        input_act="swiglu",
    )


@pytest.mark.parametrize("scale", ADDENDS)
@pytest.mark.parametrize("residual", ADDENDS)
def test_a_residual_and_its_scale_keep_their_rows(small: None, residual: str, scale: str) -> None:
    compare(
        Stock(),
        x=integers(5, M // 5, K),
        weight=integers(N, K, dtype=torch.int8),
        weight_scale=integers(N),
        out_dtype=torch.float32,
        residual=integers(*ADDENDS[residual]),
        residual_scale=integers(*ADDENDS[scale]),
    )


@pytest.mark.parametrize("m", [1, 7, 150])
@pytest.mark.parametrize("form", WEIGHT_SCALES)
def test_a_weight_that_reaches_the_limit_alone_is_cut_by_columns(
    small: None, m: int, form: str
) -> None:
    k = 4200 // N
    compare(
        Stock(),
        x=integers(m, k),
        weight=integers(N, k, dtype=torch.int8),
        weight_scale=WEIGHT_SCALES[form](),
        bias=integers(N),
        out_dtype=torch.float32,
        residual=integers(m, N),
        residual_scale=integers(N),
    )


def test_a_vector_against_such_a_weight_stays_a_vector(small: None) -> None:
    k = 4200 // N
    compare(
        Stock(),
        x=integers(k),
        weight=integers(N, k, dtype=torch.int8),
        weight_scale=integers(N),
        residual=integers(N),
        residual_scale=integers(N),
    )


def test_positional_and_keyword_calls_are_the_same(small: None) -> None:
    stock = Stock()
    x, weight, scale, bias = integers(M, K), integers(N, K), integers(N), integers(N)
    function = linear(stock).function
    by_keyword = function(
        x=x, weight=weight, weight_scale=scale, bias=bias, out_dtype=torch.float16
    )
    assert by_keyword.dtype == torch.float16
    assert torch.equal(function(x, weight, scale, bias, torch.float16), by_keyword)
    assert torch.equal(
        function(x, weight, bias=bias, weight_scale=scale, out_dtype=torch.float16), by_keyword
    )


@pytest.mark.parametrize(
    "x",
    [integers(700, 12), integers(700, 36)[:, 12:24], integers(12, 700).t()],
    ids=["contiguous", "columns", "transposed"],
)
def test_a_quantization_in_pieces_is_the_whole(small: None, x: torch.Tensor) -> None:
    stock = Stock()
    theirs = stock.triton_quantize_rowwise(x)
    for ours in (quantizer(stock).function(x), quantizer(stock).function(x=x)):
        assert isinstance(ours, tuple)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
            assert mine.dtype == other.dtype
            assert mine.is_contiguous()
    assert len(stock.calls) > 3
    assert all(part.is_contiguous() for (part,), _ in stock.calls[1:])


# What fails beyond the limit: nothing is ever given to stock whole.


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an activation it does not know": ({"input_act": "foo"}, "ValueError"),
    "a residual without scale": ({"residual": integers(M, N)}, "ValueError"),
    "too many scales": ({"weight_scale": integers(N + 1)}, "RuntimeError"),
    "a residual of too many columns": (
        {"residual": integers(M, N + 1), "residual_scale": integers(N)},
        "RuntimeError",
    ),
    "a residual of too many rows": (
        {"residual": integers(M + 1, N), "residual_scale": integers(N)},
        "RuntimeError",
    ),
    "a residual that is no tensor": (
        {"residual": 3, "residual_scale": integers(N)},
        "AttributeError",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_stock_refuses_is_refused_with_its_error(small: None, case: str) -> None:
    change, error = REFUSED[case]
    stock = Stock()
    arguments: dict[str, Any] = {
        "x": integers(M, K),
        "weight": integers(N, K, dtype=torch.int8),
        "weight_scale": integers(N),
        **change,
    }

    def outcome(function: Callable[..., Any]) -> str | None:
        try:
            function(**arguments)
        except Exception as raised:
            return type(raised).__name__
        return None

    assert outcome(linear(stock).function) == error
    assert all(x.shape[0] < M for (x, _), _ in stock.calls), "stock never got the whole"
    assert outcome(stock.int8_linear) == error


def test_a_residual_that_would_widen_the_result_is_refused(small: None) -> None:
    """Stock would broadcast the output to it; no caller does, and it is not worth a second way."""
    stock = Stock()
    x, weight, scale = integers(M, K), integers(N, K), integers(N)
    for shape in ((2, M, N), (1, M, N), (1, 1, N)):
        with pytest.raises(RuntimeError):
            linear(stock).function(
                x, weight, scale, residual=integers(*shape), residual_scale=scale
            )
    assert stock.calls == []


def test_arguments_that_stock_does_not_have_are_refused_by_stock(small: None) -> None:
    stock = Stock()
    x, weight, scale = integers(M, K), integers(N, K), integers(N)
    extras: list[dict[str, Any]] = [{"transformer_options": {}}, {"x": x}]
    for extra in extras:
        with pytest.raises(TypeError):
            linear(stock).function(x, weight, scale, **extra)
    with pytest.raises(TypeError):
        linear(stock).function(x, weight)
    with pytest.raises(TypeError):
        quantizer(stock).function(integers(500, 12), 1)
    assert stock.calls == []


def test_an_error_in_the_middle_reaches_the_caller_and_stock_is_not_asked_again(
    small: None,
) -> None:
    shapes: list[int] = []

    def stock(x: torch.Tensor, weight: torch.Tensor, weight_scale: float) -> torch.Tensor:
        shapes.append(x.shape[0])
        if len(shapes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x @ weight.t()

    op = triton_rows.build_linear(stock, context())
    with pytest.raises(torch.OutOfMemoryError):
        op.function(integers(M, K), integers(N, K), 1.0)
    assert len(shapes) == 3
    assert max(shapes) < M


def test_inputs_are_not_changed(small: None) -> None:
    x, weight, scale = integers(M, K), integers(N, K), integers(N)
    residual, residual_scale = integers(M, N), integers(N)
    given = (x, weight, scale, residual, residual_scale)
    before = [tensor.clone() for tensor in given]
    linear(Stock()).function(x, weight, scale, residual=residual, residual_scale=residual_scale)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_the_log_names_the_first_size_and_each_path_once(
    small: None, caplog: pytest.LogCaptureFixture
) -> None:
    log.configure("path")
    op = linear(Stock())
    for _ in range(2):
        op.function(integers(M, K), integers(N, K), 1.0)
    op.function(integers(2 * M, K), integers(N, K), 1.0)
    first, path, other = (record.getMessage() for record in caplog.records)
    assert f"{M} x {N} x {K}" in first
    assert "chunks" in path
    assert f"{2 * M} x {N} x {K}" in other
