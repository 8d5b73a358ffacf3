"""A host that tests may change at will, and a patcher that takes it for comfy-kitchen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ck_patch import guard, log, patcher, releases, settings
from ck_patch.slots import Binding, Slot

from . import probe_op

SIGNATURE = "compute(a: int) -> bool"


class FakeHost:
    """Two loaded modules: `host` with an extension `_C`, and `host.other` which binds `linear`."""

    def __init__(self) -> None:
        self.module: Any = ModuleType("host")
        self.other: Any = ModuleType("host.other")
        self.reload()

    def reload(self) -> None:
        """Give the modules new objects, as importlib.reload() of the real host does."""

        def compute(a: int) -> bool:
            return a > 0

        def untouched() -> None:
            return None

        compute.__doc__ = f"{SIGNATURE}\n\nWhat it does."
        self.extension = SimpleNamespace(compute=compute, untouched=untouched)
        self.compute, self.untouched = compute, untouched
        self.module._C = self.extension
        exec("def linear(x: int, scale: float = 1.0) -> float: return x * scale", vars(self.module))
        self.linear = self.other.linear = self.module.linear


COMPUTE = Slot(
    "compute",
    (Binding("host", "_C", "compute"),),
    "nanobind",
    f"{probe_op.__name__}:build",
)
LINEAR = Slot(
    "linear",
    (Binding("host", "", "linear"), Binding("host.other", "", "linear")),
    "python",
    f"{probe_op.__name__}:build",
)
RELEASE = releases.Release(
    "1.0",
    bias_dtype="output",
    signatures={"compute": SIGNATURE, "linear": "(x: 'int', scale: 'float' = 1.0) -> 'float'"},
)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """The host, loaded, and examined by the guard to its satisfaction."""
    fake = FakeHost()
    monkeypatch.setitem(sys.modules, "host", fake.module)
    monkeypatch.setitem(sys.modules, "host.other", fake.other)
    verdict = guard.Host("1.0", "/host", RELEASE, check_first=False, reason="known")
    monkeypatch.setattr(guard, "examine_host", lambda: verdict)
    return fake


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[probe_op.Probe]:
    """The ops built in this test, in order."""
    monkeypatch.setattr(probe_op, "BUILT", [])
    return probe_op.BUILT


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from the default settings, whatever the developer's shell says."""
    for variable in settings.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget which lines were written, and end at the default level."""
    monkeypatch.setattr(log, "_seen", {})
    yield
    log.configure("info")


@pytest.fixture
def both(host: FakeHost, probes: list[probe_op.Probe]) -> patcher.Patcher:
    """A patcher with a compiled and a Python slot of the fake host."""
    return patcher.Patcher((COMPUTE, LINEAR))
