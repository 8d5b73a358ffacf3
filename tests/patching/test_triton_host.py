"""The Triton backend of the real comfy-kitchen: every binding is patched, and put back."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import WarmInterpreter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)

PRELUDE = """
import functools, inspect
import comfy_kitchen
from comfy_kitchen.backends import triton
from comfy_kitchen.backends.triton import quantization, w4a8_int8
import ck_patch

MODULES = {"triton": triton, "quantization": quantization, "w4a8_int8": w4a8_int8}
STOCK = {name: dict(vars(module)) for name, module in MODULES.items()}
LINEAR, QUANTIZER = "triton_int8_linear", "triton_quantize_rowwise"

def changed():
    return sorted(
        f"{name}.{attribute}"
        for name, module in MODULES.items()
        for attribute, value in vars(module).items()
        if value is not STOCK[name].get(attribute) and attribute != "__warningregistry__"
    )

def states():
    found = {slot.name: slot.state for slot in ck_patch.status().slots}
    return [found[LINEAR], found[QUANTIZER]]
"""
BINDINGS = {
    "triton_int8_linear": [
        "quantization.int8_linear",
        "triton.int8_linear",
        "w4a8_int8.int8_linear",
    ],
    "triton_quantize_rowwise": [
        "quantization.triton_quantize_rowwise",
        "triton._triton_quantize_int8_rowwise",
    ],
}
ALL = sorted(name for names in BINDINGS.values() for name in names)


def test_every_binding_is_patched_with_one_function_and_put_back(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
ck_patch.enable()
result = {"states": states(), "changed": changed()}
linear, quantize = quantization.int8_linear, quantization.triton_quantize_rowwise
result["one"] = (linear is triton.int8_linear is w4a8_int8.int8_linear
                 and quantize is triton._triton_quantize_int8_rowwise)
result["like stock"] = all(
    ours.__wrapped__ is stock and ours.__doc__ == stock.__doc__
    and inspect.signature(ours) == inspect.signature(stock)
    for ours, stock in (
        (linear, STOCK["quantization"]["int8_linear"]),
        (quantize, STOCK["quantization"]["triton_quantize_rowwise"]),
    )
)
ck_patch.disable()
result["left"] = changed()
"""
    )
    assert result == {
        "states": ["patched", "patched"],
        "changed": ALL,
        "one": True,
        "like stock": True,
        "left": [],
    }


@pytest.mark.parametrize("slot", BINDINGS)
def test_one_slot_can_be_patched_without_the_other(
    warm_interpreter: WarmInterpreter, slot: str
) -> None:
    script = PRELUDE + "ck_patch.enable(); result = changed()"
    assert warm_interpreter.run(script, env={"CK_PATCH_SLOTS": slot}) == BINDINGS[slot]


@pytest.mark.parametrize("slot", BINDINGS)
def test_a_binding_of_somebody_else_leaves_the_whole_slot_on_stock(
    warm_interpreter: WarmInterpreter, slot: str
) -> None:
    *_, last = BINDINGS[slot]
    result = warm_interpreter.run(
        PRELUDE
        + f"""
module, name = {last!r}.split(".")
setattr(MODULES[module], name, lambda *args: None)
ck_patch.enable()
result = [states(), changed()]
"""
    )
    states, changed = result
    others = [name for name in ALL if name not in BINDINGS[slot]]
    assert states == ["stock" if name == slot else "patched" for name in BINDINGS]
    assert changed == sorted([*others, last])


def test_the_custom_op_reaches_ours_and_below_the_limit_stock(
    warm_interpreter: WarmInterpreter,
) -> None:
    """The op asks the registered backend module for the function at each call."""
    result = warm_interpreter.run(
        PRELUDE
        + """
import torch
from comfy_kitchen.registry import registry
from ck_patch import chunks
sizes = []
def measure(x, *args, **kwargs):
    sizes.append(list(x.shape))
    return torch.zeros(*x.shape[:-1], 8, dtype=torch.bfloat16)
quantization.measure = measure
ck_patch.enable()
# Stock's code, which ours calls, becomes one that runs without a GPU.
STOCK["quantization"]["int8_linear"].__code__ = (lambda *args, **given: measure(**given)).__code__
registry.get_implementation = lambda name, kwargs: getattr(triton, name)
x, weight = torch.zeros(2, 100, 32), torch.zeros(8, 32, dtype=torch.int8)
call = lambda: torch.ops.comfy_kitchen.int8_linear(x, weight, torch.ones(1), None, 2)
below = list(call().shape)
chunks.LIMIT, chunks.CHUNK_BYTES = 6000, 4 * 32 * 90
result = [states(), below, list(call().shape), sizes]
"""
    )
    states, below, beyond, sizes = result
    assert states == ["patched", "patched"]
    assert below == beyond == [2, 100, 8]
    assert sizes == [[2, 100, 32], [90, 32], [90, 32], [90, 32]]
