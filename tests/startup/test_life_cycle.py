"""Installing, upgrading and uninstalling with pip: each leaves exactly what it should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.startup import environments
from tests.startup.conftest import Built
from tests.startup.environments import WAITING, Environment

pytestmark = pytest.mark.startup

SHOW = f"import sys, ck_patch; print(ck_patch.__version__, ck_patch.__file__, {WAITING})"
OFFLINE = ("--no-deps", "--no-index")


@pytest.fixture
def environment(bare: Environment, tmp_path: Path) -> Environment:
    """An empty environment of its own."""
    return bare.clone(tmp_path / "venv")


def shown(environment: Environment) -> list[str]:
    return environment.output("-c", SHOW).split()


def start_files(environment: Environment) -> list[str]:
    found = [*environment.site_packages.glob("*.pth"), *environment.site_packages.glob("*.start")]
    return sorted(file.name for file in found)


def test_upgrade_and_uninstall_of_a_wheel(environment: Environment, built: Built) -> None:
    before = environment.files()
    site = environment.site_packages
    environment.pip("install", *OFFLINE, str(built.wheel))
    record = (site / "ck_patch-0.1.0.dist-info" / "RECORD").read_text()
    assert "\nck_patch.pth,sha256=" in record
    assert "\nck_patch.start,sha256=" in record
    assert start_files(environment) == ["ck_patch.pth", "ck_patch.start"]
    assert shown(environment) == ["0.1.0", str(site / "ck_patch" / "__init__.py"), "1"]
    added = {
        Path(file).relative_to(site.relative_to(environment.path)).parts[0]
        for file in environment.files() - before
        if "site-packages" in file
    }
    assert added == {"ck_patch", "ck_patch-0.1.0.dist-info", "ck_patch.pth", "ck_patch.start"}
    assert {file for file in environment.files() - before if "site-packages" not in file} == {
        "bin/ck-patch"
    }

    environment.pip("install", *OFFLINE, str(built.newer))
    assert start_files(environment) == ["ck_patch.pth", "ck_patch.start"]
    assert environment.installed("ck_patch") == "0.1.1"
    assert shown(environment) == ["0.1.1", str(site / "ck_patch" / "__init__.py"), "1"]

    environment.pip("uninstall", "--yes", "ck-patch")
    assert environment.files() == before
    assert not (site / "ck_patch").exists()


def test_a_wheel_over_an_editable_install_and_uninstall(
    environment: Environment, built: Built
) -> None:
    before = environment.files()
    environment.pip("install", *OFFLINE, str(built.editable))
    assert start_files(environment) == ["_ck_patch.pth", "ck_patch.pth", "ck_patch.start"]
    assert shown(environment) == ["0.1.0", str(built.project / "ck_patch" / "__init__.py"), "1"]

    environment.pip("install", *OFFLINE, "--force-reinstall", str(built.wheel))
    assert start_files(environment) == ["ck_patch.pth", "ck_patch.start"]
    installed = environment.site_packages / "ck_patch" / "__init__.py"
    assert shown(environment) == ["0.1.0", str(installed), "1"]

    environment.pip("uninstall", "--yes", "ck-patch")
    assert environment.files() == before


def test_uninstall_of_an_editable_install(environment: Environment, built: Built) -> None:
    before = environment.files()
    environment.pip("install", *OFFLINE, str(built.editable))
    environment.pip("uninstall", "--yes", "ck-patch")
    assert environment.files() == before
    assert environment.output("-c", f"import sys; print({WAITING})") == "0"


def test_a_checkout_installs_in_place_and_then_as_a_copy(tmp_path: Path) -> None:
    """`pip install -e .`, `pip install .` over it and uninstall, with the pip of this process."""
    environment = Environment.make(Path(sys.executable), tmp_path / "venv")
    before = environment.files()
    project = environments.copy_project(tmp_path / "project")
    requirements = environments.copy_build_requirements(tmp_path / "requirements")
    env = {"PYTHONPATH": str(requirements)}
    options = (*OFFLINE, "--no-build-isolation")

    environment.pip("install", *options, "-e", str(project), env=env)
    assert start_files(environment) == ["_ck_patch.pth", "ck_patch.pth", "ck_patch.start"]
    assert shown(environment) == ["0.1.0", str(project / "ck_patch" / "__init__.py"), "1"]

    environment.pip("install", *options, str(project), env=env)
    assert start_files(environment) == ["ck_patch.pth", "ck_patch.start"]
    installed = environment.site_packages / "ck_patch" / "__init__.py"
    assert shown(environment) == ["0.1.0", str(installed), "1"]

    environment.pip("uninstall", "--yes", "ck-patch")
    assert environment.files() == before
