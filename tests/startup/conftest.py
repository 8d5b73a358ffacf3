"""The wheels, built once, and an environment per Python with the wheel and a fake host."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.startup import environments
from tests.startup.environments import Environment

PYTHONS = environments.find_pythons()
# Promised versions that are missing are skipped by name; newer ones are tested where found.
VERSIONS = sorted({*environments.PROMISED, *PYTHONS}, key=lambda text: int(text.split(".")[1]))


@dataclass(frozen=True)
class Built:
    """What was built from the working tree."""

    project: Path
    wheel: Path
    editable: Path
    newer: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The project's wheel, its editable wheel, and the wheel of the version after it."""
    folder = tmp_path_factory.mktemp("built")
    project = environments.copy_project(folder / "project")
    newer = environments.copy_project(folder / "newer-project", "0.1.1")
    return Built(
        project,
        environments.build(project, folder / "wheel"),
        environments.build(project, folder / "editable", "editable"),
        environments.build(newer, folder / "newer"),
    )


@pytest.fixture(scope="session", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Path:
    """Each Python in turn."""
    if request.param not in PYTHONS:
        pytest.skip(f"Python {request.param} is not on this machine")
    return PYTHONS[request.param]


@pytest.fixture(scope="session")
def bare(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An empty environment; clone it before changing it."""
    return Environment.make(python, tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture(scope="session")
def installed(
    built: Built, bare: Environment, tmp_path_factory: pytest.TempPathFactory
) -> Environment:
    """The wheel and a fake host, and nothing else; clone it before changing it."""
    environment = bare.clone(tmp_path_factory.mktemp("installed") / "venv")
    environment.pip("install", "--no-deps", "--no-index", str(built.wheel))
    environment.add_host()
    return environment


@pytest.fixture
def clone(installed: Environment, tmp_path: Path) -> Environment:
    """A copy of `installed` to break things in."""
    return installed.clone(tmp_path / "venv")
