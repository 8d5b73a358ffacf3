"""The linear over a dequantized weight by our kernels, and what becomes of it when one fails."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.half_ways import Way
from tests.ops.test_dequantized_linear import error, exact, hadamard, int8
from tests.ops.test_linear_failures import DEVICE, MEMORY, STICKY, gpu

__all__ = ["gpu"]  # Autouse there and here: a made-up GPU.
pytestmark = pytest.mark.interpreter

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FLOATS = (F16, BF16, F32)
KERNELS = {"gemv": ("gemv", "gemv"), "folded": ("dequantize", "dequantize")}
ROWS = {"gemv": 5, "folded": 300, "folded float32": 40}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Way]:
    """The ways that were decided on."""
    from ck_patch import half_ways

    decided: list[Way] = []
    decide = half_ways.way

    def noted(*args: Any) -> Way:
        decided.append(decide(*args))
        return decided[-1]

    monkeypatch.setattr(half_ways, "way", noted)
    return decided


@pytest.fixture
def linear(breaker: Breaker) -> Any:
    from ck_patch.ops.half_linear import HalfLinear

    return HalfLinear("eager_int8_linear", breaker)


def layer(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, k = 136, 64
    return torch.randn(m, k).half(), int8(n, k), torch.rand(n) * 0.01, torch.randn(n).half()


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("m", [1, 5, 40, 300])
@pytest.mark.parametrize("out_dtype", [F16, F32])
def test_it_is_the_linear_within_the_rounding_of_float16(
    linear: Any,
    breaker: Breaker,
    ways: list[Way],
    out_dtype: torch.dtype,
    m: int,
    group: int | None,
) -> None:
    x, weight, scale, bias = layer(m)
    rotation = None if group is None else hadamard(group)
    for factor in (scale, scale[:1].clone()):
        for addend in (None, bias, bias.float()):
            for _ in range(2):  # The first use, and one after it.
                out = linear(x, weight, factor, addend, out_dtype, F16, rotation)
                truth = exact(x, weight, factor, addend, rotation)
                assert out.dtype == out_dtype
                assert error(out, truth) < 2e-3
    assert breaker.snapshot() == ()
    if m < 9:
        assert set(ways) == {"gemv"}
    elif m == 40 or out_dtype == F32:
        assert "folded float32" in ways
        assert "torch" not in ways
    else:
        assert set(ways) == {"folded", "folded float32"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_few_rows_of_every_dtype_are_multiplied_from_int8(
    linear: Any, ways: list[Way], dtype: torch.dtype
) -> None:
    _, weight, scale, bias = layer(3)
    x = torch.randn(64, 3).to(dtype).t()  # Strided.
    for rotation in (None, hadamard(16)):
        for compute in (F16, BF16):
            out = linear(x, weight, scale, bias, F32, compute, rotation)
            assert error(out, exact(x, weight, scale, bias, rotation)) < 1e-5
    assert set(ways) == {"gemv"}


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_rows_do_not_overflow_when_they_are_rotated(
    linear: Any, dtype: torch.dtype
) -> None:
    x = torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype)
    weight, scale = int8(8, 64), torch.tensor([2.0**-40])
    out = linear(x, weight, scale, None, F32, F16, hadamard(16))
    assert error(out, exact(x, weight, scale, None, hadamard(16))) < 1e-3


@pytest.mark.parametrize("way", ROWS)
def test_scales_below_the_normal_numbers_of_float16_cost_no_accuracy(linear: Any, way: str) -> None:
    x, weight, scale, _ = layer(ROWS[way])
    out = linear(x, weight, scale * 1e-4, None, F32 if way == "folded float32" else F16)
    plain = exact(x, weight, scale * 1e-4)
    assert error(out, plain) < 5e-3
    rotated = linear(x, weight, scale * 1e-4, None, F32, F16, hadamard(16))
    assert error(rotated, exact(x, weight, scale * 1e-4, None, hadamard(16))) < 1e-3


def test_no_rows_make_an_empty_result(linear: Any) -> None:
    x, weight, scale, bias = layer(0)
    assert linear(x, weight, scale, bias, F16).shape == (0, 136)


def test_autocast_and_gradients_change_nothing(linear: Any) -> None:
    for m in ROWS.values():
        x, weight, scale, bias = layer(m)
        for rotation in (None, hadamard(16)):
            expected = linear(x, weight, scale, bias, F16, F16, rotation)
            with torch.autocast("cpu", dtype=BF16):
                wanting = x.clone().requires_grad_()
                out = linear(wanting, weight, scale, bias, F16, F16, rotation)
            assert torch.equal(out, expected)
            assert not out.requires_grad


def plant(monkeypatch: pytest.MonkeyPatch, way: str, fault: Any) -> list[int]:
    """Have `fault` follow each run of the kernel of that way, with what it was given."""
    import importlib

    module_name, name = KERNELS[way.split()[0]]
    module = importlib.import_module(f"ck_patch.kernels.{module_name}")
    good = getattr(module, name)
    runs: list[int] = []

    def planted(*args: Any) -> None:
        runs.append(1)
        good(*args)
        fault(*args)

    monkeypatch.setattr(module, name, planted)
    return runs


def raising(error: Exception) -> Any:
    def fault(*args: Any) -> None:
        raise error

    return fault


def _out(args: tuple[Any, ...]) -> torch.Tensor:
    """The last of the tensors is what a kernel writes."""
    *_, out = (given for given in args if isinstance(given, torch.Tensor))
    return out


def _wrong(*args: Any) -> None:
    _out(args)[-1, -1] += 1


def _not_written(*args: Any) -> None:
    _out(args)[0] = math.nan


FAULTS = [
    pytest.param(raising(RuntimeError("planted\nand more")), "RuntimeError: planted", id="raises"),
    pytest.param(raising(ImportError("no triton")), "ImportError: no triton", id="is missing"),
    pytest.param(_wrong, "differs from plain torch", id="wrong element"),
    pytest.param(_not_written, "differs from plain torch", id="not written"),
]


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_kernel_that_fails_leaves_the_device_to_plain_torch_and_says_so_once(
    linear: Any,
    breaker: Breaker,
    ways: list[Way],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
    fault: Any,
    reason: str,
) -> None:
    from ck_patch.ops.dequantized_linear import dequantized_linear

    runs = plant(monkeypatch, way, fault)
    x, weight, scale, bias = layer(ROWS[way])
    out_dtype = F32 if way == "folded float32" else F16
    with caplog.at_level(logging.WARNING, "ck_patch"):
        for _ in range(3):
            expected = dequantized_linear(x, weight, scale, bias, out_dtype)
            assert torch.equal(linear(x, weight, scale, bias, out_dtype), expected)
    assert ways[0] == way
    assert len(runs) == 1
    (opened,) = breaker.snapshot()
    assert (opened.device, opened.reason) == (str(DEVICE), reason)
    (line,) = caplog.messages
    assert reason in line
    assert "plain torch" in line


@pytest.mark.parametrize("way", ROWS)
@pytest.mark.parametrize("failure", [MEMORY, STICKY], ids=["memory", "sticky"])
def test_what_plain_torch_cannot_help_is_the_callers(
    linear: Any, breaker: Breaker, monkeypatch: pytest.MonkeyPatch, way: str, failure: Exception
) -> None:
    plant(monkeypatch, way, raising(failure))
    x, weight, scale, bias = layer(ROWS[way])
    with pytest.raises(type(failure)) as caught:
        linear(x, weight, scale, bias, F32 if way == "folded float32" else F16)
    assert caught.value is failure
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("way", ROWS)
def test_a_kernel_is_launched_under_capture_only_once_it_is_proven(
    linear: Any, monkeypatch: pytest.MonkeyPatch, gpu: SimpleNamespace, way: str
) -> None:
    runs = plant(monkeypatch, way, lambda *args: None)
    x, weight, scale, bias = layer(ROWS[way])
    given = x, weight, scale, bias, F32 if way == "folded float32" else F16
    gpu.capturing = True
    plain = linear(*given)
    assert runs == []
    gpu.capturing = False
    proven = linear(*given)
    assert len(runs) == 1
    gpu.capturing = True
    assert torch.equal(linear(*given), proven)
    assert len(runs) == 2
    assert error(plain, proven.double()) < 2e-3


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("m", [40, 300])
@pytest.mark.parametrize("scale", [64.0, 4e-8])
def test_scales_that_float16_cannot_hold_are_as_exact_as_others(
    linear: Any, breaker: Breaker, m: int, scale: float, group: int | None
) -> None:
    x, weight, scales, bias = layer(m)
    x = x * 1e-4 if scale > 1 else x
    scales[5], scales[70:90] = scale, scale
    rotation = None if group is None else hadamard(group)
    for factor in (scales, torch.full((1,), scale)):
        out_dtype = F16 if scale > 1 else F32  # The output has to hold the result, too.
        addend = bias if scale > 1 else None
        for _ in range(2):
            out = linear(x, weight, factor, addend, out_dtype, F16, rotation)
            truth = exact(x, weight, factor, addend, rotation)
            assert out.isfinite().all()
            for column in (5, 75, 100):
                assert error(out[None, :, column], truth[None, :, column]) < 2e-3
    assert breaker.snapshot() == ()


def test_a_channel_of_zeros_stays_zero(linear: Any) -> None:
    x, weight, scales, _ = layer(40)
    weight[7], scales[7] = 0, 1e-30
    out = linear(x, weight, scales, None, F16, F16, None)
    assert (out[:, 7] == 0).all()
