"""The row quantizers of the three backends on a GPU: equal to stock's, bit for bit, and faster."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import chunks, shapes
from ck_patch.kernels.quantize_rows import Launch, RowQuantizer
from ck_patch.measure import graph_times
from tests.gpu.conftest import Record
from tests.gpu.test_triton_backend import Canaries, bf16, windows
from tests.hostile_rows import hostile_rows

pytestmark = pytest.mark.gpu

Quantized = tuple[torch.Tensor, torch.Tensor]
Quantizer = Callable[..., Quantized]

SLOTS = {
    "cuda": ("comfy_kitchen.backends.cuda", "quantize_int8_rowwise"),
    "eager": ("comfy_kitchen.backends.eager.quantization", "quantize_int8_rowwise"),
    "triton": ("comfy_kitchen.backends.triton.quantization", "triton_quantize_rowwise"),
}
BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float16, BF16)
TIMED = (
    (36_864, 5376),
    (36_864, 28_672),
    (25_900, 16_384),
    (4608, 3072),
    (4608, 12_288),
    (1024, 4096),
    (512, 3072),
    (77, 3072),
)

every_backend = pytest.mark.parametrize("backend", SLOTS)
# The Triton backend's takes a contiguous matrix, and no seed.
general_backends = pytest.mark.parametrize("backend", ["cuda", "eager"])


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that our kernel was launched on, first uses aside, by ops that are new."""
    found: list[tuple[int, ...]] = []
    bind = RowQuantizer.bind

    def spying(self: RowQuantizer, x: torch.Tensor) -> Launch:
        launch, shape = bind(self, x), tuple(x.shape)

        def spied(pointers: Any, stream: int) -> None:
            found.append(shape)
            launch(pointers, stream)

        return spied

    monkeypatch.setattr(RowQuantizer, "bind", spying)
    ck_patch.disable()
    ck_patch.enable()
    return found


def ours(backend: str) -> Quantizer:
    __import__("comfy_kitchen")
    module, name = SLOTS[backend]
    function: Quantizer = getattr(sys.modules[module], name)
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return function


def stock(backend: str) -> Quantizer:
    function: Quantizer = ours(backend).__wrapped__  # type: ignore[attr-defined]
    return function


def same_rows(found: Quantized, expected: Quantized) -> torch.Tensor:
    """Which rows have every value and every bit of the scale in common; one NaN is as another."""
    (q, scale), (expected_q, expected_scale) = found, expected
    assert (q.shape, q.dtype) == (expected_q.shape, expected_q.dtype)
    assert (scale.shape, scale.dtype) == (expected_scale.shape, expected_scale.dtype)
    same = (q == expected_q).all(dim=-1, keepdim=True)
    same &= (scale == expected_scale) | (scale.isnan() & expected_scale.isnan())
    return same.flatten()


def equal(found: Quantized, expected: Quantized) -> bool:
    return bool(same_rows(found, expected).all())


def equal_to_stock(backend: str, x: torch.Tensor) -> bool:
    expected, quantizer = stock(backend)(x), ours(backend)
    # The first call with a K and a dtype may be the one that compiles and compares.
    first, second = quantizer(x), quantizer(x)
    assert all(tensor.is_contiguous() for tensor in (*first, *second))
    return equal(first, expected) and equal(second, expected)


@every_backend
def test_every_model_shape_is_bit_identical(
    backend: str, launches: list[tuple[int, ...]], record: Record
) -> None:
    found = sorted({(m, k) for m, _, k in shapes.unique()})
    different = [(m, k) for m, k in found if not equal_to_stock(backend, bf16(m, k))]
    assert different == []
    assert set(launches) == set(found)
    record.add("quantize_equal", backend=backend, what="model shapes", shapes=len(found))


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_and_random_rows_are_bit_identical(
    backend: str, dtype: torch.dtype, launches: list[tuple[int, ...]], record: Record
) -> None:
    different = []
    ks = (17, 3072, 4097, 28_672)
    for k in ks:
        rows = hostile_rows(k, dtype)
        names = [*rows, *["random"] * 256]
        x = torch.cat([torch.stack(list(rows.values())), (torch.randn(256, k) * 10).to(dtype)])
        x = x.cuda()
        expected = stock(backend)(x)
        if backend == "triton":
            # An infinite scale is its fault; what is right is what the CUDA backend's does.
            q, scale = expected
            right_q, right_scale = stock("cuda")(x)
            infinite = scale.isinf()
            expected = torch.where(infinite, right_q, q), torch.where(infinite, right_scale, scale)
        for _ in range(2):
            same = same_rows(ours(backend)(x), expected).tolist()
            different += [(k, name) for name, good in zip(names, same, strict=True) if not good]
    assert different == []
    assert launches == [(len(names), k) for k in ks]
    record.add("quantize_equal", backend=backend, what="hostile rows", dtype=str(dtype)[6:])


@general_backends
def test_inputs_of_every_dimension_keep_their_leading_shape(
    backend: str, launches: list[tuple[int, ...]]
) -> None:
    for dtype in DTYPES:
        for lead in ((), (77,), (2, 77), (1, 4, 77)):
            x = torch.randn(*lead, 3072, device="cuda").to(dtype)
            assert equal_to_stock(backend, x), (dtype, lead)
            assert launches.pop() == (math.prod(lead), 3072)


@general_backends
def test_what_is_not_contiguous_equals_stock(backend: str) -> None:
    big = bf16(200, 4096)
    for x in (big[:, 128:3200], big.t(), big[:1, :3072].expand(64, 3072)):
        assert equal(ours(backend)(x), stock(backend)(x))


@general_backends
def test_a_seed_for_stochastic_rounding_is_honoured(
    backend: str, launches: list[tuple[int, ...]]
) -> None:
    w = bf16(28_672, 5376)
    quantizer = ours(backend)
    first = quantizer(w, stochastic_rounding=1234)
    assert equal(quantizer(w, stochastic_rounding=1234), first)
    assert equal(quantizer(w, 1234), stock(backend)(w, stochastic_rounding=1234))
    assert not equal(quantizer(w, stochastic_rounding=1235), first)
    assert launches == []
    for no_seed in (0, None):
        nearest = stock(backend)(w[:512])
        assert equal(quantizer(w[:512], stochastic_rounding=no_seed), nearest)
        assert equal(quantizer(w[:512], no_seed), nearest)
    assert launches


@every_backend
def test_more_than_2_31_elements_are_right_and_nothing_around_them_changes(
    backend: str, record: Record
) -> None:
    m, k = 149_797, 14_336
    x = torch.empty(m, k, dtype=BF16, device="cuda").normal_()
    ours(backend)(x[:512])  # Compiled and proven, with all that this allocates.
    canaries = Canaries(m * k)
    q, scale = ours(backend)(x)
    canaries.assert_untouched()
    for rows in (*chunks.chunks(m, m // 4), *windows(m, k)):
        assert equal((q[rows], scale[rows]), stock(backend)(x[rows])), rows
    record.add("quantize_equal", backend=backend, what="beyond 2^31", m=m, k=k)


@every_backend
@pytest.mark.parametrize("m", [65_535, 65_536, 65_537, 131_073])
def test_rows_around_the_limit_of_a_grid_are_right(backend: str, m: int) -> None:
    x = bf16(m, 256)
    q, scale = ours(backend)(x)
    for rows in chunks.chunks(m, 10_000):
        assert equal((q[rows], scale[rows]), stock(backend)(x[rows])), rows
        assert equal((q[rows], scale[rows]), ours(backend)(x[rows])), rows


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_infinity_saturates_and_leaves_other_rows_as_they_are(
    backend: str, dtype: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.randn(4, 5376, device="cuda").to(dtype)
    x[3, 7] = largest
    clean_q, clean_scale = ours(backend)(x[[0, 3]])
    x[1, 5], x[2, 5375] = torch.inf, -torch.inf
    for _ in range(2):
        q, scale = ours(backend)(x)
        assert equal((q[[0, 3]], scale[[0, 3]]), (clean_q, clean_scale))
        assert scale[1:3, 0].tolist() == pytest.approx([largest / 127] * 2, rel=1e-6)
        assert [int(q[1, 5]), int(q[2, 5375])] == [127, -128]
        assert equal((q, scale), stock("cuda")(x))


@every_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_leaves_other_rows_as_they_are(backend: str, dtype: torch.dtype) -> None:
    x = torch.randn(8, 5376, device="cuda").to(dtype)
    clean = ours(backend)(x)
    x[3, 100] = torch.nan
    spoiled = ours(backend)(x)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert equal((spoiled[0][others], spoiled[1][others]), (clean[0][others], clean[1][others]))
    assert equal(spoiled, stock(backend)(x))


def captured(quantizer: Quantizer, x: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, Quantized]:
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        quantized = quantizer(x)
    return graph, quantized


@every_backend
def test_a_capture_records_stock_before_the_first_use_and_ours_after_it(
    backend: str, launches: list[tuple[int, ...]]
) -> None:
    # A K that no other test and no model has.
    x = bf16(300, 1072)
    stock(backend)(x)  # Has compiled and loaded what a capture must not.
    for launched in ([], [(300, 1072)]):
        graph, quantized = captured(ours(backend), x)
        assert launches == launched
        x.normal_()
        for poisoned in quantized:
            poisoned.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert equal(quantized, stock(backend)(x))
        ours(backend)(x)  # The first use.


@general_backends
@pytest.mark.parametrize(("m", "k"), TIMED, ids=str)
def test_it_is_faster_than_stock(backend: str, m: int, k: int, record: Record) -> None:
    x = bf16(m, k)
    assert equal_to_stock(backend, x)
    # A copy that reads and writes as many bytes.
    source = torch.empty(m * k * 3 // 2, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = graph_times(
        {
            "copy": lambda: target.copy_(source),
            "stock": lambda: stock(backend)(x),
            "ours": lambda: ours(backend)(x),
        },
        rounds=5,
        span=1e-3,
    )
    record.add(
        "quantize",
        backend=backend,
        m=m,
        k=k,
        timing="graph",
        stock_us=round(times["stock"] * 1e3, 2),
        ours_us=round(times["ours"] * 1e3, 2),
        copy_us=round(times["copy"] * 1e3, 2),
        times=round(times["stock"] / times["ours"], 2),
        of_copy=round(times["copy"] / times["ours"], 2),
    )
    assert times["ours"] <= 1.02 * times["stock"]
