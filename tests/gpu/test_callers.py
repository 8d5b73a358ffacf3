"""The callers of the GEMM entry in the CUDA backend, on a GPU: the same results patched and not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ck_patch
from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
M, N, K = 1024, 1536, 2048


def _packed(n: int, k: int) -> torch.Tensor:
    """Two signed 4-bit values in each byte."""
    return torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, device="cuda")


def _x() -> torch.Tensor:
    return torch.randn(M, K, device="cuda", dtype=BF16)


def _scale(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda") * 0.01 + 1e-3


def _bias() -> torch.Tensor:
    return torch.randn(N, device="cuda", dtype=BF16)


def _int8() -> Callable[[], torch.Tensor]:
    import comfy_kitchen

    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    x, scale, bias = _x(), _scale(N), _bias()
    return lambda: comfy_kitchen.int8_linear(x, weight, scale, bias, BF16)


def _gelu() -> Callable[[], torch.Tensor]:
    import comfy_kitchen

    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    x, scale, bias = _x(), _scale(N), _bias()
    return lambda: comfy_kitchen.int8_linear(x, weight, scale, bias, BF16, input_act="gelu_tanh")


def _residual() -> Callable[[], torch.Tensor]:
    import comfy_kitchen

    if "residual" not in inspect.signature(comfy_kitchen.int8_linear).parameters:
        pytest.skip("this release has no residual")
    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    x, scale, bias = torch.randn(M, 2 * K, device="cuda", dtype=BF16), _scale(N), _bias()
    residual, residual_scale = torch.randn(M, N, device="cuda", dtype=BF16), _bias()
    more = {"residual": residual, "residual_scale": residual_scale}
    return lambda: comfy_kitchen.int8_linear(
        x, weight, scale, bias, BF16, convrot=True, input_act="swiglu", **more
    )


def _two_steps() -> Callable[[], torch.Tensor]:
    import comfy_kitchen

    weight = torch.randint(-128, 128, (N, K), dtype=torch.int8, device="cuda")
    x, scale, bias = _x(), _scale(N), _bias()
    return lambda: comfy_kitchen.int8_linear(
        x, weight, scale, bias, BF16, convrot=True, convrot_groupsize=64
    )


def _int4_through_int8() -> Callable[[], torch.Tensor]:
    """With the weight unpacked beforehand; packed ones have an entry of their own."""
    from comfy_kitchen.backends import cuda

    x, packed = _packed(M, K), _packed(N, K)
    weight = cuda.prepare_int4_weight_for_int8_linear(packed)
    x_scale, scale, bias = _scale(M), _scale(N), _bias()
    return lambda: cuda._int4_linear_via_int8(
        x, packed, x_scale, scale, bias, BF16, weight_int8=weight
    )


def _w4a8() -> Callable[[], torch.Tensor]:
    from comfy_kitchen.backends import cuda

    x, weight, bias = _x(), _packed(N, K), _bias()
    relative = torch.rand(N, K // 16, device="cuda") * 8 + 8
    scale = _scale(N)
    return lambda: cuda.w4a8_int8_linear(x, weight, relative, scale, bias=bias)


CALLERS: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
    "int8_linear": _int8,
    "int8_linear with an activation": _gelu,
    "int8_linear with an activation and a residual": _residual,
    "int8_linear rotated in two steps": _two_steps,
    "int4_linear through INT8": _int4_through_int8,
    "w4a8_int8_linear": _w4a8,
}


@pytest.mark.parametrize("name", CALLERS)
def test_every_caller_of_the_entry_gets_stocks_result_from_our_kernel(
    name: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch import log

    call = CALLERS[name]()
    ck_patch.disable()
    expected = call()
    lines: list[str] = []
    monkeypatch.setattr(log, "paths_wanted", lambda: True)
    monkeypatch.setattr(log, "path", lines.append)
    ck_patch.enable()
    for _ in range(2):  # The first proves the kernel.
        assert torch.equal(call(), expected)
    shape = f"{M}x{N}x{K}"
    assert any(shape in line and ": triton " in line for line in lines), lines
    record.add("callers", name=name, equal=True)


def test_stochastic_rounding_keeps_its_seeds() -> None:
    from comfy_kitchen.backends import cuda

    quantize: Any = cuda.quantize_int8_rowwise
    weight = torch.randn(512, 5376, device="cuda", dtype=BF16)
    first, _ = quantize(weight, stochastic_rounding=1234)
    again, _ = quantize(weight, stochastic_rounding=1234)
    other, _ = quantize(weight, stochastic_rounding=1235)
    stock, _ = quantize.__wrapped__(weight, stochastic_rounding=1234)
    assert torch.equal(first, again)
    assert torch.equal(first, stock)
    assert not torch.equal(first, other)
