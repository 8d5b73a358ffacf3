"""The real comfy-kitchen without a GPU, all slots patched: CPU tensors get stock and nothing else,
unless a GPU is assumed, whose path they then take."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest
from packaging.version import Version

from ck_patch import releases
from ck_patch.slots import SLOTS
from tests.conftest import WarmInterpreter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)

PRELUDE = """
import sys
import torch
import comfy_kitchen
from comfy_kitchen.backends import cuda, eager
from comfy_kitchen.backends.eager import quantization
import ck_patch

def modules():
    return {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] == "comfy_kitchen" and module is not None}

def everything():
    return {(name, key): value for name, module in modules().items()
            for key, value in vars(module).items() if key != "__warningregistry__"}

def changed(before):
    after = everything()
    return sorted(".".join(key) for key in before.keys() | after.keys()
                  if before.get(key) is not after.get(key))

def form(x, out_dtype=torch.float16, **more):
    k = more.pop("k", x.shape[-1])
    torch.manual_seed(k)
    given = {"x": x, "weight": torch.randint(-127, 128, (48, k), dtype=torch.int8),
             "weight_scale": torch.rand(48) * 0.01, "bias": torch.randn(48),
             "out_dtype": out_dtype, "convrot": False}
    return {**given, **more}

torch.manual_seed(0)
"""


def known_slots() -> set[str]:
    release = releases.release_for(Version(metadata.version("comfy-kitchen")))
    assert release is not None
    return set(release.signatures)


def test_a_reloaded_patcher_knows_what_is_patched_and_puts_it_back(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import importlib
from ck_patch import patcher
before = everything()
def states():
    return [slot.state for slot in ck_patch.status().slots]
ck_patch.enable()
result = {"patched": states()}
patcher = importlib.reload(patcher)
result["reloaded"] = states()
ck_patch.enable()
result["again"] = states()
importlib.reload(patcher).disable()
result["disabled"] = states()
result["changed"] = changed(before)
"""
    )
    patched = result.pop("patched")
    assert "patched" in patched
    stock = ["stock"] * len(patched)
    assert result == {"reloaded": patched, "again": patched, "disabled": stock, "changed": []}


def test_every_slot_of_the_release_is_patched_at_every_binding_and_put_back(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import comfy_kitchen.backends.eager.w4a8_int8, comfy_kitchen.backends.triton.w4a8_int8
before = everything()
ck_patch.enable()
result = {
    "states": {slot.name: [slot.state, slot.reason] for slot in ck_patch.status().slots},
    "changed": changed(before),
}
from ck_patch.slots import SLOTS
result["one each"] = all(
    len({id(getattr(b.find_owner(), b.attribute, None)) for b in slot.bindings}) == 1
    for slot in SLOTS
)
ck_patch.enable()
again = changed(before)
ck_patch.disable()
result["left"] = changed(before)
result["same"] = again == result["changed"]
"""
    )
    known = known_slots()
    states = {name: state for name, (state, _) in result["states"].items()}
    assert states == {slot.name: "patched" if slot.name in known else "stock" for slot in SLOTS}
    assert len(known) in (9, 10), "the residual entry came with 0.2.34"
    bindings = [str(b) for slot in SLOTS if slot.name in known for b in slot.bindings]
    assert result["changed"] == sorted(bindings)
    assert result["one each"]
    assert result["same"]
    assert result["left"] == []


@pytest.mark.parametrize(
    "slot",
    [
        *("eager_int8_linear", "eager_quantize_rowwise"),
        *("cuda_quantize_rowwise", "cuda_quantize_rowwise_convrot64"),
    ],
)
def test_one_slot_can_be_patched_alone(warm_interpreter: WarmInterpreter, slot: str) -> None:
    result = warm_interpreter.run(
        PRELUDE + "before = everything(); ck_patch.enable(); result = changed(before)",
        env={"CK_PATCH_SLOTS": slot},
    )
    (found,) = (one for one in SLOTS if one.name == slot)
    assert result == sorted(map(str, found.bindings))


def test_cpu_tensors_get_stocks_bits_from_stocks_code_at_one_python_call_more(
    warm_interpreter: WarmInterpreter,
) -> None:
    """The call counts, not the time: wrappers around the linear and around its quantizer."""
    result = warm_interpreter.run(
        PRELUDE
        + """
STOCK = quantization.int8_linear
QUANTIZE = quantization.quantize_int8_rowwise

def calls(function, **given):
    seen = []
    def profile(frame, event, argument):
        if event == "call":
            seen.append(frame.f_code)
    sys.setprofile(profile)
    try:
        out = function(**given)
    finally:
        sys.setprofile(None)
    return out, seen

forms = [
    form(torch.randn(5, 64)), form(torch.randn(2, 3, 64).bfloat16(), torch.bfloat16),
    form(torch.randn(64), bias=None), form(torch.randn(5, 256), convrot=True),
    form(torch.randn(5, 128), k=64, input_act="swiglu"),
    form(torch.randn(7, 100)), form(torch.randn(64, 6).t()),
]
if "residual" in STOCK.__code__.co_varnames:
    more = {"residual": torch.randn(5, 48), "residual_scale": torch.randn(48)}
    forms.append(form(torch.randn(5, 64), **more))
STOCK(**forms[3])  # Fills the host's cache of Hadamard matrices.
stock = [calls(STOCK, **given) for given in forms]
seed = {"x": torch.randn(3, 64), "stochastic_rounding": 7}
seeded = calls(QUANTIZE, **seed)
ck_patch.enable()
result = []
for given, (expected, before) in zip(forms, stock):
    out, after = calls(eager.int8_linear, **given)
    mine = [code for code in after if "ck_patch" in code.co_filename]
    result.append([
        torch.equal(out, expected), out.dtype == expected.dtype, len(after) - len(before),
        [code.co_qualname if hasattr(code, "co_qualname") else code.co_name for code in mine],
        [code for code in after if code not in mine] == before,
        STOCK.__code__ in after and QUANTIZE.__code__ in after,
    ])
(q, scale), after = calls(eager.quantize_int8_rowwise, **seed)
same = torch.equal(q, seeded[0][0]) and torch.equal(scale, seeded[0][1])
result.append([same, len(after) - len(seeded[1])])
result.append([slot.state for slot in ck_patch.status().slots].count("patched"))
result.append("ck_patch.kernels.int8_gemm" in sys.modules or torch.cuda.is_initialized())
"""
    )
    *linears, seeded, patched, heavy = result
    assert len(linears) >= 7
    for equal, dtype, more, mine, rest, stock_ran in linears:
        assert equal
        assert dtype
        assert more == 2
        assert all(name.endswith("function") for name in mine)
        assert rest, "beside the wrappers, the same Python functions in the same order"
        assert stock_ran
    assert seeded == [True, 1]
    assert patched == len(known_slots())
    assert heavy is False


def test_the_custom_op_gives_stocks_bits_on_the_cpu(warm_interpreter: WarmInterpreter) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
def everywhere():
    found = []
    for code in (0, 1, 2):
        for x in (torch.ones(5, 64), torch.linspace(-3, 3, 3 * 7 * 64).reshape(3, 7, 64)):
            given = form(x)
            args = (given["x"], given["weight"], given["weight_scale"], given["bias"])
            found.append(torch.ops.comfy_kitchen.int8_linear(*args, code))
            found.extend(torch.ops.comfy_kitchen.quantize_int8_rowwise(x))
    return found

before = everywhere()
ck_patch.enable()
result = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(everywhere(), before)]
"""
    )
    assert result == [True] * 18


ASSUMED = {"CK_PATCH_ASSUME_DEVICE": "sm_70", "CK_PATCH_LOG": "path"}


def test_an_assumed_volta_computes_in_fp16_what_the_exact_result_is(
    warm_interpreter: WarmInterpreter,
) -> None:
    """And not by stock, whose rounding of the activation costs more."""
    result = warm_interpreter.run(
        PRELUDE
        + """
STOCK = quantization.int8_linear

def exact(given):
    x = given["x"].double()
    act = given.get("input_act")
    if act == "swiglu":
        gate, up = x.chunk(2, -1)
        x = torch.nn.functional.silu(gate) * up
    elif act == "gelu_tanh":
        x = torch.nn.functional.gelu(x, approximate="tanh")
    if given["convrot"]:
        group = given["convrot_groupsize"]
        h = quantization._build_hadamard(group, dtype=torch.float64)
        x = (x.reshape(-1, group) @ h).reshape(x.shape)
    out = x @ given["weight"].double().t() * given["weight_scale"].double().reshape(-1)
    if given["bias"] is not None:
        out = out + given["bias"].double()
    if given.get("residual") is not None:
        out = given["residual"].double() + given["residual_scale"].double() * out
    return out

def error(out, given):
    ideal = exact(given)
    return ((out.double() - ideal).norm() / ideal.norm()).item()

forms = {
    "float32": form(torch.randn(33, 64), torch.float32),
    "float16": form(torch.randn(2, 7, 64).half()),
    "bfloat16": form(torch.randn(33, 64).bfloat16(), torch.bfloat16),
    "one row": form(torch.randn(64), torch.float32),
    "no bias": form(torch.randn(33, 64), torch.float32, bias=None),
    "one scale": form(torch.randn(33, 64), torch.float32, weight_scale=torch.tensor(0.01)),
    "far beyond float16": form(torch.randn(33, 64) * 1e6, torch.float32),
    "rotated": form(torch.randn(33, 256), torch.float32, convrot=True, convrot_groupsize=64),
    "swiglu": form(torch.randn(33, 128), torch.float32, k=64, input_act="swiglu"),
    "gelu_tanh": form(torch.randn(33, 64), torch.float32, input_act="gelu_tanh"),
}
if "residual" in STOCK.__code__.co_varnames:
    more = {"residual": torch.randn(33, 48), "residual_scale": torch.randn(48)}
    forms["residual"] = form(torch.randn(33, 64), torch.float32, **more)
ck_patch.enable()
result = {}
for name, given in forms.items():
    out, stock = eager.int8_linear(**given), STOCK(**given)
    result[name] = [error(out, given), error(stock, given), out.dtype == stock.dtype,
                    out.shape == stock.shape, out.is_contiguous(), torch.equal(out, stock)]
""",
        env=ASSUMED,
    )
    for name, (ours, stock, dtype, shape, contiguous, same) in result.items():
        assert ours <= stock, name
        assert ours < (4e-3 if name == "bfloat16" else 1e-3), name
        assert dtype, name
        assert shape, name
        assert contiguous, name
        assert not same, name


def test_the_cuda_backend_hands_over_to_the_eager_one_where_it_has_no_kernels(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import logging
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("ck_patch").addHandler(handler)
STOCK, QUANTIZE = quantization.int8_linear, quantization.quantize_int8_rowwise
ck_patch.enable()
lines.clear()
x = torch.randn(9, 64)
same = lambda a, b: all(torch.equal(p, q) for p, q in zip(a, b))
given = form(x, torch.bfloat16)
result = {
    "linear": torch.equal(cuda.int8_linear(**given), eager.int8_linear(**given)),
    "dtype of x": str(cuda.int8_linear(**form(x, None)).dtype),
    "by position": torch.equal(
        cuda.int8_linear(*[given[name] for name in ("x", "weight", "weight_scale", "bias")],
                         torch.bfloat16),
        eager.int8_linear(**given)),
    "left out": str(cuda.int8_linear(x=x, weight=given["weight"],
                                     weight_scale=given["weight_scale"]).dtype),
    "quantizer": same(cuda.quantize_int8_rowwise(x), QUANTIZE(x)),
    "parameter": same(cuda.quantize_int8_rowwise(torch.nn.Parameter(x)), QUANTIZE(x)),
    "seed": same(cuda.quantize_int8_rowwise(x, 7), QUANTIZE(x, 7)),
    "same seed": same(cuda.quantize_int8_rowwise(x, stochastic_rounding=7),
                      cuda.quantize_int8_rowwise(x, stochastic_rounding=7)),
    "other seed": torch.equal(cuda.quantize_int8_rowwise(x, 7)[0],
                              cuda.quantize_int8_rowwise(x, 8)[0]),
    "seed or none": torch.equal(cuda.quantize_int8_rowwise(x, 7)[0],
                                cuda.quantize_int8_rowwise(x)[0]),
    "3-D": list(cuda.quantize_int8_rowwise(x.reshape(3, 3, 64))[1].shape),
}
def error(call):
    try:
        call()
    except Exception as raised:
        return type(raised).__name__
result["unknown"] = error(lambda: cuda.int8_linear(**given, unknown=1))
result["two seeds"] = error(lambda: cuda.quantize_int8_rowwise(x, 0, 0))
result["lines"] = lines
""",
        env=ASSUMED,
    )
    lines = result.pop("lines")
    assert result == {
        "linear": True,
        "dtype of x": "torch.float32",
        "by position": True,
        "left out": "torch.float32",
        "quantizer": True,
        "parameter": True,
        "seed": True,
        "same seed": True,
        "other seed": False,
        "seed or none": False,
        "3-D": [3, 3, 1],
        "unknown": "TypeError",
        "two seeds": "TypeError",
    }
    said = [line for line in lines if "INT8 linears of the" in line]
    assert len(said) == 2, "one line for each backend"
    assert all("sm_70" in line for line in said)
    redirect = (
        "cuda_int8_linear, x 9x64: the eager backend (the CUDA backend has no kernels for sm_70)"
    )
    half = "eager_int8_linear 9x48x64, bfloat16 output: float16 (sm_70 has no INT8 tensor cores"
    assert lines.count(redirect) == 1
    assert sum(line.startswith(half) for line in lines) == 1


@pytest.mark.parametrize("assume", ["sm_70", "sm_90"])
def test_fp16_by_setting_is_had_through_the_cuda_backend_and_leaves_its_quantizer_working(
    warm_interpreter: WarmInterpreter, assume: str
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
QUANTIZE, LINEAR = quantization.quantize_int8_rowwise, quantization.int8_linear
ck_patch.enable()
given = form(torch.randn(9, 64), torch.float32)
out = cuda.int8_linear(**given)
result = {"linear": torch.equal(out, eager.int8_linear(**given)),
          "stock": torch.equal(out, LINEAR(**given))}
def rows():
    return torch.equal(cuda.quantize_int8_rowwise(given["x"])[0], QUANTIZE(given["x"])[0])
try:
    result["rows"] = rows()
except Exception as error:
    result["rows"] = "stock"
""",
        env={"CK_PATCH_ASSUME_DEVICE": assume, "CK_PATCH_INT8": "fp16"},
    )
    # Stock's own quantizer refuses a CPU tensor.
    rows = True if assume == "sm_70" else "stock"
    assert result == {"linear": True, "stock": False, "rows": rows}


def test_without_an_assumed_gpu_the_cuda_backend_answers_cpu_tensors_itself(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
def error(call):
    try:
        call()
    except BaseException as raised:
        return [type(raised).__name__, str(raised)]
given = form(torch.randn(9, 64))
calls = [lambda: cuda.int8_linear(**given), lambda: cuda.quantize_int8_rowwise(given["x"]),
         lambda: cuda.quantize_int8_rowwise(given["x"], 7), lambda: cuda.int8_linear()]
before = [error(call) for call in calls]
ck_patch.enable()
result = [before, [error(call) for call in calls]]
"""
    )
    before, after = result
    assert None not in before
    assert after == before


COMPILED = """
import torch._dynamo

class Layer(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        given = form(torch.randn(5, 64))
        self.weight = torch.nn.Parameter(given["weight"], requires_grad=False)
        self.scale, self.bias = given["weight_scale"], given["bias"]
    def forward(self, x):
        out = self.call(torch.nn.functional.relu(x), self.weight, self.scale, self.bias, *LAST)
        return out.float() * 2

def graphs(dynamic):
    torch._dynamo.reset()
    seen = []
    def backend(module, inputs):
        seen.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module.forward
    layer = Layer(CALL())
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    equal = []
    with torch.no_grad():
        for m in (5, 9, 17):
            x = torch.linspace(-2, 2, m * 64).reshape(m, 64)
            equal.append(torch.equal(compiled(x), layer(x)))
    return [seen, equal]

before = [graphs(dynamic) for dynamic in (False, True, None)]
ck_patch.enable()
result = [before, [graphs(dynamic) for dynamic in (False, True, None)]]
"""
CALLS = {
    "the custom op": "LAST, CALL = (1,), lambda: torch.ops.comfy_kitchen.int8_linear\n",
    "the function": "LAST, CALL = (torch.float16,), lambda: eager.int8_linear\n",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_compiled_layer_has_as_many_graphs_as_without_the_plugin(
    warm_interpreter: WarmInterpreter, call: str
) -> None:
    before, after = warm_interpreter.run(PRELUDE + call + COMPILED)
    assert after == before
    for seen, equal in after:
        assert seen
        assert equal == [True] * 3
