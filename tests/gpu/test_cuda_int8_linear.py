"""The whole linear of the CUDA backend on a GPU: every form of call equals stock's, bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import log, patcher
from tests.gpu.conftest import Record
from tests.gpu.test_memory import peak
from tests.gpu.test_triton_backend import bf16, layer, windows

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
M, N, K = 300, 1536, 2048
DTYPES = (torch.float32, torch.float16, BF16)
ACTS = ("gelu_tanh", "swiglu", "situ", "rms_norm")
Form = dict[str, Any]

# One or two rows, for which stock has kernels of its own, and operands that are not as usual.
STOCKS = {
    *("0 rows", "1 rows", "2 rows", "1-D"),
    *("bias in float32", "scale in bfloat16", "weight transposed", "needs a gradient"),
    *("residual of one row", "residual without a scale", "an activation that there is not"),
}


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
    for in_dtype in DTYPES:
        for out_dtype in DTYPES:
            forms[f"{in_dtype} to {out_dtype}"] = {
                **base,
                "x": _randn(300, K, dtype=in_dtype),
                "out_dtype": out_dtype,
                "bias": bias.to(out_dtype),
            }
    return {**forms, **_residuals({**base, "x": x}), **_activations(base), **_rotations(base)}


def _residuals(base: Form) -> dict[str, Form]:
    """A residual in every form, for x [M, K]."""
    values, scale, x = _randn(M, N) * 30, _randn(N), base["x"]
    added: Form = {**base, "residual": values, "residual_scale": scale}
    flat = torch.empty(M * N + 1, dtype=BF16, device="cuda")[1:].copy_(values.view(-1))
    cube, cube_3d = values.view(3, 100, N), x.view(3, 100, K)
    forms: dict[str, Form] = {
        "residual without a bias": {**added, "bias": None},
        "residual, rotated": {**added, "convrot": True},
        "residual, rotated in two steps": {**added, "convrot": True, "convrot_groupsize": 64},
        "residual 3-D": {**added, "x": cube_3d, "residual": cube},
        "residual 4-D": {**added, "x": cube_3d[None], "residual": cube[None]},
        "residual 2-D beside 3-D": {**added, "x": cube_3d},
        "residual 1-D": {**added, "residual": values.view(-1)},
        "residual transposed": {**added, "residual": values.t().contiguous().t()},
        "residual of a wider tensor": {**added, "residual": _randn(M, N + 64)[:, 3 : N + 3]},
        "residual of one row, expanded": {**added, "residual": values[:1].expand(M, N)},
        "residual that starts unaligned": {**added, "residual": flat.view(M, N)},
        "residual that starts unaligned, 3-D": {**added, "x": cube_3d, "residual": flat},
        "residual in float32": {**added, "residual": values.float()},
        "residual in float32, 3-D": {**added, "x": cube_3d, "residual": cube.float()},
        "residual scale in float32": {**added, "residual_scale": scale.float()},
        "residual scale as a float32 scalar": {**added, "residual_scale": scale.float()[0]},
        "residual scale as a row": {**added, "residual_scale": scale[None]},
        "residual scale of 3 dimensions": {**added, "residual_scale": scale.float()[None, None]},
        "residual scale that starts unaligned": {**added, "residual_scale": _randn(N + 1)[1:]},
        "residual scale as a parameter": {**added, "residual_scale": torch.nn.Parameter(scale)},
        "residual of one row": {**added, "residual": values[:1]},
        "residual without a scale": {**base, "residual": values},
        "residual of 16 rows": {**added, "x": x[:16], "residual": values[:16]},
    }
    for dtype in DTYPES:
        forms[f"residual to {dtype}"] = {
            **added,
            "residual": values.to(dtype),
            "residual_scale": scale.to(dtype),
            "out_dtype": dtype,
            "bias": base["bias"].to(dtype),
        }
    return forms


def _activations(base: Form) -> dict[str, Form]:
    """Every activation, folded into the quantizer and before it."""
    added = {"residual": _randn(M, N), "residual_scale": _randn(N)}
    ways: dict[str, Form] = {
        "": {},
        ", rotated": {"convrot": True},
        ", rotated in two steps": {"convrot": True, "convrot_groupsize": 64},
        ", with a residual": added,
        ", rotated, with a residual": {**added, "convrot": True},
    }
    forms: dict[str, Form] = {
        "an activation that there is not": {**base, "x": _randn(M, K), "input_act": "foo"}
    }
    for act in ACTS:
        gated = act in ("swiglu", "situ")
        given: Form = {**base, "x": _randn(M, K * (1 + gated)), "input_act": act}
        if act == "rms_norm":
            given |= {"input_act_weight": _randn(K), "input_act_eps": 1e-3}
        forms |= {f"{act}{name}": {**given, **way} for name, way in ways.items()}
    columns = _randn(3, 100, 2 * K + 64)[..., 5 : 5 + 2 * K]
    forms["swiglu 3-D of a wider tensor"] = {**base, "x": columns, "input_act": "swiglu"}
    norm = {**forms["rms_norm, rotated"], "input_act_weight": torch.rand(K, device="cuda")}
    forms["rms_norm by a float32 weight, rotated"] = norm
    unaligned = {"input_act_weight": _randn(K + 1)[1:], "input_act_eps": 1}
    for name in ("", ", rotated", ", rotated in two steps"):
        by = f"rms_norm by a weight that starts unaligned{name}"
        forms[by] = {**forms[f"rms_norm{name}"], **unaligned}
    return forms


def _rotations(base: Form) -> dict[str, Form]:
    """Groups that stock rotates in a step of its own, and rows that are too wide for one."""
    forms: dict[str, Form] = {}
    for group in (64, 16):
        for dtype in DTYPES:
            rotated = {"convrot": True, "convrot_groupsize": group}
            forms[f"group {group}, {dtype}"] = {**base, "x": _randn(M, K, dtype=dtype), **rotated}
    for k in (16_384, 16_640, 24_576):
        weight = torch.randint(-127, 128, (N, k), dtype=torch.int8, device="cuda")
        wide: Form = {**base, "weight": weight, "convrot": True}
        forms[f"K of {k}, rotated"] = {**wide, "x": _randn(M, k)}
        forms[f"K of {k}, swiglu, rotated"] = {
            **wide,
            "x": _randn(M, 2 * k),
            "input_act": "swiglu",
        }
    return forms


def _at(index: int) -> torch.Tensor:
    return torch.tensor([index], device="cuda")


def _outcome(call: Callable[..., torch.Tensor], form: Form) -> Any:
    try:
        with torch.no_grad() if not form["x"].requires_grad else torch.enable_grad():
            return call(**form)
    except Exception as error:
        return type(error)


def _by_stock(forms: dict[str, Form]) -> dict[str, Any]:
    from comfy_kitchen.backends import cuda

    ck_patch.disable()
    try:
        return {name: _outcome(cuda.int8_linear, form) for name, form in forms.items()}
    finally:
        ck_patch.enable()


def _assert_same(name: str, ours: Any, theirs: Any) -> None:
    if isinstance(theirs, type):
        assert ours is theirs, name
        return
    assert not isinstance(ours, type), (name, ours)
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    assert ours.is_contiguous() == theirs.is_contiguous(), name
    assert ours.requires_grad == theirs.requires_grad, name
    assert torch.equal(ours, theirs), name


def _plans() -> dict[Any, Any]:
    """What the op has decided, by shape and dtypes."""
    replacement: Any = patcher._PATCHER._patches["cuda_int8_linear"].replacement
    plans: dict[Any, Any] = replacement._linear.gemm._plans
    return plans


def test_every_form_of_call_equals_stock(record: Record) -> None:
    from comfy_kitchen.backends import cuda

    forms = _forms()
    expected = _by_stock(forms)
    assert hasattr(cuda.int8_linear, "__wrapped__")
    for _ in range(2):  # First use, then launches of the compiled kernels.
        for name, form in forms.items():
            torch.full((1000, N), torch.nan, dtype=BF16, device="cuda")  # Poisons the next output.
            _assert_same(name, _outcome(cuda.int8_linear, form), expected[name])
    launched = sum(plan is not None and bool(plan.launches) for plan in _plans().values())
    assert launched >= 10
    record.add("equal_int8_linear", forms=len(forms), shapes_by_our_kernels=launched)


@pytest.fixture
def ours_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is tried, and our kernels take all that they can."""
    monkeypatch.setenv("CK_PATCH_INT8", "triton")
    monkeypatch.setenv("CK_PATCH_TUNE", "off")
    ck_patch.disable()
    ck_patch.enable()
    yield
    ck_patch.disable()
    monkeypatch.undo()
    ck_patch.enable()


@pytest.mark.usefixtures("ours_alone")
def test_all_but_a_few_forms_are_computed_by_our_kernels(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comfy_kitchen.backends import cuda

    from ck_patch.ops.quantized_linear import QuantizedLinear

    known = inspect.signature(cuda.int8_linear).parameters.keys()
    forms = {name: form for name, form in _forms().items() if form.keys() <= known}
    expected = _by_stock(forms)
    lines: list[str] = []
    direct: list[bool] = []
    launch = QuantizedLinear._by_addresses

    def noted(*args: Any) -> torch.Tensor | None:
        out = launch(*args)
        direct.append(out is not None)
        return out

    monkeypatch.setattr(QuantizedLinear, "_by_addresses", noted)
    monkeypatch.setattr(log, "paths_wanted", lambda: True)
    monkeypatch.setattr(log, "path", lines.append)
    by_stock: set[str] = set()
    by_addresses: set[str] = set()
    for _ in range(3):  # First use, a launch that is bound, and that launch by addresses.
        by_addresses.clear()
        for name, form in forms.items():
            torch.full((1000, N), torch.nan, dtype=BF16, device="cuda")  # Poisons the next output.
            lines.clear()
            direct.clear()
            _assert_same(name, _outcome(cuda.int8_linear, form), expected[name])
            if any("a form of call that ours does not take" in line for line in lines):
                by_stock.add(name)
            if direct == [True]:
                by_addresses.add(name)
    refused = {name for name, theirs in expected.items() if isinstance(theirs, type)}
    assert by_stock == (STOCKS & forms.keys()) | refused
    plans = _plans()
    assert all(plan is not None and plan.launches for plan in plans.values()), plans
    assert any(key[-1] for key in plans) == ("residual" in known)
    at_once = {name for name, form in forms.items() if _is_quantized_at_once(form)}
    assert by_addresses == at_once - by_stock
    record.add(
        "int8_linear_by_our_kernels",
        forms=len(forms),
        by_addresses=len(by_addresses),
        by_stock=sorted(by_stock),
    )


def _is_quantized_at_once(form: Form) -> bool:
    group, k = form.get("convrot_groupsize", 256), form["weight"].shape[1]
    return not form.get("convrot") or (group == 256 and k <= 16_384)


@pytest.mark.usefixtures("ours_alone")
def test_no_form_needs_more_memory_than_with_stock(record: Record) -> None:
    from comfy_kitchen.backends import cuda

    forms = _forms()
    expected = _by_stock(forms)
    forms = {name: form for name, form in forms.items() if not isinstance(expected[name], type)}
    expected.clear()

    def peaks() -> dict[str, int]:
        found = {}
        for name, form in forms.items():
            for _ in range(3):
                _outcome(cuda.int8_linear, form)
            found[name] = peak(lambda: _outcome(cuda.int8_linear, form))  # noqa: B023
        return found

    ours = peaks()
    ck_patch.disable()
    theirs = peaks()
    more = {name: ours[name] - theirs[name] for name in forms if ours[name] > theirs[name]}
    record.add("int8_linear_peak", forms=len(forms), more=more)
    # Our kernel reads a copy of a weight that does not start on 16 bytes, stock's the weight.
    assert more.pop("rms_norm by a weight that starts unaligned, rotated", 0) <= K * 2
    assert more == {}


@pytest.mark.parametrize("convrot", [False, True])
def test_a_gated_activation_beyond_2_31_elements_is_right(convrot: bool) -> None:
    from comfy_kitchen.backends import cuda

    m, k, n = 74_899, 14_336, 128
    x, given = bf16(m, 2 * k), {**layer(n, k), "input_act": "swiglu", "convrot": convrot}
    ours = [cuda.int8_linear(x=x, **given) for _ in range(3)]  # By the functions, and by addresses.
    ck_patch.disable()
    try:
        for rows in windows(m, 2 * k):
            theirs = cuda.int8_linear(x=x[rows], **given)
            assert all(torch.equal(out[rows], theirs) for out in ours), rows
    finally:
        ck_patch.enable()


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
        {"x": x, "weight": weight, "weight_scale": scale, "convrot": True, "convrot_groupsize": 32},
    ]
    stock = cuda.int8_linear.__wrapped__
    for form in wrong:
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            stock(**form)
        with pytest.raises(theirs.type):
            cuda.int8_linear(**form)
    assert torch.equal(cuda.int8_linear(x, weight, scale), stock(x, weight, scale))
