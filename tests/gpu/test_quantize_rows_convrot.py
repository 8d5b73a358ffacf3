"""The CUDA backend's rotating quantizer on a GPU: equal to stock's, bit for bit, and faster."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import chunks, shapes
from ck_patch.kernels.input_acts import INPUT_ACTS, InputAct, columns
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
# Fewer: each form of an activation is a kernel to compile.
ACTIVATED = {
    torch.float32: (1280,),
    torch.float16: (1280, 14_336),
    torch.bfloat16: (256, 1280, 14_336, 16_384),
}
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

    def compile_one(dtype: torch.dtype, k: int, act: InputAct | None = None) -> None:
        x = torch.zeros(1, k * columns(act), dtype=dtype, device="cuda")
        q = torch.empty(1, k, dtype=torch.int8, device="cuda")
        more = (torch.zeros_like(x), 0.0) if act == "rms_norm" else ()
        ConvrotRowQuantizer(act).run(x, q, torch.empty(1, device="cuda"), *more)

    forms: dict[tuple[object, ...], partial[None]] = {}
    for dtype in DTYPES:
        for k in (*HOSTILE, *({k for _, k in MODELS} if dtype == BF16 else ())):
            _, _, _, *constants = ConvrotRowQuantizer()._arguments(torch.empty(1, k, dtype=dtype))
            forms[(dtype, *constants)] = partial(compile_one, dtype, k)
        for act, k in itertools.product(INPUT_ACTS, ACTIVATED[dtype]):
            forms[dtype, act, k] = partial(compile_one, dtype, k, act)
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


def test_seeds_are_stocks(launches: list[tuple[int, ...]]) -> None:
    x = bf16(512, 3072)
    for more in ({"stochastic_rounding": 1234}, {"stochastic_rounding": 1, "input_act": "swiglu"}):
        assert equal(slot()(x, 256, **more), slot().__wrapped__(x, 256, **more))
    assert launches == []


def norm(act: InputAct, k: int, dtype: torch.dtype) -> dict[str, Any]:
    if act != "rms_norm":
        return {}
    weight = torch.randn(k, device="cuda").to(dtype)
    return {"input_act_weight": weight, "input_act_eps": 1e-6}


@pytest.fixture
def has(request: pytest.FixtureRequest) -> InputAct:
    """The activation, which stock's release has."""
    act: InputAct = request.param
    if act not in import_module("comfy_kitchen.backends._activations").INPUT_ACT_TO_CODE:
        pytest.skip("this release does not have it")
    return act


over_acts = pytest.mark.parametrize("has", INPUT_ACTS, indirect=True)


@over_acts
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activated_rows_are_bit_identical(
    has: InputAct, dtype: torch.dtype, launches: list[tuple[int, ...]], record: Record
) -> None:
    different, shapes_of_x = [], []
    for k in ACTIVATED[dtype]:
        rows = hostile_rotated_rows(k * columns(has), dtype)
        names = [*rows, *["random"] * 500]
        random = torch.randn(500, k * columns(has))
        widest = 2 if dtype == torch.float16 else 12
        random[250:] *= 10.0 ** torch.linspace(-widest, widest, 250)[:, None]
        random[:250] *= torch.linspace(0.1, 30, 250)[:, None]
        x = torch.cat([torch.stack(list(rows.values())), random.to(dtype)]).cuda()
        more = {"input_act": has, **norm(has, k, dtype)}
        expected = slot().__wrapped__(x, 256, **more)
        for _ in range(2):
            same = same_rows(slot()(x, 256, **more), expected).tolist()
            different += [(k, name) for name, good in zip(names, same, strict=True) if not good]
        shapes_of_x.append(tuple(x.shape))
    assert different == []
    assert launches == shapes_of_x
    record.add("quantize_convrot_equal", what=f"hostile rows, {has}", dtype=str(dtype)[6:])


@pytest.mark.parametrize("has", ["gelu_tanh", "swiglu", "situ"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_value_of_16_bits_is_activated_as_stock_does(
    has: InputAct, dtype: torch.dtype
) -> None:
    """Each alone in a row, whose scale shows it."""
    values = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    k = 256
    for place in range(0, k * columns(has), k):
        x = torch.zeros(len(values), k * columns(has), dtype=dtype, device="cuda")
        x[:, k - place if columns(has) == 2 else 0] = 0.7
        x[:, place] = values
        found = slot()(x, 256, input_act=has)
        assert equal(found, slot().__wrapped__(x, 256, input_act=has))


@pytest.mark.parametrize(
    ("m", "k", "has"),
    [
        *[(37_296, 14_336, "swiglu"), (4608, 12_288, "swiglu"), (25_900, 16_384, "gelu_tanh")],
        *[(4608, 12_288, "situ"), (37_296, 5120, "rms_norm")],
    ],
    indirect=["has"],
)
def test_activated_rows_are_quantized_faster_than_by_stock(
    m: int, k: int, has: InputAct, record: Record
) -> None:
    x = bf16(m, k * columns(has))
    more = {"input_act": has, **norm(has, k, BF16)}

    def ours() -> Quantized:
        found: Quantized = slot()(x, 256, **more)
        return found

    def stock() -> Quantized:
        found: Quantized = slot().__wrapped__(x, 256, **more)
        return found

    expected = stock()
    assert equal(ours(), expected)
    assert equal(ours(), expected)
    source = torch.empty(m * k * (2 * columns(has) + 1) // 2, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    functions = {"copy": lambda: target.copy_(source), "stock": stock, "ours": ours}
    times = graph_times(functions, rounds=5, span=1e-3)
    record.add(
        "quantize_convrot",
        backend="cuda",
        m=m,
        k=k,
        act=has,
        timing="graph",
        stock_us=round(times["stock"] * 1e3, 2),
        ours_us=round(times["ours"] * 1e3, 2),
        copy_us=round(times["copy"] * 1e3, 2),
        times=round(times["stock"] / times["ours"], 2),
        of_copy=round(times["copy"] / times["ours"], 2),
    )
    assert times["ours"] <= 1.02 * times["stock"]


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
