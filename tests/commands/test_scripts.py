"""The shell scripts: executable, sound to bash, and without an address of any registry."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import running
from tests.conftest import REPOSITORY
from tests.startup.environments import Environment, clean_environ

COMMANDS = [REPOSITORY / name for name in ("scripts/run.sh", "scripts/test.sh", ".ci/run")]
SCRIPTS = [*COMMANDS, REPOSITORY / "scripts/_setup.sh"]

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@needs_bash
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_parse_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: path.name)
def test_it_can_be_run_and_stops_at_the_first_failure(script: Path) -> None:
    assert os.name == "nt" or os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_leaves_the_choice_of_an_index_to_the_user(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert "://" not in text
    assert "index-url" not in text


@needs_bash
def test_a_python_that_is_none_is_named(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(REPOSITORY / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    env = os.environ | {"CK_PATCH_PYTHON": "/no such/python"}
    done = subprocess.run([scripts / "run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CK_PATCH_PYTHON=/no such/python is no Python 3.10 to 3.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_bash
def test_an_environment_of_another_python_than_asked_for_is_made_anew(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(REPOSITORY / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    old, asked = tmp_path / ".venv" / "bin" / "python", tmp_path / "with space" / "python"
    for python in (old, asked):
        python.parent.mkdir(parents=True)
        # Its name is its base, and making an environment with it ends with 3.
        python.write_text(
            f'#!/bin/sh\n[ "$1" = -m ] && exit 3\necho "{python}"\n', encoding="utf-8"
        )
        python.chmod(0o755)
    env = os.environ | {"CK_PATCH_PYTHON": str(asked)}
    done = subprocess.run([scripts / "run.sh"], env=env, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert f"making {tmp_path}/.venv with {asked}" in done.stdout
    assert not old.exists()


# Installs by leaving the metadata of what run.sh asks for, and a package that can be run.
PIP = """
from pathlib import Path
site = Path(__file__).parent
for name in ("torch", "ck_patch"):
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\\nVersion: 1.0\\n")
(site / "ck_patch.py").write_text("print('the demo')")
"""


@needs_bash
def test_the_environment_is_set_up_once_and_again_after_ck_patch_was_uninstalled(
    tmp_path: Path,
) -> None:
    scripts = tmp_path / "scripts"
    shutil.copytree(REPOSITORY / "scripts", scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pyproject.toml").touch()
    site = Environment.make(Path(sys.executable), tmp_path / ".venv").site_packages
    (site / "pip.py").write_text(PIP, encoding="utf-8")

    def run() -> bool:
        """Whether it installs before the demo."""
        done = subprocess.run(
            [scripts / "run.sh"], env=clean_environ(), cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "the demo"), done.stderr
        installs = "installing ck_patch" in done.stdout
        assert installs is not (f"{tmp_path}/.venv is up to date" in done.stdout)
        return installs

    assert [run(), run()] == [True, False]
    shutil.rmtree(site / "ck_patch-1.0.dist-info")
    (site / "ck_patch.py").unlink()
    assert [run(), run()] == [True, False]


@pytest.mark.parametrize("page", ["policy", "settings"])
def test_help_of_a_script_that_writes_a_page_writes_none(tmp_path: Path, page: str) -> None:
    script = tmp_path / "scripts" / f"document_{page}.py"
    script.parent.mkdir()
    shutil.copy2(REPOSITORY / "scripts" / script.name, script)
    (tmp_path / "docs").mkdir()
    done = running.python(str(script), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {script.name}")
    assert not list((tmp_path / "docs").iterdir())
    assert running.python(str(script)).returncode == 0
    assert (tmp_path / "docs" / f"{page}.md").exists()
