"""Start-up that goes wrong in every way that can be planted: the interpreter does not notice."""

from __future__ import annotations

import shutil

import pytest

from tests.startup.environments import WAITING, Environment

pytestmark = pytest.mark.startup

FAILURES = {
    "Exception": "raise RuntimeError('planted')",
    "ImportError": "import no_such_module",
    "SystemExit": "raise SystemExit(3)",
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit",
    "BaseException": "raise type('Odd', (BaseException,), {})('planted')",
    "MemoryError": "raise MemoryError",
    "RecursionError": "(f := lambda: f())()",
    "unprintable": "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})",
}
NOT_PYTHON = {"syntax error": b"def (:\n", "null bytes": b"\0\0\0\0", "not UTF-8": b"x = '\xff'\n"}
PRINT = "import sys; print(1)"
IMPORT_HOST = "import sys, comfy_kitchen; print(comfy_kitchen.__name__)"


@pytest.mark.parametrize("failure", FAILURES)
def test_a_hook_that_raises_when_imported_reaches_nobody(clone: Environment, failure: str) -> None:
    (clone.site_packages / "ck_patch" / "_import_hook.py").write_text(FAILURES[failure])
    assert clone.output("-c", PRINT) == "1"
    assert clone.output("-c", IMPORT_HOST) == "comfy_kitchen"


@pytest.mark.parametrize("damage", NOT_PYTHON)
def test_a_hook_that_is_no_python_reaches_nobody(clone: Environment, damage: str) -> None:
    (clone.site_packages / "ck_patch" / "_import_hook.py").write_bytes(NOT_PYTHON[damage])
    assert clone.output("-c", PRINT) == "1"


@pytest.mark.parametrize("failure", FAILURES)
def test_a_bootstrap_that_raises_reaches_nobody_and_says_why(
    clone: Environment, failure: str
) -> None:
    file = clone.site_packages / "ck_patch" / "_bootstrap.py"
    file.write_text(f"{file.read_text()}\ndef _start():\n    {FAILURES[failure]}\n")
    assert clone.output("-c", PRINT) == "1"
    code = "import ck_patch._bootstrap; print(ck_patch._bootstrap.outcome)"
    assert clone.output("-c", code).startswith("failed with ")


@pytest.mark.parametrize("failure", [name for name in FAILURES if name != "KeyboardInterrupt"])
def test_an_enable_that_raises_leaves_the_import_of_the_host_alone(
    clone: Environment, failure: str
) -> None:
    file = clone.site_packages / "ck_patch" / "__init__.py"
    file.write_text(f"{file.read_text()}\ndef enable():\n    {FAILURES[failure]}\n")
    done = clone.run("-c", f"{IMPORT_HOST}; print({WAITING})")
    assert (done.returncode, done.stdout.split()) == (0, ["comfy_kitchen", "0"])
    assert "Traceback" not in done.stderr
    said = len(done.stderr.splitlines())
    assert said == (0 if failure == "unprintable" else 1), done.stderr


def test_ctrl_c_during_the_patching_is_the_users_and_the_next_import_patches(
    clone: Environment,
) -> None:
    code = (
        "import sys, ck_patch\ncalls = []\n"
        "def enable():\n    calls.append(1)\n    if len(calls) == 1: raise KeyboardInterrupt\n"
        "ck_patch.enable = enable\n"
        "try:\n    import comfy_kitchen\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
        f"import comfy_kitchen\nprint(len(calls), {WAITING})"
    )
    assert clone.output("-c", code).splitlines() == ["interrupted", "2 0"]


@pytest.mark.parametrize("gone", ["ck_patch", "ck_patch/_bootstrap.py", "ck_patch/__init__.py"])
def test_a_package_deleted_under_the_pth_file_does_not_stop_python(
    clone: Environment, gone: str
) -> None:
    path = clone.site_packages / gone
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    done = clone.run("-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    if gone != "ck_patch/__init__.py":  # without it, the folder is a namespace package and works
        assert done.stderr.count("ModuleNotFoundError") in (1, 2)  # once for each run of the .pth


def test_leftovers_of_an_interrupted_upgrade_act_once_with_the_version_of_the_code(
    clone: Environment,
) -> None:
    site = clone.site_packages
    shutil.copytree(site / "ck_patch", site / "~k_patch")
    shutil.copytree(site / "ck_patch-0.1.0.dist-info", site / "ck_patch-0.0.9.dist-info")
    shutil.copytree(site / "ck_patch-0.1.0.dist-info", site / "~k_patch-0.0.9.dist-info")
    code = f"import sys, ck_patch; print(ck_patch.__version__, {WAITING})"
    assert clone.output("-c", code) == "0.1.0 1"
