"""Routes of other GPUs, taken on this one: CK_PATCH_ASSUME_DEVICE in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu

_PROGRAM = """
import json, logging
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("ck_patch").addHandler(Keep())
import torch
import comfy_kitchen
from comfy_kitchen.backends import cuda, eager
torch.manual_seed(0)
result = {}
weight = torch.randint(-127, 128, (1024, 2048), dtype=torch.int8, device="cuda")
scale = torch.rand(1024, device="cuda") * 0.01 + 1e-3
bias = torch.randn(1024, device="cuda", dtype=torch.float16)
x = torch.randn(300, 2048, device="cuda", dtype=torch.float16)
exact = x.double() @ (weight.double() * scale.double()[:, None]).T + bias.double()
def error(out):
    return float((out.double() - exact).norm() / exact.norm())
given = dict(weight=weight, weight_scale=scale, bias=bias, out_dtype=torch.float16)
stock = getattr(eager.int8_linear, "__wrapped__", eager.int8_linear)
result["stock"] = error(stock(x, **given))
for name, backend in (("eager", eager), ("cuda", cuda)):
    result[name] = error(backend.int8_linear(x=x, **given))
result["registry"] = error(comfy_kitchen.int8_linear(x, weight, scale, bias, torch.float16))
rotated = dict(given, convrot=True)
result["rotated"] = float(eager.int8_linear(x=x, **rotated).double().norm())
result["rotated_stock"] = float(stock(x=x, **rotated).double().norm())
huge = eager.int8_linear(x=x.bfloat16() * 1e30, **dict(given, out_dtype=torch.bfloat16))
result["finite"] = bool(huge.isfinite().all())
q, s = cuda.quantize_int8_rowwise(x)
plain_q, plain_s = eager.quantize_int8_rowwise(x)
result["quantizer"] = bool((q == plain_q).all() and (s == plain_s).all())
seeds = [cuda.quantize_int8_rowwise(x, stochastic_rounding=seed)[0] for seed in (7, 7, 8)]
result["seeds"] = [bool((seeds[0] == other).all()) for other in seeds[1:]]
import ck_patch
result["breakers"] = [str(b) for b in ck_patch.status().breakers]
result["lines"] = lines
print("RESULT" + json.dumps(result))
"""


def _run(**environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT")[2])
    return found


def test_volta_multiplies_in_float16_whichever_backend_is_asked(record: Record) -> None:
    found = _run(CK_PATCH_ASSUME_DEVICE="sm_70")
    for name in ("eager", "cuda", "registry"):
        assert found[name] < found["stock"] / 5, found
    assert abs(found["rotated"] / found["rotated_stock"] - 1) < 0.01
    assert found["finite"]
    assert found["quantizer"]
    assert found["seeds"] == [True, False]
    assert found["breakers"] == []
    slow = [line for line in found["lines"] if "sm_70" in line]
    assert slow
    assert len(slow) == len(set(slow))
    record.add("assumed", device="sm_70", error={n: found[n] for n in ("eager", "stock")})


def test_pascal_keeps_stocks_dp4a(record: Record) -> None:
    found = _run(CK_PATCH_ASSUME_DEVICE="sm_61")
    assert found["eager"] == found["stock"]
    record.add("assumed", device="sm_61", error={n: found[n] for n in ("eager", "stock")})


def test_fp16_can_be_asked_for_on_any_gpu() -> None:
    found = _run(CK_PATCH_INT8="fp16")
    for name in ("eager", "cuda", "registry"):
        assert found[name] < found["stock"] / 5, found


def test_sm_86_takes_the_kernel_of_its_class_and_changes_nothing() -> None:
    found = _run(CK_PATCH_ASSUME_DEVICE="sm_86", CK_PATCH_INT8="triton")
    assert found["eager"] == found["stock"]
    assert found["breakers"] == []
