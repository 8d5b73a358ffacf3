"""The whole linear of the CUDA backend on a GPU: every form of call equals stock's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import patcher
from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
N, K = 1536, 2048
Form = dict[str, Any]


def _randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _forms() -> dict[str, Form]:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    scale = torch.rand(N, device="cuda") * 0.01 + 1e-3
    bias = _randn(N)
    wide = _randn(300, K + 256)
    base: Form = {"weight": weight, "weight_scale": scale, "bias": bias, "out_dtype": BF16}
    forms: dict[str, Form] = {
        f"{m} rows": {**base, "x": _randn(m, K)} for m in (0, 1, 2, 3, 4, 15, 16, 17, 64, 129, 1000)
    }
    x = _randn(300, K)
    forms |= {
        "1-D": {**base, "x": x[0]},
        "3-D": {**base, "x": _randn(2, 77, K)},
        "4-D": {**base, "x": _randn(1, 4, 77, K)},
        "columns of a wider tensor": {**base, "x": wide[:, 128 : 128 + K]},
        "columns that start unaligned": {**base, "x": wide[:, 3 : 3 + K]},
        "transposed": {**base, "x": _randn(K, 300).t()},
        "one row expanded": {**base, "x": x[:1].expand(300, K)},
        "no bias": {**base, "x": x, "bias": None},
        "bias as a parameter": {**base, "x": x, "bias": torch.nn.Parameter(bias)},
        "bias in float32": {**base, "x": x, "bias": bias.float()},
        "scale of one value": {**base, "x": x, "weight_scale": scale[:1]},
        "scale as a scalar": {**base, "x": x, "weight_scale": scale[0]},
        "scale as a column": {**base, "x": x, "weight_scale": scale.reshape(N, 1)},
        "scale in bfloat16": {**base, "x": x, "weight_scale": scale.to(BF16)},
        "weight transposed": {**base, "x": x, "weight": weight.t().contiguous().t()},
        "output dtype of the input": {**base, "x": x, "out_dtype": None},
        "needs a gradient": {**base, "x": x.clone().requires_grad_()},
        "rotated": {**base, "x": x, "convrot": True},
        "one infinite and one tiny row": {**base, "x": x.clone().index_fill_(1, _at(5), 1e30)},
    }
    for in_dtype in (torch.float32, torch.float16, BF16):
        for out_dtype in (torch.float32, torch.float16, BF16):
            forms[f"{in_dtype} to {out_dtype}"] = {
                **base,
                "x": _randn(300, K, dtype=in_dtype),
                "out_dtype": out_dtype,
                "bias": bias.to(out_dtype),
            }
    forms["with swiglu"] = {**base, "x": _randn(300, 2 * K), "input_act": "swiglu"}
    return forms


def _at(index: int) -> torch.Tensor:
    return torch.tensor([index], device="cuda")


def _outcome(call: Callable[..., torch.Tensor], form: Form) -> Any:
    try:
        with torch.no_grad() if not form["x"].requires_grad else torch.enable_grad():
            return call(**form)
    except Exception as error:
        return type(error)


def test_every_form_of_call_equals_stock(record: Record) -> None:
    from comfy_kitchen.backends import cuda

    forms = _forms()
    ck_patch.disable()
    try:
        expected = {name: _outcome(cuda.int8_linear, form) for name, form in forms.items()}
    finally:
        ck_patch.enable()
    assert hasattr(cuda.int8_linear, "__wrapped__")
    for _ in range(2):  # First use, then launches of the compiled kernels.
        for name, form in forms.items():
            torch.full((1000, N), torch.nan, dtype=BF16, device="cuda")  # Poisons the next output.
            ours, theirs = _outcome(cuda.int8_linear, form), expected[name]
            if isinstance(theirs, type):
                assert ours is theirs, name
                continue
            assert not isinstance(ours, type), (name, ours)
            assert ours.shape == theirs.shape, name
            assert ours.dtype == theirs.dtype, name
            assert ours.is_contiguous() == theirs.is_contiguous(), name
            assert ours.requires_grad == theirs.requires_grad, name
            assert torch.equal(ours, theirs), name
    gemm = patcher._PATCHER._patches["cuda_int8_linear"].replacement._gemm  # type: ignore[attr-defined]
    launched = sum(plan is not None and bool(plan.launches) for plan in gemm._plans.values())
    assert launched >= 10
    record.add("equal_int8_linear", forms=len(forms), shapes_by_our_kernels=launched)


def test_through_the_registry_torch_ops_and_a_cuda_graph() -> None:
    import comfy_kitchen

    from ck_patch.measure import replayed

    x, bias = _randn(600, K), _randn(N)
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    scale = torch.rand(N, device="cuda") * 0.01

    def call() -> torch.Tensor:
        found: torch.Tensor = comfy_kitchen.int8_linear(x, weight, scale, bias, BF16)
        return found

    ck_patch.disable()
    expected = call()
    ck_patch.enable()
    assert torch.equal(replayed(call), expected)
    assert torch.equal(call(), expected)


def test_what_the_host_does_not_know_is_answered_by_the_host() -> None:
    from comfy_kitchen.backends import cuda

    x = _randn(300, K)
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    scale = torch.rand(N, device="cuda")
    wrong: list[Form] = [
        {"x": x, "weight": weight, "weight_scale": scale, "unheard_of": 1},
        {"x": x, "weight": weight},
        {"x": x[:, :-16], "weight": weight, "weight_scale": scale},
        {"x": x, "weight": weight, "weight_scale": scale, "input_act": "foo"},
        {"x": x, "weight": weight, "weight_scale": scale, "out_dtype": torch.float64},
        {"x": x.cpu(), "weight": weight, "weight_scale": scale},
        {"x": x, "weight": weight.cpu(), "weight_scale": scale},
        {"x": 7, "weight": weight, "weight_scale": scale},
    ]
    stock = cuda.int8_linear.__wrapped__
    for form in wrong:
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            stock(**form)
        with pytest.raises(theirs.type):
            cuda.int8_linear(**form)
    assert torch.equal(cuda.int8_linear(x, weight, scale), stock(x, weight, scale))
