"""What pip does to the torch and the Triton that are there: nothing."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.startup.conftest import Built
from tests.startup.environments import Environment

pytestmark = [
    pytest.mark.startup,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is a dependency on Linux alone"),
]

# What an index offers, as (name, version, requirements); torch pins Triton as its releases do.
INDEX = [
    ("torch", "2.7.0", ["triton==3.3.0"]),
    ("torch", "2.13.0", ["triton==3.8.0"]),
    ("triton", "3.3.0", []),
    ("triton", "3.8.0", []),
    ("triton", "3.9.0", []),
    ("packaging", "26.0", []),
    ("wrapt", "2.0.0", []),
]


def write_wheel(folder: Path, name: str, version: str, requirements: list[str]) -> Path:
    """A wheel with nothing but metadata."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requirements]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        names = [f"{info}/{file},," for file in ("METADATA", "WHEEL", "RECORD")]
        wheel.writestr(f"{info}/RECORD", "\n".join(names) + "\n")
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    for name, version, requirements in INDEX:
        write_wheel(folder, name, version, requirements)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment.make(Path(sys.executable), tmp_path / "venv")


@pytest.mark.parametrize(
    ("torch", "pinned", "triton", "options"),
    [
        pytest.param("2.7.0", ["triton==3.3.0"], "3.3.0", [], id="the oldest"),
        pytest.param("2.7.0", ["triton==3.3.0"], "3.3.0", ["--upgrade"], id="the oldest, upgrade"),
        pytest.param("2.9.1+cu128", ["triton==3.5.1"], "3.5.1", [], id="a build from elsewhere"),
        pytest.param("2.9.0a0+145a3a7", [], "3.5.0", [], id="a vendor's pre-release"),
        pytest.param("2.14.0.dev20260101", [], "3.9.1", ["--upgrade"], id="a nightly, upgrade"),
        pytest.param("2.13.0+cpu", [], None, [], id="a CPU build, which has no Triton"),
    ],
)
def test_installing_leaves_torch_and_its_triton_alone(
    environment: Environment,
    built: Built,
    index: Path,
    tmp_path: Path,
    torch: str,
    pinned: list[str],
    triton: str | None,
    options: list[str],
) -> None:
    there = [write_wheel(tmp_path, "torch", torch, pinned)]
    if triton:
        there.append(write_wheel(tmp_path, "triton", triton, []))
    environment.pip("install", "--no-index", *map(str, there))
    offline = ["--no-index", "--find-links", str(index)]
    environment.pip("install", *offline, *options, str(built.wheel))
    assert environment.installed("torch") == torch
    assert environment.installed("triton") == (triton or "3.9.0")
    assert environment.installed("wrapt") == "2.0.0"


def test_installing_without_torch_gets_the_newest_and_the_triton_that_it_pins(
    environment: Environment, built: Built, index: Path
) -> None:
    environment.pip("install", "--no-index", "--find-links", str(index), str(built.wheel))
    assert environment.installed("torch") == "2.13.0"
    assert environment.installed("triton") == "3.8.0"
