"""What the guard reads from distribution metadata and from functions, on stand-ins."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ck_patch import guard
from ck_patch.releases import Release

from .conftest import COMPUTE, LINEAR, RELEASE, FakeHost


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for site-packages, with a loaded comfy_kitchen and all it needs."""
    package: Any = ModuleType("comfy_kitchen")
    package.__file__ = str(tmp_path / "comfy_kitchen" / "__init__.py")
    monkeypatch.setitem(sys.modules, "comfy_kitchen", package)
    wrapt: Any = ModuleType("wrapt")
    wrapt.FunctionWrapper = type("FunctionWrapper", (), {})
    for module in (ModuleType("torch"), wrapt, ModuleType("triton")):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    rest = [path for path in sys.path if not list(Path(path).glob("comfy_kitchen-*.dist-info"))]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    return tmp_path


def distribution(site: Path, text: str, folder: str = "comfy_kitchen-0.dist-info") -> None:
    (site / folder).mkdir(parents=True, exist_ok=True)
    (site / folder / "METADATA").write_text(text, encoding="utf-8")


def released(version: str) -> str:
    return f"Metadata-Version: 2.4\nName: comfy-kitchen\nVersion: {version}\n"


def test_a_tested_release_passes(site: Path) -> None:
    distribution(site, released("0.2.40"))
    host = guard.examine_host()
    assert host.release is not None
    assert not host.check_first
    assert host == guard.Host(
        "0.2.40",
        str(site / "comfy_kitchen"),
        host.release,
        False,
        "comfy-kitchen 0.2.40 is within the tested 0.2.31 to 0.2.40",
    )


def test_a_newer_release_is_to_be_checked_first(site: Path) -> None:
    distribution(site, released("0.3.0"))
    host = guard.examine_host()
    assert host.release is not None
    assert host.check_first
    assert host.reason == "comfy-kitchen 0.3.0 is newer than the tested 0.2.31 to 0.2.40"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (released("0.2.30"), "comfy-kitchen 0.2.30 is older than the tested 0.2.31 to 0.2.40"),
        (released("banana"), "comfy-kitchen calls its version 'banana', which is none"),
        (released(""), "version"),
        ("Name: comfy-kitchen\n", "version"),
        ("", "version"),
    ],
)
def test_a_release_that_is_too_old_or_unclear_is_refused(
    site: Path, text: str, reason: str
) -> None:
    distribution(site, text)
    host = guard.examine_host()
    assert host.release is None
    assert reason in host.reason


def test_two_versions_in_one_place_are_refused(site: Path) -> None:
    distribution(site, released("0.2.31"))
    distribution(site, released("0.2.40"), "comfy_kitchen-1.dist-info")
    host = guard.examine_host()
    assert host.release is None
    assert host.reason == "comfy-kitchen is installed in more than one version: 0.2.31, 0.2.40"


def test_the_distribution_beside_the_loaded_package_counts(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(site, released("0.2.40"))
    distribution(site / "elsewhere", released("0.2.12"))
    monkeypatch.setattr(sys, "path", [str(site / "elsewhere"), *sys.path])
    assert guard.examine_host().version == "0.2.40"


def test_an_editable_installation_has_its_metadata_elsewhere(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution(site / "elsewhere", released("0.2.40"))
    monkeypatch.setattr(sys, "path", [str(site / "elsewhere"), *sys.path])
    assert guard.examine_host().release is not None


def test_a_loaded_package_without_metadata_is_refused(site: Path) -> None:
    assert guard.examine_host().reason == (
        "comfy_kitchen is loaded but has no distribution metadata, so no version"
    )


def test_metadata_that_cannot_be_listed_is_survived(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(metadata, "distributions", fail)
    host = guard.examine_host()
    assert host.release is None
    assert "OSError: stale file handle" in host.reason


def test_keyboard_interrupt_passes_the_guard(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(metadata, "distributions", interrupt)
    with pytest.raises(KeyboardInterrupt):
        guard.examine_host()


def test_a_slot_matches_at_all_of_its_bindings(host: FakeHost) -> None:
    match = guard.examine_slot(LINEAR, RELEASE)
    assert match.stock is host.linear
    assert match.owners == (host.module, host.other)


def test_bindings_that_differ_are_refused(host: FakeHost) -> None:
    host.other.linear = lambda x: x
    match = guard.examine_slot(LINEAR, RELEASE)
    assert match.stock is None
    assert match.reason == "host.other.linear is not host.linear"


def test_a_python_function_with_another_signature_is_refused(host: FakeHost) -> None:
    host.module.linear = host.other.linear = eval("lambda x, y: x", vars(host.module))
    assert guard.examine_slot(LINEAR, RELEASE).reason == (
        "host.linear has another signature than the known one: '(x, y)'"
    )


def test_a_python_function_from_elsewhere_is_another_patchers(host: FakeHost) -> None:
    def linear(x: int, scale: float = 1.0) -> float:
        return x * scale

    linear.__module__ = "host"
    host.module.linear = host.other.linear = linear
    assert (
        "host.linear was replaced by another patcher" in guard.examine_slot(LINEAR, RELEASE).reason
    )


def test_a_slot_that_the_release_does_not_have_is_refused(host: FakeHost) -> None:
    bare = Release("2.0", bias_dtype="output", signatures={})
    assert guard.examine_slot(COMPUTE, bare).reason == "not known for comfy-kitchen 2.0 and later"
