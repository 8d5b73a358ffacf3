"""All tensors on cuda:1 while cuda:0 is the current device, in every slot and route.

What stock does then, read from comfy_kitchen 0.2.31 and 0.2.40 and torch: its eager backend is
torch's operations, which follow their tensors. Everything of its CUDA backend exports its tensors
by `Tensor.__dlpack__`, which refuses those of a device that is not current: BufferError. Its Triton
kernels, and its `_C` entries where somebody calls them with capsules of his own, are launched on
the current device, where the memory of the other cannot be read, or can, without waiting for it.

Ours follow the tensors wherever they answer at all: in both entries, the row quantizers of all
three backends and the linears of the eager and the Triton one. The CUDA backend's whole linear,
and its quantizers with a seed, are stock's then, and refuse as stock does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch.breaker import Breaker
from tests.conftest import Record
from tests.gpu import test_int8_linear, test_quantize_rows
from tests.gpu.slot import Call, entry, random_call, stock_bias_dtype
from tests.gpu.test_cases import volta
from tests.gpu.test_residual import entries, residual_call
from tests.gpu2.devices import (
    CALLS,
    GEMM,
    QUANTIZER,
    K,
    M,
    N,
    allocations,
    back,
    kernels,
    launched,
    on,
    same,
    synchronize,
)

pytestmark = pytest.mark.gpu2


@pytest.fixture(autouse=True)
def by_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ours runs where the rule has it: a trial, among other programs on these GPUs, may find stock
    to be as fast."""
    monkeypatch.setenv("CK_PATCH_TUNE", "off")
    ck_patch.disable()
    ck_patch.enable()
    yield
    ck_patch.disable()
    monkeypatch.undo()
    ck_patch.enable()


BF16, F16 = torch.bfloat16, torch.float16
REFUSAL = "different CUDA device"


@dataclass
class Route:
    """A function, its arguments, and how the names of the kernels of ours that it runs begin."""

    function: Callable[..., Any]
    given: Any
    starts: tuple[str, ...]
    breaker: Breaker | None = None

    def ready(self, device: int) -> Callable[[], Any]:
        """The call with all tensors on that GPU."""
        given = on(device, self.given)
        if isinstance(given, dict):
            return partial(self.function, **given)
        return partial(self.function, given)


def _x(m: int = M, k: int = K, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(m, k, device="cuda").to(dtype)


def _layer(n: int = N, k: int = K, dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda"),
        "weight_scale": torch.rand(n, device="cuda") * 0.01 + 1e-3,
        "bias": torch.randn(n, device="cuda").to(dtype),
    }


def _entry() -> Route:
    call = random_call(M, N, K, BF16, stock_bias_dtype(BF16))
    return Route(lambda call: call.run(entry())[1], call, (GEMM,))


def _residual_entry() -> Route:
    ours, _ = entries()
    return Route(lambda call: call.run(ours), residual_call(M, N, K, BF16, biased=True), (GEMM,))


def _quantizer(backend: str) -> Route:
    return Route(test_quantize_rows.ours(backend), _x(), (QUANTIZER,))


def _rotating_quantizer() -> Route:
    from comfy_kitchen.backends import cuda

    function = cuda.quantize_int8_rowwise_convrot64
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return Route(lambda x: function(x, 256), _x(), (QUANTIZER + "convrot",))


def _linear(backend: str, form: str) -> Route:
    given = {"x": _x(), **_layer(), "out_dtype": BF16}
    if form == "rotated":
        given["convrot"] = True
    elif form == "gelu":
        given["input_act"] = "gelu_tanh"
    elif form == "swiglu":
        given |= {"x": _x(k=2 * K), "input_act": "swiglu"}
    elif form == "residual":
        scale = torch.randn(N, device="cuda").to(BF16)
        given |= {"residual": _x(k=N), "residual_scale": scale}
    return Route(test_int8_linear.ours(backend), given, (GEMM, QUANTIZER))


def _half(m: int, start: str, **options: Any) -> Route:
    """The eager backend's linear as a GPU of sm_70 has it."""
    function, breaker = volta()
    given = {"x": _x(m, dtype=F16), **_layer(dtype=F16), "out_dtype": F16, **options}
    return Route(function, given, (start,), breaker)


FOLLOW: dict[str, Callable[[], Route]] = {
    "entry": _entry,
    "entry with a residual": _residual_entry,
    "CUDA quantizer": partial(_quantizer, "cuda"),
    "CUDA rotating quantizer": _rotating_quantizer,
    "eager quantizer": partial(_quantizer, "eager"),
    "Triton quantizer": partial(_quantizer, "triton"),
    **{
        f"{backend} linear, {form}": partial(_linear, backend, form)
        for backend in ("eager", "triton")
        for form in ("plain", "rotated", "gelu", "swiglu", "residual")
    },
    "FP16": partial(_half, M, "_dequantize_kernel"),
    "FP16, rotated": partial(_half, M, "_dequantize_kernel", convrot=True),
    "FP16, a few rows": partial(_half, 4, "_gemv_kernel"),
}


@pytest.mark.parametrize("name", FOLLOW)
def test_on_cuda_1_while_cuda_0_is_current_the_result_is_that_of_cuda_0(
    name: str, record: Record
) -> None:
    route = FOLLOW[name]()
    expected = back(route.ready(0)())
    call = route.ready(1)
    before = allocations(0)
    results: list[Any] = []
    seen = launched(lambda: results.extend(call() for _ in range(CALLS)))
    assert torch.cuda.current_device() == 0
    assert allocations(0) == before
    assert set(seen) == {1}
    ours = {start: kernels(seen[1], start) for start in route.starts}
    assert all(ours.values()), seen
    assert all(same(result, expected) for result in results)
    with torch.cuda.device(1):
        assert same(call(), expected)
        assert torch.cuda.current_device() == 1
    assert route.breaker is None or route.breaker.snapshot() == ()
    record.add("other_device", route=name, equal=True, kernels=sorted(set().union(*ours.values())))


def _cuda_linear(form: str) -> Route:
    from comfy_kitchen.backends import cuda

    given = _linear("eager", form).given
    if form.endswith(("row", "rows")):
        given["x"] = given["x"][: int(form.split()[0])].clone()
    if form == "no bias":
        given["bias"] = None
    # The module's function as it is at each call.
    return Route(lambda **given: cuda.int8_linear(**given), given, _STARTS[form])


_STARTS: dict[str, tuple[str, ...]] = {
    "plain": (GEMM, QUANTIZER),
    "no bias": (GEMM, QUANTIZER),
    "rotated": (GEMM, QUANTIZER + "convrot"),
    "gelu": (GEMM, QUANTIZER),
    "swiglu": (GEMM, QUANTIZER),
    "residual": (GEMM, QUANTIZER),
    "1 row": (),
    "2 rows": (),
}


def _through_the_registry() -> Route:
    import comfy_kitchen

    return Route(comfy_kitchen.int8_linear, _linear("eager", "plain").given, (GEMM, QUANTIZER))


def _seeded_quantizer() -> Route:
    from comfy_kitchen.backends import cuda

    return Route(lambda x: cuda.quantize_int8_rowwise(x, stochastic_rounding=7), _x(), ())


def _export() -> Route:
    from comfy_kitchen.backends import cuda
    from torch.utils.dlpack import from_dlpack

    return Route(lambda x: from_dlpack(cuda._wrap_for_dlpack(x)), _x(), ())


REFUSED: dict[str, Callable[[], Route]] = {
    **{f"CUDA linear, {form}": partial(_cuda_linear, form) for form in _STARTS},
    "the registry": _through_the_registry,
    "CUDA quantizer with a seed": _seeded_quantizer,
    "export": _export,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stock_refuses_to_export_is_refused_and_works_once_the_device_is_current(
    name: str, record: Record
) -> None:
    route = REFUSED[name]()
    call = route.ready(1)
    ck_patch.disable()
    try:
        expected = back(route.ready(0)())
        with pytest.raises(BufferError, match=REFUSAL):
            call()
    finally:
        ck_patch.enable()
    with pytest.raises(BufferError, match=REFUSAL):
        call()
    assert torch.cuda.current_device() == 0
    results: list[Any] = []
    with torch.cuda.device(1):
        seen = launched(lambda: results.extend(call() for _ in range(CALLS)))
        assert torch.cuda.current_device() == 1
    assert set(seen) <= {1}
    ours = {start: kernels(seen[1], start) for start in route.starts}
    assert all(ours.values()), seen
    assert all(same(result, expected) for result in results)
    with pytest.raises(BufferError, match=REFUSAL):
        call()
    record.add("other_device", route=name, equal=True, refused_where_not_current=True)


def test_a_raw_stream_of_cuda_1_is_the_one_used_while_cuda_0_is_current() -> None:
    from torch.utils.dlpack import to_dlpack

    function = entry()
    side = torch.cuda.Stream(1)
    for _ in range(CALLS):
        call: Call = random_call(512, N, K, BF16, stock_bias_dtype(BF16))
        expected = call.run(function)[1]
        there = on(1, call)
        late = on(1, call.a)
        there.a.zero_()
        d = torch.full_like(expected, torch.nan, device=there.a.device)
        synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # Whoever does not wait for this stream reads zeros.
            there.a.copy_(late)
        assert torch.cuda.current_device() == 0
        tensors = (there.a, there.b, there.xs, there.ws, there.bias, d)
        assert function(*map(to_dlpack, tensors), 2, side.cuda_stream)
        side.synchronize()
        assert same(d, expected)


@pytest.mark.parametrize("name", ["eager quantizer", "eager linear, plain", "triton linear, plain"])
def test_the_current_stream_of_cuda_1_is_used_while_cuda_0_is_current(name: str) -> None:
    route = FOLLOW[name]()
    expected = back(route.ready(0)())
    given = on(1, route.given)
    x = given["x"] if isinstance(given, dict) else given
    late = x.clone()
    side = torch.cuda.Stream(1)
    for _ in range(CALLS):
        x.zero_()
        synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.copy_(late)
            with torch.cuda.device(0):  # Leaves cuda:1 its current stream.
                found = route.function(**given) if isinstance(given, dict) else route.function(x)
        side.synchronize()
        assert same(found, expected)
