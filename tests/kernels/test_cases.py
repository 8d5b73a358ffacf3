"""Reported failures that the way the kernels are made prevents."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from ck_patch import kernels
from tests.interpreter import interpreting


@pytest.mark.skipif(interpreting(), reason="Triton interprets, and has other classes then")
def test_no_kernel_is_tuned_at_run_time() -> None:
    triton = pytest.importorskip("triton")
    pytest.importorskip("torch")
    found = []
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        values = vars(importlib.import_module(module.name))
        assert not any(
            isinstance(value, (triton.runtime.Autotuner, triton.runtime.autotuner.Heuristics))
            for value in values.values()
        ), module.name
        found += [name for name, value in values.items() if isinstance(value, triton.JITFunction)]
    assert any("gemm" in name for name in found)
    assert any("quantize" in name for name in found)
