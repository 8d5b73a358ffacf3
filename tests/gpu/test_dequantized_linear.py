"""The linear over a dequantized weight on a GPU: torch's switches, time, memory and error.

Twice: by plain torch, and by our kernels where they are faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ck_patch import half_ways, shapes
from ck_patch.breaker import Breaker
from ck_patch.chunks import CHUNK_BYTES
from ck_patch.measure import graph_times, replayed
from ck_patch.ops.dequantized_linear import dequantized_linear
from ck_patch.ops.half_linear import HalfLinear
from tests.gpu.conftest import Record
from tests.gpu.test_int8_linear import stock

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = (F16, BF16, F32)
SHAPES = [(4096, 4096, 4096), *shapes.load()["qwen_image_2_1"]]
Linear = Callable[..., torch.Tensor]
SLOWEST = {
    "plain torch": {(F16, F16): 1.8, (BF16, BF16): 2.0},
    "kernels": {(F16, F16): 1.15, (BF16, BF16): 2.0},
}
"""Bounds of the time in times of a plain matmul with the same weight, dequantized before, by x and
compute.

On an H200 the kernels take 1.02 to 1.14, by how warm the chip is, and 0.84 to 0.89 at M = 2. The
clocks move by 15% within a millisecond or two: three rounds of one millisecond each showed 1.10 to
1.26 for the same calls in the same process. At 4096 x 4096 x 4096 the matmul takes 180 us, and a
safe one adds about 100 in plain torch: 7 for float32 sums, 23 for the cast of the weight, 75 for
scales, bias and rounding.
"""


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture(params=[False, True], ids=["float32 sums", "float16 sums allowed"])
def accumulation(request: pytest.FixtureRequest) -> Iterator[bool]:
    """torch's switch, off and as `--fast fp16_accumulation` sets it; nobody changes it."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = request.param
    yield request.param
    assert matmul.allow_fp16_accumulation == request.param
    matmul.allow_fp16_accumulation = before


@pytest.fixture(params=SLOWEST)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def linear(kind: str) -> Iterator[Linear]:
    """The linear of that kind; no kernel may fail its first use, or any other."""
    breaker = Breaker()
    yield dequantized_linear if kind == "plain torch" else HalfLinear("test", breaker)
    assert breaker.snapshot() == ()


def layer(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    scale = torch.rand(n, device="cuda") * 0.01 + 1e-4
    return weight, scale, torch.randn(n, device="cuda").to(dtype)


def hadamard() -> torch.Tensor:
    from comfy_kitchen.tensor.int8_utils import _build_hadamard

    found: torch.Tensor = _build_hadamard(256, device="cuda")
    return found


def stocks(*args: Any, **kwargs: Any) -> torch.Tensor:
    """What the eager backend itself returns."""
    with stock("eager") as function:
        return function(*args, **kwargs)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error of a row, by norms."""
    return float(((out.double() - truth).norm(dim=1) / truth.norm(dim=1)).max())


@pytest.mark.parametrize("compute", [F16, BF16])
@pytest.mark.parametrize("reduction", [False, True])
def test_products_that_cancel_leave_exactly_zero(
    linear: Linear,
    accumulation: bool,
    reduction: bool,
    compute: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_fp16_reduced_precision_reduction", reduction)
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", reduction)
    one = torch.ones(1, device="cuda")
    # Few rows and columns at a large K are where cuBLAS splits K.
    for m, n in ((1, 8), (1, 4096), (2, 16384), (16, 64), (17, 40), (64, 64), (256, 512)):
        for k, value, times in ((16384, 8.0, 1), (16384, 1.0, 8), (65536, 1 / 16, 127)):
            weight = torch.full((n, k), times, dtype=torch.int8, device="cuda")
            weight[:, k // 2 :] *= -1
            for dtype in DTYPES:
                x = torch.full((m, k), value, dtype=dtype, device="cuda")
                out = linear(x, weight, one, None, F16, compute)
                assert (out == 0).all(), (m, n, k, value, dtype)


def test_no_sum_of_a_gemm_that_writes_the_output_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    decide = half_ways.way

    def noted(*args: Any) -> half_ways.Way:
        chosen.append(decide(*args))
        return decide(*args)

    monkeypatch.setattr(half_ways, "way", noted)
    breaker = Breaker()
    linear = HalfLinear("test", breaker)
    one = torch.ones(1, device="cuda")
    # From the fewest tiles on that are trusted.
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    fewest = 128 * -(-2 * sms // 16)
    for m, n in ((fewest, 2048), (2048, fewest), (fewest + 128, 2048), (4096, 4096), (4608, 4096)):
        for k, value, times in ((16384, 8.0, 1), (16384, 1.0, 8), (32768, 1 / 16, 127)):
            weight = torch.full((n, k), times, dtype=torch.int8, device="cuda")
            weight[:, k // 2 :] *= -1
            x = torch.full((m, k), value, dtype=F16, device="cuda")
            for bias in (None, torch.zeros(n, dtype=F16, device="cuda")):
                assert (linear(x, weight, one, bias, F16) == 0).all(), (m, n, k, value)
    assert set(chosen) == {"folded"}
    assert breaker.snapshot() == ()


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 17), (2, 16384, 4096), (3, 1001, 5376), (8, 4096, 65536), (1, 131_073, 16_400)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_summed_in_float32(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    breaker = Breaker()
    weight, scale, bias = layer(n, k, dtype)
    x = torch.randn(m, k, device="cuda").to(dtype)
    out = HalfLinear("test", breaker)(x, weight, scale, bias, F32)
    assert breaker.snapshot() == ()
    for start in range(0, n, 8192):
        rows = slice(start, start + 8192)
        wide = weight[rows].double()
        truth = x.double() @ wide.t() * scale[rows].double() + bias[rows].double()
        terms = x.double().abs() @ wide.abs().t() * scale[rows].double() + bias[rows].double().abs()
        assert ((out[:, rows].double() - truth).abs() <= terms * 2.0**-20).all()


@pytest.mark.parametrize("compute", [F16, BF16])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_replay_of_its_graph_is_equal_to_the_call(
    linear: Linear, accumulation: bool, compute: torch.dtype, rotate: bool
) -> None:
    rotation = hadamard() if rotate else None
    for m, n, k in ((1, 1024, 512), (77, 3072, 3072), (700, 2056, 2048)):
        for dtype in DTYPES:
            weight, scale, bias = layer(n, k, dtype)
            x = torch.randn(m, k, device="cuda").to(dtype)
            given = x, weight, scale, bias, dtype, compute, rotation
            expected = linear(*given)
            assert torch.equal(replayed(partial(linear, *given)), expected)


@pytest.mark.parametrize("rotate", [False, True], ids=["plain", "rotated"])
def test_it_is_faster_than_stock_and_within_its_memory(
    linear: Linear, kind: str, rotate: bool, record: Record
) -> None:
    slow = []
    rotation = hadamard() if rotate else None
    for m, n, k in SHAPES:
        for dtype, compute in ((F16, F16), (BF16, F16), (F32, F16), (BF16, BF16)):
            weight, scale, bias = layer(n, k, dtype)
            x = torch.randn(m, k, device="cuda").to(dtype)
            operand, dequantized = x.to(compute), (weight * scale[:, None]).to(compute)
            given = x, weight, scale, bias, dtype
            ours = partial(linear, *given, compute, rotation)
            ours()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = ours()
            above_output = torch.cuda.max_memory_allocated() - before - out.nbytes
            times = graph_times(
                {
                    "plain": partial(torch.matmul, operand, dequantized.t()),
                    "ours": ours,
                    "stock": partial(stocks, *given, convrot=rotate),
                },
                rounds=15,
                span=4e-3,
            )
            torch.cuda.empty_cache()
            ratio = times["ours"] / times["plain"]
            record.add(
                "dequantized_linear",
                by=kind,
                m=m,
                n=n,
                k=k,
                x=name(dtype),
                compute=name(compute),
                rotated=rotate,
                plain_ms=round(times["plain"], 4),
                ours_ms=round(times["ours"], 4),
                stock_eager_ms=round(times["stock"], 4),
                ratio=round(ratio, 3),
                above_output=above_output,
            )
            bound = SLOWEST[kind].get((dtype, compute), math.inf)
            if rotate or (m == 2 and kind == "plain torch"):
                # Two rows are all reading of the weight: nothing hides the time of its cast there.
                bound = math.inf
            if above_output > CHUNK_BYTES or times["ours"] > times["stock"] or ratio > bound:
                slow.append(((m, n, k), dtype, compute, ratio, times, above_output))
    assert slow == []


@pytest.mark.parametrize(("m", "n", "k"), [(40_000, 28_672, 5376), (4096, 4096, 65536)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_large_layers_stay_within_the_memory_too(
    linear: Linear,
    kind: str,
    accumulation: bool,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    record: Record,
) -> None:
    weight, scale, bias = layer(n, k, dtype)
    x = torch.empty(m, k, dtype=dtype, device="cuda").normal_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = linear(x, weight, scale, bias, dtype)
    above_output = torch.cuda.max_memory_allocated() - before - out.nbytes
    record.add(
        "dequantized_linear_memory",
        by=kind,
        m=m,
        n=n,
        k=k,
        x=name(dtype),
        fp16_accumulation=accumulation,
        above_output=above_output,
    )
    assert above_output <= CHUNK_BYTES
    for rows in (slice(0, 32), slice(m // 2, m // 2 + 32), slice(m - 32, m)):
        truth = x[rows].float() @ weight.float().t() * scale + bias.float()
        assert error(out[rows], truth.double()) < 0.01


def activations(activation: str, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(m, k, device="cuda")
    if "outlier" in activation:
        x.view(m, -1, 256)[:, :, 7] *= 200
    if activation == "overflow":
        x *= {F16: 5e4, BF16: 1e37, F32: 1e37}[dtype] / float(x.abs().max())
    return x.to(dtype)


@pytest.mark.parametrize(
    "activation", ["normal", "outlier", "convrot", "convrot outlier", "overflow"]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compute", [F16, BF16])
def test_its_error_is_not_above_that_of_stocks_int8_path(
    linear: Linear,
    kind: str,
    accumulation: bool,
    compute: torch.dtype,
    dtype: torch.dtype,
    activation: str,
    record: Record,
) -> None:
    m, n, k = 512, 1024, 4096
    x = activations(activation, m, k, dtype)
    weight, scale, bias = layer(n, k, dtype)
    if activation == "overflow":  # Of products and sums, not of the result.
        scale, bias = scale * 1e-4, torch.zeros_like(bias)
    truth, rotation = x.double(), None
    if "convrot" in activation:
        rotation = hadamard()
        truth = (truth.view(m, -1, 256) @ rotation.double()).view(m, k)
    truth = truth @ weight.double().t() * scale.double() + bias.double()
    ours = linear(x, weight, scale, bias, dtype, compute, rotation)
    theirs = stocks(x, weight, scale, bias, dtype, convrot=rotation is not None)
    errors = {"ours": error(ours, truth), "stock_eager": error(theirs, truth)}
    record.add(
        "dequantized_linear_error",
        by=kind,
        activations=activation,
        x=name(dtype),
        compute=name(compute),
        fp16_accumulation=accumulation,
        **errors,
    )
    assert ours.isfinite().all()
    assert errors["ours"] <= errors["stock_eager"] or math.isnan(errors["stock_eager"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_activations_do_not_overflow(
    linear: Linear, accumulation: bool, dtype: torch.dtype
) -> None:
    top = torch.finfo(dtype).max
    for k in (256, 5376, 65536):
        weight = torch.randint(0, 2, (64, k), device="cuda").mul(255).sub(128).to(torch.int8)
        x = torch.full((8, k), top, dtype=dtype, device="cuda")
        x[1, 1::2] *= -1
        x[2] *= weight[0].sign()
        scale = torch.full((1,), 2.0**-40, device="cuda")
        for compute in (F16, BF16):
            for rotation in (None, hadamard()):
                out = linear(x, weight, scale, None, F32, compute, rotation)
                assert out.isfinite().all()


def test_infinities_and_nan_take_their_row_and_no_other(linear: Linear, accumulation: bool) -> None:
    weight, scale, bias = layer(512, 1024, F16)
    for dtype in DTYPES:
        for compute in (F16, BF16):
            x = torch.randn(40, 1024, device="cuda").to(dtype)
            clean = linear(x, weight, scale, bias, F16, compute)
            x[7, 3], x[11, 900], x[39, 0] = math.inf, -math.inf, math.nan
            out = linear(x, weight, scale, bias, F16, compute)
            lost = torch.zeros(40, dtype=torch.bool, device="cuda")
            lost[[7, 11, 39]] = True
            assert torch.equal(out[~lost], clean[~lost])
            assert not out[lost].isfinite().any()
