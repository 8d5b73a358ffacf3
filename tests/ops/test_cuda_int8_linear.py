"""The whole linear on the CPU: a stand-in for the host's quantizers, the kernel interpreted."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ck_patch import log
from ck_patch.breaker import Breaker
from ck_patch.context import Op, op_of
from ck_patch.ops import eager_host, watched
from tests.ops.memory import at

pytestmark = pytest.mark.interpreter

HOST = "host_of_cuda_int8_linear"
Form = dict[str, Any]


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-30)
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> torch.Tensor:
    """What stock returns for the same quantized rows, exactly, in float32."""
    q, x_scale = quantize(x.reshape(-1, x.shape[-1]))
    out = (q.long() @ weight.long().t()).float() * x_scale
    out = out.double() * scale.reshape(-1).double()
    return (out if bias is None else out + bias.double()).float().reshape(*x.shape[:-1], -1)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that looks like the CUDA backend; `rotated` and `stock` have the calls."""
    module: Any = ModuleType(HOST)
    module.stock, module.rotated = [], []

    def rotate(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        module.rotated.append(group)
        return quantize(x)

    def width(act: str) -> int:
        return 2 if act == "swiglu" else 1

    def int8_linear(
        x: Any,
        weight: Any,
        weight_scale: Any,
        bias: Any = None,
        out_dtype: Any = None,
        residual: Any = None,
        **more: Any,
    ) -> str:
        named = {"x": x, "weight": weight, "weight_scale": weight_scale, "residual": residual}
        module.stock.append({**named, "bias": bias, "out_dtype": out_dtype, **more})
        return "stock"

    # As the host has it.
    stated = inspect.signature(int8_linear)
    more = ("convrot", "convrot_groupsize", "input_act", "input_act_weight", "input_act_eps")
    others = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in (*more, "residual_scale")
    ]
    named = [*list(stated.parameters.values())[:-1], *others]
    int8_linear.__signature__ = stated.replace(parameters=named)  # type: ignore[attr-defined]

    int8_linear.__module__ = HOST
    module.int8_linear = int8_linear
    module._C = SimpleNamespace(
        cutlass_int8_dequant=lambda *_: True, cutlass_int8_dequant_residual=lambda *_: True
    )
    module._DISABLE_CUTLASS_INT8 = False
    module._CONVROT_FUSED_MAX_K = 512
    module._convrot_fused_shared_memory_fits = lambda x, k, group: True
    module._empty_cuda_tensor = lambda device, dtype: torch.empty(0, dtype=dtype)
    module._input_act_width = width
    module._gemm_vector_arg = lambda vector, device, dtype: vector.to(dtype)
    module.quantize_int8_rowwise = quantize
    module.quantize_int8_rowwise_convrot64 = rotate
    monkeypatch.setitem(sys.modules, HOST, module)
    return module


def make_op(host: Any, breaker: Breaker, **settings: Any) -> Any:
    from ck_patch.context import OpContext
    from ck_patch.ops.cuda_int8_linear import build
    from ck_patch.releases import RELEASES
    from ck_patch.settings import Settings

    context = OpContext(Settings(**settings), breaker, RELEASES[-1], check_first=False)
    op = build(host.int8_linear, context)
    on_cpu(op)
    return op


def on_cpu(op: Any) -> None:
    """Have the op take CPU tensors for those of the current device."""
    op._linear._device_type = "cpu"
    op._linear._current_device = lambda: -1
    op._linear._current_stream = lambda device: 7


@pytest.fixture
def op(host: Any, breaker: Breaker) -> Any:
    return make_op(host, breaker)


def form(x: torch.Tensor | None = None, **changes: Any) -> Form:
    k = 64
    given = {
        "x": torch.randn(5, k) if x is None else x,
        "weight": torch.randint(-127, 128, (24, k), dtype=torch.int8),
        "weight_scale": torch.rand(24) * 0.01,
        "bias": torch.randn(24),
        "out_dtype": torch.float32,
        "convrot": False,
        "convrot_groupsize": 256,
        "input_act": None,
        "input_act_weight": None,
        "input_act_eps": 0.0,
        "residual": None,
        "residual_scale": None,
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    "make",
    [
        form,
        lambda: form(torch.randn(3, 7, 64)),
        lambda: form(torch.randn(1, 2, 3, 64)),
        lambda: form(torch.randn(64, 9).t()),
        lambda: form(torch.randn(6, 96)[:, 16:80]),
        lambda: form(bias=None),
        lambda: form(bias=torch.nn.Parameter(torch.randn(24))),
        lambda: form(weight_scale=torch.tensor(0.01)),
        lambda: form(weight_scale=torch.tensor([0.01])),
        lambda: form(weight_scale=torch.rand(24, 1)),
        lambda: form(input_act="none"),
        lambda: form(out_dtype=None),
    ],
)
def test_a_plain_linear_is_computed_without_stock(
    op: Any, host: Any, make: Callable[[], Form]
) -> None:
    given = make()
    out = op.function(**given)
    exact = linear(given["x"], given["weight"], given["weight_scale"], given["bias"])
    assert host.stock == []
    assert out.shape == exact.shape
    assert out.is_contiguous()
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-4)
    assert not out.requires_grad


class Ours(Op):
    """Stands in for the op behind a quantizer's slot, and for the GEMM once it is proven; `seen`
    has how each call came, `errors` what a launch raises."""

    def __init__(self, host: Any, op: Any, rotates: bool) -> None:
        self.name = "quantize_int8_rowwise" + ("_convrot64" if rotates else "")
        self.rotates = rotates
        self.seen: list[str] = []
        self.errors: dict[str, BaseException] = {}
        self.quantizer_is_proven = self.gemm_is_proven = True

        def function(x: torch.Tensor, *group: int) -> tuple[torch.Tensor, torch.Tensor]:
            assert group == ((256,) if rotates else ())
            self.seen.append("function")
            return quantize(x)

        super().__init__(function)
        setattr(host, self.name, function)
        self.op = op
        op._linear.gemm.direct = self.direct
        op._linear.gemm.failed = lambda error, plan: self.seen.append(f"GEMM failed: {error}")

    def launch(self, device: int, dtype: torch.dtype, m: int, k: int) -> Any:
        assert device == -1

        def launch(addresses: tuple[int, int, int], stream: int) -> None:
            self.launched("quantizer", addresses, stream)
            x = at(addresses[0], (m, k), dtype)
            for address, value in zip(addresses[1:], quantize(x), strict=True):
                at(address, value.shape, value.dtype).copy_(value)

        return launch if self.quantizer_is_proven else None

    def failed(self, error: Exception, device: int) -> None:
        assert device == -1
        self.seen.append(f"quantizer failed: {error}")

    def direct(self, plan: Any) -> Any:
        _, m, n, k, dtype, bias_dtype, _ = plan.key

        def launch(addresses: tuple[int, ...], stream: int) -> None:
            self.launched("GEMM", addresses, stream)
            q, weight, x_scale, scale, bias, d = addresses
            out = at(q, (m, k), torch.int8).long() @ at(weight, (n, k), torch.int8).long().t()
            out = out.float() * at(x_scale, (m, 1), torch.float32)
            exact = out.double() * at(scale, (n,), torch.float32).double()
            if bias_dtype is not None:
                exact += at(bias, (n,), bias_dtype).double()
            at(d, (m, n), dtype).copy_(exact)

        return launch if self.gemm_is_proven else None

    def launched(self, what: str, addresses: tuple[int, ...], stream: int) -> None:
        assert stream == 7
        assert all(address % 16 == 0 for address in addresses)
        self.seen.append(what)
        if what in self.errors:
            raise self.errors[what]

    def compute(self, x: torch.Tensor, **changes: Any) -> Any:
        """What the linear returned, compared with the exact result unless it is stock's."""
        weight = torch.randint(-127, 128, (24, x.shape[-1]), dtype=torch.int8)
        given = form(x, weight=weight, convrot=self.rotates, **changes)
        out = self.op.function(**given)
        if isinstance(out, torch.Tensor):
            exact = linear(x, weight, given["weight_scale"].expand(24), given["bias"])
            assert out.shape == exact.shape
            assert out.is_contiguous()
            torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-4)
        return out


@pytest.fixture(params=[False, True], ids=["plain", "rotating"])
def ours(request: pytest.FixtureRequest, host: Any, op: Any) -> Ours:
    return Ours(host, op, request.param)


BOTH = ["quantizer", "GEMM"]


def test_where_both_kernels_are_proven_they_are_launched_from_here(ours: Ours, host: Any) -> None:
    for x in (
        torch.randn(5, 256),
        torch.randn(3, 2, 512).half(),
        torch.randn(256, 6).t(),
        torch.randn(2, 3, 512)[..., :256],
    ):
        ours.compute(x)
        ours.compute(x, bias=None)
        ours.compute(x, weight_scale=torch.tensor(0.01))
    assert ours.seen == BOTH * 12
    assert host.stock == []


@pytest.mark.parametrize("missing", ["quantizer_is_proven", "gemm_is_proven"])
def test_where_one_is_not_the_functions_are_called_that_prove_it(ours: Ours, missing: str) -> None:
    setattr(ours, missing, False)
    ours.compute(torch.randn(5, 256))
    assert ours.seen == ["function"]


def test_what_wraps_our_quantizer_is_called(ours: Ours, host: Any) -> None:
    calls = []

    @functools.wraps(ours.function)
    def foreign(*args: Any) -> Any:
        calls.append(args)
        return ours.function(*args)

    setattr(host, ours.name, foreign)
    ours.compute(torch.randn(5, 256))
    assert (len(calls), ours.seen) == (1, ["function"])


def test_an_activation_not_on_16_bytes_is_the_quantizers_to_judge(ours: Ours) -> None:
    ours.compute(torch.randn(5 * 256 + 1)[1:].view(5, 256))
    assert ours.seen == ["function"]


def test_a_launch_that_fails_is_accounted_for_and_the_functions_are_called(ours: Ours) -> None:
    ours.errors["quantizer"] = RuntimeError("planted")
    ours.compute(torch.randn(5, 256))
    assert ours.seen == ["quantizer", "quantizer failed: planted", "function"]
    ours.seen.clear()
    ours.errors = {"GEMM": RuntimeError("planted")}
    ours.compute(torch.randn(5, 256))
    assert ours.seen == [*BOTH, "GEMM failed: planted", "function"]
    for what in BOTH:
        ours.errors = {what: KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            ours.compute(torch.randn(5, 256))


@pytest.fixture
def eager_calls(monkeypatch: pytest.MonkeyPatch) -> list[Form]:
    """What an eager backend is called with that says it is ours."""
    calls: list[Form] = []

    def int8_linear(**kwargs: Any) -> str:
        calls.append(kwargs)
        return "eager"

    Op(int8_linear)
    module = SimpleNamespace(int8_linear=int8_linear)
    monkeypatch.setitem(sys.modules, "comfy_kitchen.backends.eager", module)
    return calls


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("int8", ["auto", "fp16"])
def test_where_stock_has_no_kernels_the_eager_backend_gets_each_call_by_name(
    host: Any, breaker: Breaker, eager_calls: list[Form], int8: str, dtype: torch.dtype | None
) -> None:
    op = make_op(host, breaker, assume=((None, (7, 0)),), int8=int8)
    names = ("x", "weight", "weight_scale", "bias", "out_dtype")
    given = {name: form(out_dtype=dtype)[name] for name in names}
    plain = [*given.values()]
    assert op.function(*plain) == "eager"
    assert op.function(**dict(zip(names[:3], plain[:3], strict=True))) == "eager"
    first, second = eager_calls
    assert first["x"] is second["x"] is plain[0]
    assert first["out_dtype"] == (dtype or torch.float32)
    assert second["out_dtype"] == torch.float32
    with pytest.raises(TypeError):
        op.function(plain[0])
    assert host.stock == []


def _stock(module: Any) -> None:
    module.int8_linear = lambda **kwargs: "stock's eager"


def _deactivated(module: Any) -> None:
    op = op_of(module.int8_linear)
    assert op is not None
    op.deactivate()


def _wrapped(module: Any) -> None:
    ours = module.int8_linear
    module.int8_linear = functools.wraps(ours)(lambda **kwargs: ours(**kwargs))
    assert vars(module.int8_linear).items() > vars(ours).items()


@pytest.mark.parametrize("change", [_stock, _deactivated, _wrapped])
def test_fp16_is_had_from_an_eager_backend_of_ours_and_else_stocks_kernels_run(
    host: Any, breaker: Breaker, eager_calls: list[Form], change: Callable[[Any], None]
) -> None:
    op = make_op(host, breaker, assume=((None, (9, 0)),), int8="fp16")
    assert op.function(**form()) == "eager"
    assert eager_host.linear_is_ours()
    change(eager_host.module())
    assert not eager_host.linear_is_ours()
    assert op.function(**form()) == "stock"
    assert (len(eager_calls), len(host.stock)) == (1, 1)


def test_the_path_of_a_call_that_is_handed_over_is_logged_once(
    host: Any, breaker: Breaker, eager_calls: list[Form], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ck_patch")
    log.configure("path")
    op = make_op(host, breaker, assume=((None, (7, 0)),))
    for rows in (5, 5, 6):
        op.function(**form(torch.randn(rows, 64)))
    said = [message for message in caplog.messages if message.startswith("cuda_int8_linear")]
    assert said == [
        f"cuda_int8_linear, x {rows}x64: the eager backend (the CUDA backend has no kernels for "
        "sm_70)"
        for rows in (5, 6)
    ]


def test_a_rotation_that_stock_does_in_one_kernel_is_stocks_kernel(op: Any, host: Any) -> None:
    weight = torch.randint(-127, 128, (24, 512), dtype=torch.int8)
    given = form(torch.randn(5, 512), weight=weight, convrot=True)
    out = op.function(**given)
    assert host.rotated == [256]
    exact = linear(given["x"], weight, given["weight_scale"], given["bias"])
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.randn(2, 64)},
        {"x": torch.randn(64)},
        {"x": torch.empty(0, 64)},
        {"x": torch.randn(5, 64, requires_grad=True)},
        {"x": torch.randn(5, 48)},
        {"x": torch.randn(5, 64).double()},
        {"x": torch.randn(5, 64, device="meta")},
        {"x": torch._neg_view(torch.randn(5, 64))},
        {"x": 7},
        {"weight": torch.zeros(24, 64)},
        {"weight": torch.zeros(24, 128, dtype=torch.int8)[:, ::2]},
        {"weight": torch._neg_view(torch.ones(24, 64, dtype=torch.int8))},
        {"weight": None},
        {"weight_scale": torch.ones(24, dtype=torch.bfloat16)},
        {"weight_scale": torch.ones(23)},
        {"weight_scale": torch._neg_view(torch.ones(24))},
        {"weight_scale": 0.5},
        {"bias": torch.ones(24).half()},
        {"bias": torch.ones(1)},
        {"bias": torch._neg_view(torch.ones(24))},
        {"bias": 0.0},
        {"out_dtype": torch.float64},
        {"convrot": True},
        {"input_act": "swiglu"},
        {"residual": torch.ones(5, 24)},
        {"unheard_of": 1},
    ],
    ids=lambda changes: f"{next(iter(changes))}",
)
def test_everything_else_is_stocks_whole_and_untouched(
    op: Any, host: Any, changes: Form, breaker: Breaker
) -> None:
    given = form(**changes)
    assert op.function(**given) == "stock"
    (seen,) = host.stock
    assert seen.keys() == given.keys()
    assert all(seen[name] is value for name, value in given.items())
    assert breaker.snapshot() == ()


def test_the_hosts_own_switch_against_cutlass_is_obeyed(op: Any, host: Any) -> None:
    host._DISABLE_CUTLASS_INT8 = True
    assert op.function(**form()) == "stock"


def test_a_quantizer_that_fails_is_stocks_to_report_and_one_line_says_so(
    op: Any, host: Any, caplog: pytest.LogCaptureFixture, breaker: Breaker
) -> None:
    caplog.set_level(logging.INFO, "ck_patch")

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    host.quantize_int8_rowwise = broken
    for _ in range(3):
        assert op.function(**form()) == "stock"
    assert len(host.stock) == 3
    assert breaker.snapshot() == ()
    assert [record.getMessage() for record in caplog.records] == [
        "cuda_int8_linear: RuntimeError, such calls go to stock (planted)"
    ]


def test_a_kernel_that_fails_gives_stocks_result_and_stays_out(
    op: Any, host: Any, monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    from ck_patch.kernels.int8_gemm import PointerGemm

    def broken(*_: object) -> None:
        raise OSError("planted")

    monkeypatch.setattr(PointerGemm, "run", broken)
    for _ in range(3):
        assert op.function(**form()) == "stock"
    (opened,) = breaker.snapshot()
    assert (opened.operation, "planted" in opened.reason) == ("cuda_int8_linear", True)


def test_an_unaligned_weight_is_not_quantized_for(op: Any, host: Any) -> None:
    host.quantize_int8_rowwise = None
    weight = torch.zeros(24 * 64 + 8, dtype=torch.int8)[8:].view(24, 64)
    assert op.function(**form(weight=weight)) == "stock"


def test_an_entry_that_another_patcher_replaced_is_not_bypassed(op: Any, host: Any) -> None:
    from ck_patch.context import OpContext, Refused
    from ck_patch.ops.cuda_int8_linear import build
    from ck_patch.releases import RELEASES
    from ck_patch.settings import Settings

    stock = host._C.cutlass_int8_dequant

    def foreign(*args: Any) -> Any:
        return stock(*args)

    foreign.__wrapped__ = stock  # type: ignore[attr-defined]
    host._C.cutlass_int8_dequant = foreign
    assert op.function(**form()) == "stock"
    context = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=False)
    with pytest.raises(Refused, match="another patcher"):
        build(host.int8_linear, context)
    host._C.cutlass_int8_dequant = stock
    newer = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=True)
    with pytest.raises(Refused, match="newer"):
        build(host.int8_linear, newer)


def test_a_dead_context_and_an_interrupt_are_the_callers(op: Any, host: Any) -> None:
    for error in (
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyboardInterrupt(),
    ):

        def broken(*_: object, error: BaseException = error) -> None:
            raise error

        host.quantize_int8_rowwise = broken
        with pytest.raises(type(error)):
            op.function(**form())
    assert host.stock == []


def test_a_deactivated_op_passes_everything_to_stock(op: Any, host: Any) -> None:
    op.deactivate()
    assert op.function(**form()) == "stock"


def test_dynamo_traces_stock_instead(op: Any, host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_is_compiling", lambda: True)
    assert op.function(**form()) == "stock"
