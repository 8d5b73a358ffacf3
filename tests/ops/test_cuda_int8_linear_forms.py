"""Every form of call of the CUDA linear against the host's own function, run on a stand-in for its
extension: the same bits, by our GEMM, from rows that went through the same steps."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from ck_patch.breaker import Breaker
from ck_patch.context import Op, OpContext
from ck_patch.releases import release_for
from ck_patch.settings import Settings
from tests import reference
from tests.ops.memory import at
from tests.ops.slot import DTYPES

pytestmark = pytest.mark.interpreter

Form = dict[str, Any]
M, N, K = 6, 24, 512
ACTS = ("gelu_tanh", "swiglu", "situ", "rms_norm")
# Rows that are wider than this are rotated in two steps here.
MAX_K = 768


class Extension:
    """Stands in for `_C`, on CPU tensors; `called` has the entries and what they were told."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._names = {host._input_act_code(act): act for act in (None, *_known_acts(host))}
        self.called: list[tuple[Any, ...]] = []
        for entry in ("cutlass_int8_dequant", "cutlass_int8_dequant_residual"):
            setattr(self, entry, getattr(self, entry))  # The same object each time.

    def quantize_int8_rowwise(self, x: Any, q: Any, scale: Any, *rest: Any) -> None:
        self.called.append(("rows", *rest))
        _quantize(x.float(), q, scale)

    def quantize_int8_rowwise_convrot(
        self, x: Any, q: Any, scale: Any, group: int, *rest: Any
    ) -> None:
        self.called.append(("rotated rows", group, *rest))
        _quantize(self._rotated(x.float(), group), q, scale)

    def quantize_int8_rowwise_convrot64(
        self,
        x: Any,
        q: Any,
        scale: Any,
        group: int,
        stochastic: bool,
        act: int,
        seed: int,
        *more: Any,
    ) -> None:
        *operands, stream = more
        self.called.append(("activated and rotated rows", group, stochastic, act, seed, stream))
        name, values = self._names[act], x.float()
        if name is not None:
            # In float32 throughout, which no step of its own is.
            extra = (operands[0].float().view(-1), operands[1]) if name == "rms_norm" else ()
            values = self._host._apply_input_act(values, name, *extra)
        _quantize(self._rotated(values, group), q, scale)

    def cutlass_int8_dequant(
        self, a: Any, b: Any, xs: Any, ws: Any, bias: Any, d: Any, code: int, stream: int
    ) -> bool:
        self.called.append(("GEMM",))
        d.copy_(_gemm(a, b, xs, ws, bias, DTYPES[code]))
        return True

    def cutlass_int8_dequant_residual(
        self,
        a: Any,
        b: Any,
        xs: Any,
        ws: Any,
        bias: Any,
        scale: Any,
        residual: Any,
        d: Any,
        code: int,
        stream: int,
    ) -> bool:
        self.called.append(("GEMM with residual",))
        if scale.numel() != b.shape[0]:
            raise ValueError("so many values are not the entry's")
        assert scale.data_ptr() % 16 == residual.data_ptr() % 16 == 0
        more = {"residual": residual, "residual_scale": scale}
        d.copy_(_gemm(a, b, xs, ws, bias, DTYPES[code], **more))
        return True

    def _rotated(self, x: torch.Tensor, group: int) -> torch.Tensor:
        h = self._host._build_hadamard(group, device="cpu", dtype=torch.float32)
        rotated: torch.Tensor = self._host._rotate_activation(x, h, group)
        return rotated


def _known_acts(host: Any) -> Iterator[str]:
    for act in ACTS:
        try:
            host._input_act_code(act)
        except ValueError:
            continue
        yield act


def _quantize(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> None:
    scale.copy_((x.abs().amax(1, keepdim=True) / 127).clamp_min(1e-30))
    q.copy_((x / scale).round().clamp(-128, 127))


def _gemm(
    a: Any, b: Any, xs: Any, ws: Any, bias: Any, dtype: torch.dtype, **more: Any
) -> torch.Tensor:
    from tests.interpreter_facts import interpreter_rounding

    bias = bias if bias.numel() else None
    return reference.gemm(a, b, xs, ws, bias, dtype, interpreter_rounding(), **more)


class Side:
    """Ours and stock's function of the host, and what either of them asked of the extension."""

    def __init__(self, host: Any, breaker: Breaker) -> None:
        from ck_patch.ops.cuda_int8_linear import build
        from tests.ops.test_cuda_int8_linear import on_cpu

        self.host, self.extension = host, host._C
        self.stock: Callable[..., torch.Tensor] = host.int8_linear
        self.given_to_stock: list[Form] = []

        @functools.wraps(self.stock)
        def noted(**kwargs: Any) -> torch.Tensor:
            self.given_to_stock.append(kwargs)
            return self.stock(**kwargs)

        release = release_for(Version(metadata.version("comfy-kitchen")))
        assert release is not None
        self.release = release
        self.op: Any = build(noted, OpContext(Settings(), breaker, release, check_first=False))
        on_cpu(self.op)

    def needs(self, given: Form) -> None:
        """Skip the test if this release lacks one of these parameters, or the activation."""
        act = given.get("input_act")
        known = act not in ACTS or act in _known_acts(self.host)
        if not known or given.keys() - inspect.signature(self.stock).parameters.keys():
            pytest.skip("this release has no such form of call")

    def both(self, given: Form) -> tuple[Any, Any, list[Any], list[Any]]:
        """Stock's outcome and ours, and the calls of the extension that led to each."""
        outcomes: list[Any] = []
        calls: list[list[Any]] = []
        for function in (self.stock, self.op.function):
            self.extension.called.clear()
            try:
                outcomes.append(function(**given))
            except Exception as error:
                outcomes.append(error)
            calls.append([*self.extension.called])
        return outcomes[0], outcomes[1], calls[0], calls[1]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, breaker: Breaker) -> Side:
    host: Any = pytest.importorskip("comfy_kitchen.backends.cuda")
    monkeypatch.setattr(host, "_C", Extension(host))
    monkeypatch.setattr(host, "_wrap_for_dlpack", lambda tensor: tensor.detach())
    monkeypatch.setattr(host, "_CONVROT_FUSED_MAX_K", MAX_K)
    monkeypatch.setattr(host, "_cuda_device_supports_cutlass_int8_dequant", lambda x: True)
    monkeypatch.setattr(host, "_cuda_device_should_use_turing_kernels", lambda device: False)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return Side(host, breaker)


def form(*shape: int, **changes: Any) -> Form:
    """A call with x of that shape, of K columns if none is given."""
    dtype = changes.pop("dtype", torch.float16)
    x = torch.randn(*(shape or (M, K))).to(dtype)
    k = x.shape[-1] // (2 if changes.get("input_act") in ("swiglu", "situ") else 1)
    given = {
        "x": x,
        "weight": torch.randint(-127, 128, (N, k), dtype=torch.int8),
        "weight_scale": torch.rand(N) * 0.01 + 1e-3,
        "bias": torch.randn(N).to(changes.get("out_dtype", dtype)),
    }
    return {**given, **changes}


def residual(*shape: int, dtype: torch.dtype = torch.float16, **changes: Any) -> Form:
    """The operands of a residual of that shape, [M, N] if none is given."""
    values = torch.randn(*(shape or (M, N))).to(dtype) * 30
    return {"residual": values, "residual_scale": torch.randn(N).to(dtype), **changes}


def misaligned(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.randn(count + 1).half()[1:].view(shape)


BF16 = torch.bfloat16
RESIDUALS: dict[str, Callable[[], Form]] = {
    "float32": lambda: form(dtype=torch.float32, **residual(dtype=torch.float32)),
    "float16": lambda: form(**residual()),
    "bfloat16": lambda: form(dtype=BF16, **residual(dtype=BF16)),
    "output dtype": lambda: form(out_dtype=torch.float32, **residual(dtype=torch.float32)),
    "no bias": lambda: form(bias=None, **residual()),
    "rotated": lambda: form(convrot=True, **residual()),
    "rotated in two steps": lambda: form(convrot=True, convrot_groupsize=64, **residual()),
    "3-D": lambda: form(2, 3, K, **residual(2, 3, N)),
    "4-D": lambda: form(1, 2, 3, K, **residual(1, 2, 3, N)),
    "2-D beside 3-D": lambda: form(2, 3, K, **residual(6, N)),
    "1-D": lambda: form(**residual(M * N)),
    "strided": lambda: form(**residual(residual=torch.randn(N, M).half().t())),
    "strided, starting unaligned": lambda: form(
        **residual(residual=misaligned(M, N + 8)[:, 3 : N + 3])
    ),
    "one row expanded": lambda: form(**residual(residual=torch.randn(1, N).half().expand(M, N))),
    "scale as a row": lambda: form(**residual(residual_scale=torch.randn(1, N).half())),
    "scale expanded": lambda: form(**residual(residual_scale=torch.randn(1).half().expand(N))),
    "scale unaligned": lambda: form(**residual(residual_scale=misaligned(N))),
    "parameters": lambda: form(
        residual=torch.nn.Parameter(torch.randn(M, N).half()),
        residual_scale=torch.nn.Parameter(torch.randn(N).half()),
    ),
    "of zero": lambda: form(**residual(residual_scale=torch.zeros(N).half())),
}
AFTERWARDS: dict[str, Callable[[], Form]] = {
    "unaligned": lambda: form(**residual(residual=misaligned(M, N))),
    "unaligned 3-D": lambda: form(2, 3, K, **residual(residual=misaligned(2, 3, N))),
    "scale in float32": lambda: form(**residual(residual_scale=torch.randn(N))),
    "residual in float32": lambda: form(**residual(residual=torch.randn(M, N))),
    "both in float32, rotated": lambda: form(convrot=True, **residual(dtype=torch.float32)),
    "bfloat16 beside float32": lambda: form(
        dtype=BF16, out_dtype=BF16, **residual(dtype=BF16, residual_scale=torch.randn(N))
    ),
    "strided": lambda: form(**residual(residual=torch.randn(N, M).t())),
    "strided 3-D": lambda: form(
        2, 3, K, **residual(residual=torch.randn(N, 3, 2).permute(2, 1, 0))
    ),
    "scale of one float32 value": lambda: form(**residual(residual_scale=torch.randn(1))),
    "scale as a float32 scalar": lambda: form(**residual(residual_scale=torch.tensor(2.0))),
    "scale of three dimensions in float32": lambda: form(
        **residual(residual_scale=torch.randn(1, 1, N))
    ),
    "scale for each row in float32": lambda: form(**residual(residual_scale=torch.randn(M, 1))),
    "requiring a gradient": lambda: form(
        residual=torch.randn(M, N, requires_grad=True), residual_scale=torch.randn(N)
    ),
}


def activated(act: str, width: int = K, **changes: Any) -> Form:
    columns = width * (2 if act in ("swiglu", "situ") else 1)
    if act == "rms_norm":
        changes = {"input_act_weight": torch.rand(width) + 0.5, "input_act_eps": 0.25, **changes}
    return form(M, columns, input_act=act, **changes)


ROTATIONS: dict[str, Form] = {
    "plain": {},
    "rotated": {"convrot": True},
    "group 64": {"convrot": True, "convrot_groupsize": 64},
    "group 16": {"convrot": True, "convrot_groupsize": 16},
    "wide": {"convrot": True, "width": MAX_K + 256},
    "wide, plain": {"width": MAX_K + 256},
    "K no multiple of 256": {"convrot": True, "width": 320, "convrot_groupsize": 64},
}
ACTIVATED: dict[str, Callable[[], Form]] = {
    f"{act} {name}": lambda act=act, more=more: activated(act, dtype=BF16, **more)
    for act in ACTS
    for name, more in ROTATIONS.items()
} | {
    "swiglu of a strided 3-D x": lambda: {
        **activated("swiglu"),
        "x": torch.randn(3, 2, 2 * K + 8)[..., 8:].half(),
    },
    "rms_norm with a weight that requires a gradient": lambda: activated(
        "rms_norm", input_act_weight=torch.nn.Parameter(torch.rand(K))
    ),
    "rms_norm by a weight that starts unaligned, rotated": lambda: activated(
        "rms_norm", dtype=BF16, convrot=True, input_act_weight=torch.rand(K + 1).to(BF16)[1:]
    ),
    "rms_norm by a strided weight and an integer for eps, rotated": lambda: activated(
        "rms_norm", convrot=True, input_act_weight=torch.rand(2 * K)[::2], input_act_eps=1
    ),
    "rms_norm by a weight that starts unaligned": lambda: activated(
        "rms_norm", dtype=BF16, input_act_weight=torch.rand(K + 1).to(BF16)[1:]
    ),
    "an ignored weight": lambda: activated("gelu_tanh", input_act_weight=torch.rand(K)),
    "swiglu, rotated, with a residual": lambda: activated("swiglu", convrot=True, **residual()),
    "situ with a residual": lambda: activated("situ", **residual()),
}
ROTATED: dict[str, Callable[[], Form]] = {
    f"{name} {dtype}": lambda more=more, dtype=dtype: activated("none", dtype=dtype, **more)
    for name, more in ROTATIONS.items()
    for dtype in (torch.float32, BF16)
} | {
    "an odd group is as good as none without a rotation": lambda: form(convrot_groupsize=7),
    "strided 3-D": lambda: {
        **form(convrot=True, convrot_groupsize=16),
        "x": torch.randn(2, 3, K + 8)[..., 8:].half(),
    },
}


def assert_same(side: Side, given: Form, gemm: str) -> None:
    """Ours gives stock's bits without stock, from rows that the extension was asked for alike."""
    side.needs(given)
    theirs, ours, their_calls, our_calls = side.both(given)
    assert side.given_to_stock == []
    assert their_calls == [*our_calls, (gemm,)]
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert ours.is_contiguous() == theirs.is_contiguous()
    assert ours.requires_grad == theirs.requires_grad
    ours, theirs = ours.detach(), theirs.detach()
    assert theirs.isfinite().all()
    differing = reference.bits(ours) != reference.bits(theirs)
    assert not differing.any(), (ours[differing], theirs[differing])


@pytest.mark.parametrize("make", RESIDUALS.values(), ids=RESIDUALS.keys())
def test_a_residual_enters_the_epilogue_where_stock_has_it_there(
    side: Side, make: Callable[[], Form]
) -> None:
    assert_same(side, make(), "GEMM with residual")


@pytest.mark.parametrize("make", AFTERWARDS.values(), ids=AFTERWARDS.keys())
def test_a_residual_that_stock_adds_afterwards_is_added_afterwards(
    side: Side, make: Callable[[], Form]
) -> None:
    assert_same(side, make(), "GEMM")


@pytest.mark.parametrize("make", ACTIVATED.values(), ids=ACTIVATED.keys())
def test_an_activation_is_folded_into_the_quantizer_where_stock_does_so(
    side: Side, make: Callable[[], Form]
) -> None:
    given = make()
    assert_same(side, given, "GEMM with residual" if "residual" in given else "GEMM")


@pytest.mark.parametrize("make", ROTATED.values(), ids=ROTATED.keys())
def test_a_rotation_takes_as_many_steps_as_stocks(side: Side, make: Callable[[], Form]) -> None:
    assert_same(side, make(), "GEMM")


def test_what_the_host_says_of_its_kernels_decides(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = activated("gelu_tanh", convrot=True)
    assert_same(side, given, "GEMM")
    assert side.extension.called[0][0] == "activated and rotated rows"
    monkeypatch.setattr(side.host, "_convrot_fused_shared_memory_fits", lambda *_: False)
    assert_same(side, form(M + 1, K, convrot=True), "GEMM")
    assert side.extension.called[0][0] == "rows"
    monkeypatch.setattr(side.host, "_should_use_convrot_fused_kernel", lambda *_: True)
    assert_same(side, form(M + 1, K, convrot=True), "GEMM")
    assert side.extension.called[0][0] == "rotated rows"


class Launches:
    """Stands in for our quantizers and our GEMM once all are proven: each is launched by addresses,
    and `seen` has what was."""

    def __init__(self, side: Side, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._host, self._extension = side.host, side.extension
        for name, launch in (
            ("quantize_int8_rowwise", self._plain),
            ("quantize_int8_rowwise_convrot64", self._rotating),
        ):
            function: Any = functools.partial(getattr(side.host, name))
            op: Any = Op(function)
            op.launch = launch
            patch.setattr(side.host, name, function)
        patch.setattr(side.op._linear.gemm, "direct", self._direct)

    def _plain(self, device: int, dtype: torch.dtype, m: int, k: int) -> Any:
        return functools.partial(self._quantize, dtype, m, k, None, None)

    def _rotating(
        self, device: int, dtype: torch.dtype, m: int, k: int, input_act: str | None = None
    ) -> Any:
        return functools.partial(self._quantize, dtype, m, k, 256, input_act)

    def _quantize(
        self, dtype: Any, m: int, k: int, group: Any, act: Any, addresses: Any, stream: int
    ) -> None:
        self.seen.append("quantizer")
        start, q, scale, *norm = addresses
        x = at(start, (m, k * self._host._input_act_width(act)), dtype)
        outputs = at(q, (m, k), torch.int8), at(scale, (m, 1), torch.float32)
        if group is None:
            self._extension.quantize_int8_rowwise(x, *outputs, False, 0, stream)
        else:
            code = self._host._input_act_code(act)
            if act == "rms_norm":
                assert norm[0] % 16 == 0
                norm[0] = at(norm[0], (k,), dtype)
            options = (group, False, code, 0, *norm, stream)
            self._extension.quantize_int8_rowwise_convrot64(x, *outputs, *options)

    def _direct(self, plan: Any) -> Any:
        return functools.partial(self._multiply, plan.key)

    def _multiply(self, key: Any, addresses: Any, stream: int) -> None:
        assert all(address % 16 == 0 for address in addresses)
        self.seen.append("GEMM")
        _, m, n, k, dtype, bias_dtype, adds = key
        q, weight, x_scale, scale, bias, d, *more = addresses
        assert len(more) == (2 if adds else 0)
        values = torch.empty(0) if bias_dtype is None else at(bias, (n,), bias_dtype)
        shapes = {"residual": (m, n), "residual_scale": (n,)}
        added = {
            name: at(address, shape, dtype)
            for (name, shape), address in zip(shapes.items(), more, strict=False)
        }
        operands = at(q, (m, k), torch.int8), at(weight, (n, k), torch.int8)
        scales = at(x_scale, (m,), torch.float32), at(scale, (n,), torch.float32)
        at(d, (m, n), dtype).copy_(_gemm(*operands, *scales, values, dtype, **added))


LAUNCHED = [
    *(RESIDUALS[name] for name in ("float32", "no bias", "rotated", "3-D", "strided")),
    *(RESIDUALS[name] for name in ("scale as a row", "scale unaligned", "parameters")),
    *(AFTERWARDS[name] for name in ("unaligned 3-D", "both in float32, rotated")),
    *(ACTIVATED[f"{act} plain"] for act in ACTS),
    *(ACTIVATED[f"{act} rotated"] for act in ACTS),
    *(ACTIVATED[name] for name in ACTIVATED if "weight" in name),
    ACTIVATED["swiglu, rotated, with a residual"],
    ACTIVATED["swiglu of a strided 3-D x"],
]


@pytest.mark.parametrize("make", LAUNCHED)
def test_where_both_kernels_are_proven_they_are_launched_by_addresses(
    side: Side, make: Callable[[], Form], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make()
    side.needs(given)
    expected = side.stock(**given)
    launches = Launches(side, monkeypatch)
    out = side.op.function(**given)
    assert launches.seen == ["quantizer", "GEMM"]
    assert side.given_to_stock == []
    assert out.shape == expected.shape
    assert torch.equal(reference.bits(out), reference.bits(expected))


@pytest.mark.parametrize("act", ["none", *ACTS])
def test_our_rotating_quantizer_takes_the_call_as_it_is_made(
    side: Side, act: str, monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    from ck_patch.ops import quantize_rotated_rows

    given = activated(act, convrot=True, dtype=torch.float32)
    side.needs(given)
    expected = side.stock(**given)
    stock = side.host.quantize_int8_rowwise_convrot64
    quantizer = quantize_rotated_rows.build(
        stock, OpContext(Settings(), breaker, side.release, check_first=False)
    )
    monkeypatch.setattr(side.host, "quantize_int8_rowwise_convrot64", quantizer.function)
    side.extension.called.clear()
    out = side.op.function(**given)
    assert (side.extension.called, side.given_to_stock) == ([], [])
    # Its kernels have the GPU's functions, which the interpreter stands in for.
    torch.testing.assert_close(out, expected, rtol=0.01, atol=0.5)


def test_a_rotation_in_two_steps_is_no_launch_by_addresses(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = form(convrot=True, convrot_groupsize=64)
    expected = side.stock(**given)
    launches = Launches(side, monkeypatch)
    assert torch.equal(side.op.function(**given), expected)
    assert launches.seen == []
    assert side.given_to_stock == []


def test_no_operand_is_ignored(side: Side) -> None:
    """What would go unseen where ours and stock forget the same."""
    norm, more = activated("rms_norm"), residual()
    side.needs({**norm, **more})
    plain = side.op.function(**norm)
    for name, value in (("input_act_eps", 1.0), ("input_act_weight", torch.ones(K) * 3)):
        assert not torch.equal(side.op.function(**{**norm, name: value}), plain), name
    added = side.op.function(**norm, **more)
    assert not torch.equal(added, plain)
    for name, value in more.items():
        assert not torch.equal(side.op.function(**norm, **{**more, name: value + 1}), added), name
    assert not torch.equal(side.op.function(**{**norm, "input_act": "gelu_tanh"}), plain)
    assert side.given_to_stock == []


REFUSED: dict[str, Callable[[], Form]] = {
    "a residual without a scale": lambda: form(residual=torch.randn(M, N)),
    "a residual of one row": lambda: form(**residual(1, N)),
    "a residual of too few rows": lambda: form(**residual(M - 1, N)),
    "a scale that does not fit": lambda: form(**residual(residual_scale=torch.randn(N - 1))),
    "a fused scale of one value": lambda: form(**residual(residual_scale=torch.ones(1).half())),
    "an unknown activation": lambda: form(input_act="foo"),
    "an unknown activation, rotated": lambda: form(input_act="foo", convrot=True),
    "an activation that is no name": lambda: form(input_act=["gelu_tanh"]),
    "swiglu of too few columns": lambda: form(M, K, **_weight(K), input_act="swiglu"),
    "swiglu of one column too many": lambda: form(M, 2 * K + 1, **_weight(K), input_act="swiglu"),
    "no eps, rotated": lambda: activated("gelu_tanh", convrot=True, input_act_eps=None),
    "one scale of the weight in a matrix": lambda: form(weight_scale=torch.rand(1, 1)),
    "rms_norm without a weight": lambda: form(input_act="rms_norm"),
    "rms_norm with a short weight": lambda: activated("rms_norm", input_act_weight=torch.ones(3)),
    "a group that does not divide K": lambda: form(M, 320, convrot=True),
    "a group that is no power of four": lambda: form(convrot=True, convrot_groupsize=32),
    "a group of nothing": lambda: form(convrot=True, convrot_groupsize=0),
    "a group in floating point": lambda: form(convrot=True, convrot_groupsize=256.0),
    "no group": lambda: form(convrot=True, convrot_groupsize=None),
    "a parameter that there is not": lambda: form(unheard_of=1, **residual()),
}


def _weight(k: int) -> Form:
    return {"weight": torch.zeros(N, k, dtype=torch.int8)}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_stock_refuses_fails_as_with_stock(
    side: Side, make: Callable[[], Form], breaker: Breaker
) -> None:
    theirs, ours, _, _ = side.both(make())
    assert isinstance(theirs, Exception)
    assert type(ours) is type(theirs)
    assert str(ours) == str(theirs)
    assert breaker.snapshot() == ()


LEFT: dict[str, Callable[[], Form]] = {
    "negated residual": lambda: form(
        **residual(residual=torch._neg_view(torch.randn(M, N))), out_dtype=torch.float32
    ),
    "residual in float64": lambda: form(**residual(dtype=torch.float64)),
    "integers for a residual": lambda: form(**residual(residual=torch.ones(M, N).int())),
    "an activation's weight in float64": lambda: activated(
        "rms_norm", input_act_weight=torch.ones(K).double()
    ),
    "an activation's weight of two dimensions": lambda: activated(
        "rms_norm", convrot=True, input_act_weight=torch.ones(1, K)
    ),
    "few rows": lambda: form(2, K + 8, **residual(2, N), input_act="gelu_tanh"),
}


@pytest.mark.parametrize("make", LEFT.values(), ids=LEFT.keys())
def test_what_is_unusual_is_stocks_whole_and_untouched(
    side: Side, make: Callable[[], Form]
) -> None:
    given = make()
    side.needs(given)
    theirs, ours, their_calls, our_calls = side.both(given)
    (seen,) = side.given_to_stock
    assert all(seen[name] is value for name, value in given.items())
    assert seen.keys() == given.keys()
    assert their_calls == our_calls
    assert torch.equal(ours, theirs)


STEPS = ("_apply_input_act", "quantize_and_rotate_rowwise", "_apply_residual", "_gemm_vector_arg")


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_fails_gives_stocks_result_whole(
    side: Side, step: str, monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    scale: Form = {} if step == "_gemm_vector_arg" else {"residual_scale": torch.randn(N)}
    given = activated("swiglu", convrot=True, convrot_groupsize=64, **residual(**scale))
    side.needs(given)
    expected = side.stock(**given)
    good, failures = getattr(side.host, step), list[str]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            failures.append(step)
            raise torch.OutOfMemoryError("planted")
        return good(*args, **kwargs)

    monkeypatch.setattr(side.host, step, failing)
    assert torch.equal(side.op.function(**given), expected)
    assert (failures, len(side.given_to_stock)) == ([step], 1)
    assert torch.equal(side.op.function(**given), expected)
    assert len(side.given_to_stock) == 1, "there may be memory now"
    assert breaker.snapshot() == ()


def test_a_kernel_that_fails_gives_stocks_result_whole(
    side: Side, monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    from ck_patch.kernels.int8_gemm import PointerGemm

    def broken(*_: object) -> None:
        raise OSError("planted")

    given = activated("swiglu", convrot=True, **residual())
    side.needs(given)
    expected = side.stock(**given)
    monkeypatch.setattr(PointerGemm, "run", broken)
    for _ in range(2):
        assert torch.equal(side.op.function(**given), expected)
    assert len(side.given_to_stock) == 2
    assert [opened.operation for opened in breaker.snapshot()] == ["cuda_int8_linear"]


def test_a_residual_entry_that_another_patcher_replaced_is_not_bypassed(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, entry = form(**residual()), side.extension.cutlass_int8_dequant_residual
    side.needs(given)
    monkeypatch.setattr(side.extension, "cutlass_int8_dequant_residual", lambda *a: entry(*a))
    assert torch.equal(side.op.function(**given), side.stock(**given))
    assert len(side.given_to_stock) == 1
    side.op.function(**form())
    assert len(side.given_to_stock) == 1


def test_nothing_is_quantized_for_a_gemm_that_ours_does_not_do(side: Side) -> None:
    weight = torch.zeros(N * K + 8, dtype=torch.int8)[8:].view(N, K)
    given = form(weight=weight, input_act="gelu_tanh", **residual())
    side.needs(given)
    theirs, ours, their_calls, our_calls = side.both(given)
    assert torch.equal(theirs, ours)
    assert their_calls == our_calls


def test_results_with_a_residual_are_compared_with_the_entry_that_adds_it() -> None:
    from ck_patch.kernels.launch import Operands
    from ck_patch.ops.quantized_linear import _reference
    from ck_patch.releases import RELEASES

    called: list[tuple[str, int]] = []

    def entry(*args: Any) -> bool:
        called.append(("plain", len(args)))
        return True

    def residual_entry(*args: Any) -> bool:
        called.append(("adding", len(args)))
        return True

    context = OpContext(Settings(), Breaker(), RELEASES[-1], check_first=False)
    plain = Operands(*(torch.zeros(4) for _ in range(6)))
    adding = Operands(*(torch.zeros(4) for _ in range(8)))
    both = _reference(entry, residual_entry, context)
    assert both(plain, 7)
    assert both(adding, 7)
    assert called == [("plain", 8), ("adding", 10)]
