"""torch, triton or wrapt broken: the host behaves as it does without us, and status() says why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SitePackages, WarmInterpreter

from .test_real_host import PRELUDE

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)

# What importing a broken package does.
BROKEN = {
    "ImportError": "raise ImportError('DLL load failed while importing it')",
    "ModuleNotFoundError": "import a_module_that_nobody_has",
    "SyntaxError": "def broken(:",
    "SystemError": "raise SystemError('PY_SSIZE_T_CLEAN macro must be defined')",
    "OSError": "raise OSError('cannot open shared object file')",
    "RuntimeError": "raise RuntimeError('driver too old')",
    "AttributeError": "import sys; sys.no_such_attribute",
    "SystemExit": "raise SystemExit('go away')",
    "RecursionError": "def again():\n    again()\nagain()",
}


def test_a_broken_wrapt_leaves_everything_stock(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    package = tmp_path / "wrapt" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    sources = BROKEN | {
        "no FunctionWrapper": "ObjectProxy = object",
        "FunctionWrapper is None": "FunctionWrapper = None",
        "__getattr__ raises": "def __getattr__(name):\n    raise SystemExit(name)",
    }
    result = warm_interpreter.run(
        PRELUDE
        + f"""
import importlib, pathlib
package = pathlib.Path({str(package)!r})
result = {{}}
for name, source in {sources!r}.items():
    sys.modules.pop("wrapt", None)
    package.write_text(source)
    importlib.invalidate_caches()
    ck_patch.enable()
    result[name] = look()
sys.modules["wrapt"] = None
ck_patch.enable()
result["None in sys.modules"] = look()
""",
        first=[tmp_path],
    )
    assert len(result) == len(sources) + 1
    for name, seen in result.items():
        assert (seen["state"], seen["changed"]) == ("stock", []), name
        assert seen["reason"].startswith("wrapt "), name
    for name in BROKEN:
        assert name in result[name]["reason"]


def test_without_wrapt_everything_stays_stock(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    site_packages.remove("wrapt")
    result = warm_interpreter.run(
        PRELUDE + "ck_patch.enable(); result = look()", site=site_packages.path
    )
    assert (result["state"], result["changed"]) == ("stock", [])
    assert result["reason"].startswith("wrapt cannot be used (ModuleNotFoundError")


def test_without_triton_everything_stays_stock(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    site_packages.remove("triton")
    result = warm_interpreter.run(
        PRELUDE
        + """
result = []
ck_patch.enable()
result.append(look())
sys.modules["triton"] = types.ModuleType("triton")
ck_patch.enable()
result.append(look())
sys.modules["triton"] = None
ck_patch.enable()
result.append(look())
""",
        site=site_packages.path,
    )
    absent, loaded, blocked = result
    expected = {"state": "stock", "reason": "triton is not installed", "changed": []}
    assert absent == blocked == expected
    assert loaded["state"] == "patched"


# Runs with and without the plugin: what a caller of the host sees has to be the same.
OUTCOME = """
import logging
def outcome(call):
    try:
        call()
    except BaseException as error:
        return [type(error).__name__, str(error)]
def load():
    import comfy_kitchen
def call():
    import torch
    from comfy_kitchen.backends import cuda
    a, b = (torch.ones(32, 64, dtype=torch.int8) for _ in range(2))
    xs, ws, bias = torch.ones(32, 1), torch.ones(32), torch.empty(0)
    d = torch.empty(32, 32)
    cuda._C.cutlass_int8_dequant(*(t.__dlpack__() for t in (a, b, xs, ws, bias, d)), 0, 0)
if plugin:
    import ck_patch._bootstrap
    ck_patch._bootstrap.start()
result = {"load": outcome(load)}
if result["load"] is None:
    result["call"] = outcome(call)[0]
if plugin:
    import ck_patch
    ck_patch.enable()
    slot = ck_patch.status().slots[0]
    result["slot"] = [slot.state, slot.reason]
"""


@pytest.mark.parametrize("error", BROKEN)
def test_a_triton_that_cannot_be_imported_changes_nothing_for_the_caller(
    warm_interpreter: WarmInterpreter, tmp_path: Path, error: str
) -> None:
    package = tmp_path / "triton" / "__init__.py"
    package.parent.mkdir()
    package.write_text(BROKEN[error])
    without = warm_interpreter.run("plugin = False" + OUTCOME, first=[tmp_path])
    patched = warm_interpreter.run("plugin = True" + OUTCOME, first=[tmp_path])
    state, reason = patched.pop("slot")
    assert patched == without
    if without["load"] is None:
        # The op finds out at its first call, which stock then answers.
        assert state == "patched"
        assert without["call"] == "TypeError"
    else:
        assert (state, reason) == ("stock", "comfy_kitchen has not been imported")


@pytest.mark.parametrize("error", BROKEN)
def test_a_torch_that_cannot_be_imported_changes_nothing_for_the_caller(
    site_packages: SitePackages, error: str
) -> None:
    site_packages.remove("torch")
    site_packages.write("torch/__init__.py", BROKEN[error])
    seen = []
    for plugin in (False, True):
        script = f"plugin = {plugin}{OUTCOME}\nprint(result.pop('slot', None)); print(result)"
        seen.append(
            subprocess.run(
                [sys.executable, "-S", "-c", script],
                env=os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{site_packages.path}"},
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        )
    without, patched = seen
    assert patched.stdout.splitlines()[1] == without.stdout.splitlines()[1]
    assert patched.stdout.startswith("['stock', 'comfy_kitchen has not been imported']")
    assert error in without.stdout
    assert patched.stderr == without.stderr == ""


def test_a_torch_that_has_gone_or_lacks_its_version_is_survived(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
torch = sys.modules["torch"]
result = []
for stand_in in (None, types.ModuleType("torch"), torch):
    sys.modules["torch"] = stand_in
    ck_patch.enable()
    result.append(look())
"""
    )
    gone, bare, real = result
    assert gone == {"state": "stock", "reason": "torch is not loaded", "changed": []}
    assert bare["state"] in {"stock", "patched"}
    assert real["state"] == "patched"
