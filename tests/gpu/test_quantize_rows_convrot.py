"""The CUDA backend's rotating quantizer on a GPU: equal to stock's, bit for bit, and faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import chunks, shapes
from ck_patch.kernels.quantize_rows import Launch
from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer
from ck_patch.measure import graph_times
from tests.gpu.conftest import Record
from tests.gpu.test_quantize_rows import BF16, DTYPES, Quantized, captured, equal, same_rows
from tests.gpu.test_triton_backend import Canaries, bf16, windows
from tests.hostile_rows import hostile_rotated_rows

pytestmark = pytest.mark.gpu

MODELS = sorted(
    {(m, k) for m, _, k in shapes.unique() if k % 256 == 0 and k <= 16_384}, key=lambda mk: mk[::-1]
)
# Half a piece to three and a half, the last one whole, half or not full, of 1, 2, 4 and 8 warps.
HOSTILE = (256, 1024, 1280, 5120, 5376, 13_824, 14_336, 16_384)
TIMED = (
    (36_864, 5376),
    (37_296, 14_336),
    (25_900, 16_384),
    (4608, 3072),
    (4608, 12_288),
    (1024, 4096),
    (512, 3072),
    (77, 3072),
)


def slot() -> Any:
    __import__("comfy_kitchen")
    function = sys.modules["comfy_kitchen.backends.cuda"].quantize_int8_rowwise_convrot64
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return function


def ours(x: torch.Tensor) -> Quantized:
    found: Quantized = slot()(x, 256)
    return found


def stock(x: torch.Tensor) -> Quantized:
    found: Quantized = slot().__wrapped__(x, 256)
    return found


@pytest.fixture(scope="module", autouse=True)
def binaries() -> None:
    """Compiled side by side: one after the other they would take most of the time of these tests.

    Triton keeps each for all K that have its pieces.
    """

    def compile_one(dtype: torch.dtype, k: int) -> None:
        x = torch.zeros(1, k, dtype=dtype, device="cuda")
        ConvrotRowQuantizer().run(x, x.to(torch.int8), torch.empty(1, device="cuda"))

    forms: dict[tuple[object, ...], partial[None]] = {}
    for dtype in DTYPES:
        for k in (*HOSTILE, *({k for _, k in MODELS} if dtype == BF16 else ())):
            _, *constants = ConvrotRowQuantizer()._arguments(torch.empty(1, k, dtype=dtype))
            forms[(dtype, *constants)] = partial(compile_one, dtype, k)
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(form) for form in forms.values()]:
            done.result()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that our kernel was launched on, first uses aside, by ops that are new."""
    found: list[tuple[int, ...]] = []
    bind = ConvrotRowQuantizer.bind

    def spying(self: ConvrotRowQuantizer, x: torch.Tensor) -> Launch:
        launch, shape = bind(self, x), tuple(x.shape)

        def spied(pointers: Any, stream: int) -> None:
            found.append(shape)
            launch(pointers, stream)

        return spied

    monkeypatch.setattr(ConvrotRowQuantizer, "bind", spying)
    ck_patch.disable()
    ck_patch.enable()
    return found


def equal_to_stock(x: torch.Tensor) -> bool:
    expected = stock(x)
    # The first call with a K and a dtype may be the one that compares.
    first, second = ours(x), ours(x)
    assert all(tensor.is_contiguous() for tensor in (*first, *second))
    return equal(first, expected) and equal(second, expected)


def test_every_model_shape_is_bit_identical(
    launches: list[tuple[int, ...]], record: Record
) -> None:
    different = [(m, k) for m, k in MODELS if not equal_to_stock(bf16(m, k))]
    assert different == []
    assert set(launches) == set(MODELS)
    record.add("quantize_convrot_equal", what="model shapes", shapes=len(MODELS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hostile_and_random_rows_are_bit_identical(
    dtype: torch.dtype, launches: list[tuple[int, ...]], record: Record
) -> None:
    different = []
    for k in HOSTILE:
        rows = hostile_rotated_rows(k, dtype)
        names = [*rows, *["random"] * 1000]
        widest = 4 if dtype == torch.float16 else 37
        scales = 10.0 ** torch.linspace(-widest, widest, 1000)[:, None]
        x = torch.cat([torch.stack(list(rows.values())), (torch.randn(1000, k) * scales).to(dtype)])
        x = x.cuda()
        expected = stock(x)
        for _ in range(2):
            same = same_rows(ours(x), expected).tolist()
            different += [(k, name) for name, good in zip(names, same, strict=True) if not good]
    assert different == []
    assert launches == [(len(names), k) for k in HOSTILE]
    record.add("quantize_convrot_equal", what="hostile rows", dtype=str(dtype)[6:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_group_of_its_row(dtype: torch.dtype) -> None:
    x = torch.randn(8, 5376, device="cuda").to(dtype)
    clean_q, clean_scale = ours(x)
    x[3, 300] = torch.nan
    q, scale = ours(x)
    assert equal((q, scale), stock(x))
    others = [0, 1, 2, 4, 5, 6, 7]
    assert equal((q[others], scale[others]), (clean_q[others], clean_scale[others]))
    assert q[3, 256:512].eq(-128).all()
    assert not q[3, 512:].eq(-128).all()


def test_seeds_and_activations_are_stocks(launches: list[tuple[int, ...]]) -> None:
    x = bf16(512, 3072)
    for more in ({"stochastic_rounding": 1234}, {"input_act": "swiglu"}):
        assert equal(slot()(x, 256, **more), slot().__wrapped__(x, 256, **more))
    assert launches == []


def test_more_than_2_31_elements_are_right_and_nothing_around_them_changes(
    record: Record,
) -> None:
    m, k = 131_080, 16_384
    x = torch.empty(m, k, dtype=BF16, device="cuda").normal_()
    ours(x[:512])  # Proven, with all that this allocates.
    canaries = Canaries(m * k)
    q, scale = ours(x)
    canaries.assert_untouched()
    for rows in (*chunks.chunks(m, m // 4), *windows(m, k)):
        assert equal((q[rows], scale[rows]), stock(x[rows])), rows
    record.add("quantize_convrot_equal", what="beyond 2^31", m=m, k=k)


@pytest.mark.parametrize("m", [65_535, 65_537])
def test_rows_around_the_limit_of_a_grid_are_right(m: int) -> None:
    x = bf16(m, 256)
    ours(x[:512])
    q, scale = ours(x)
    for rows in chunks.chunks(m, 10_000):
        assert equal((q[rows], scale[rows]), stock(x[rows])), rows


def test_a_capture_records_stock_before_the_first_use_and_ours_after_it(
    launches: list[tuple[int, ...]],
) -> None:
    x = bf16(300, 5376)
    stock(x)  # Has loaded what a capture must not.
    for launched in ([], [(300, 5376)]):
        graph, quantized = captured(ours, x)
        assert launches == launched
        x.normal_()
        for poisoned in quantized:
            poisoned.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert equal(quantized, stock(x))
        ours(x)  # The first use.


@pytest.mark.parametrize(("m", "k"), TIMED, ids=str)
def test_it_is_faster_than_stock(m: int, k: int, record: Record) -> None:
    x = bf16(m, k)
    assert equal_to_stock(x)
    # A copy that reads and writes as many bytes.
    source = torch.empty(m * k * 3 // 2, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    times = graph_times(
        {
            "copy": lambda: target.copy_(source),
            "stock": lambda: stock(x),
            "ours": lambda: ours(x),
        },
        rounds=5,
        span=1e-3,
    )
    record.add(
        "quantize_convrot",
        backend="cuda",
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
