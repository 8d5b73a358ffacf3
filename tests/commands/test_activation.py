"""Why an interpreter does or does not start ck_patch by itself."""

from __future__ import annotations

import shlex
import site
import sys
import types
from pathlib import Path

import pytest

from ck_patch import activation
from tests.commands import running
from tests.conftest import REPOSITORY

START_FILE = "ck_patch.pth"


class Interpreter:
    """The folders of an interpreter that exists in monkeypatches only."""

    def __init__(self, folder: Path) -> None:
        self.site, self.users, self.other = (folder / name for name in ("site", "users", "other"))
        for path in (self.site, self.users, self.other):
            path.mkdir()


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    for name in ("packaging", "wrapt"):
        pytest.importorskip(name)  # Loaded now: the path is about to change.
    made = Interpreter(tmp_path)
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(made.site)])
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(made.users))
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    monkeypatch.setattr(sys, "path", [str(made.other), ""])
    monkeypatch.delitem(sys.modules, "ck_patch._bootstrap", raising=False)
    return made


def started(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    bootstrap = types.ModuleType("ck_patch._bootstrap")
    bootstrap.outcome = outcome  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ck_patch._bootstrap", bootstrap)


def test_active_when_start_up_waits_for_the_host(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (interpreter.site / START_FILE).touch()
    started(monkeypatch, "waits for comfy_kitchen")
    found = activation.examine()
    assert found.active
    assert found.files == (str(interpreter.site / START_FILE),)
    assert "waits for comfy_kitchen" in found.reason


@pytest.mark.parametrize("name", ["packaging", "wrapt"])
def test_not_active_where_the_patcher_lacks_what_it_needs(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    started(monkeypatch, "waits for comfy_kitchen")
    monkeypatch.setitem(sys.modules, name, None)
    found = activation.examine()
    assert not found.active
    assert f"{name} is missing" in found.reason
    assert f"-m pip install {name}`" in found.reason


@pytest.mark.parametrize("outcome", ["switched off by CK_PATCH", "failed with ImportError"])
def test_not_active_when_start_up_ended_otherwise(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    started(monkeypatch, outcome)
    found = activation.examine()
    assert not found.active
    assert outcome in found.reason


def test_a_start_file_that_did_not_run_is_named(interpreter: Interpreter) -> None:
    (interpreter.site / START_FILE).touch()
    found = activation.examine()
    assert not found.active
    assert f"{interpreter.site / START_FILE} did not run" in found.reason


def test_an_installation_in_an_unread_user_site_is_explained(interpreter: Interpreter) -> None:
    (interpreter.users / START_FILE).touch()
    found = activation.examine()
    assert not found.active
    assert found.files == (str(interpreter.users / START_FILE),)
    assert "install it without --user" in found.reason


def test_a_user_site_that_is_read_counts_as_site_packages(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    (interpreter.users / START_FILE).touch()
    assert "did not run" in activation.examine().reason


def test_a_start_file_elsewhere_on_the_path_is_explained(interpreter: Interpreter) -> None:
    (interpreter.other / START_FILE).touch()
    assert f"{interpreter.other} is no folder" in activation.examine().reason


def test_without_a_start_file_the_ways_to_start_are_named(interpreter: Interpreter) -> None:
    found = activation.examine()
    assert found.files == ()
    assert found.reason.endswith(
        f"-m pip install {shlex.quote(str(REPOSITORY))}` "
        "or call ck_patch.enable() once comfy_kitchen has been imported"
    )


def test_a_real_interpreter_without_site_says_so() -> None:
    done = running.python(
        "-S", "-c", "from ck_patch import activation; print(activation.examine().reason)"
    )
    assert done.stdout == "Python was started with -S and reads no .pth file\n", done.stderr


def test_an_embedded_python_without_import_site_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "python311._pth").touch()
    script = (
        f"import sys; sys.executable = {str(tmp_path / 'python.exe')!r}; "
        "from ck_patch import activation; print(activation.examine().reason)"
    )
    done = running.python("-S", "-c", script)
    assert "has no line `import site`" in done.stdout, done.stderr
