"""The real comfy-kitchen, on a machine without a GPU: patched, left alone, and put back."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ck_patch import releases
from tests.conftest import SitePackages, WarmInterpreter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)

# Loads the host, remembers what is stock, and reports the slot from the outside (identity) and
# from the inside (status).
PRELUDE = """
import json, sys, types
import comfy_kitchen
from comfy_kitchen.backends import cuda
import ck_patch
from ck_patch import patcher

NAME = "cutlass_int8_dequant"
STOCK = dict(vars(cuda._C))

def look():
    slot = patcher.status().slots[0]
    changed = {name for name, value in vars(cuda._C).items() if value is not STOCK.get(name)}
    missing = STOCK.keys() - vars(cuda._C).keys()
    return {"state": slot.state, "reason": slot.reason, "changed": sorted(changed | missing)}
"""
# Of the extension; the residual form came with 0.2.34.
PATCHED = ["cutlass_int8_dequant", "cutlass_int8_dequant_residual"]


def test_the_first_slot_and_nothing_else_is_patched_and_put_back(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import dataclasses, inspect, torch
result = {"before": look()}
ck_patch.enable()
result["enabled"] = look()
ours, stock = vars(cuda._C)[NAME], STOCK[NAME]
result["same_doc"] = ours.__doc__ == stock.__doc__
result["same_name"] = ours.__name__ == stock.__name__
result["wraps_stock"] = ours.__wrapped__ is stock
for _ in range(2):
    ck_patch.enable()
result["idempotent"] = vars(cuda._C)[NAME] is ours
result["status"] = json.loads(json.dumps(dataclasses.asdict(ck_patch.status())))
ck_patch.disable()
result["disabled"] = look()
result["cuda"] = torch.cuda.is_initialized()
"""
    )
    assert result["before"] == {"state": "stock", "reason": "not enabled yet", "changed": []}
    assert result["enabled"]["state"] == "patched"
    assert result["enabled"]["changed"] == PATCHED
    assert result["same_doc"]
    assert result["same_name"]
    assert result["wraps_stock"]
    assert result["idempotent"]
    assert result["status"]["host_path"].endswith("comfy_kitchen")
    assert result["disabled"]["state"] == "stock"
    assert result["disabled"]["changed"] == []
    assert result["cuda"] is False


def test_the_bootstrap_patches_when_the_host_has_been_imported(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        """
import sys
import ck_patch._bootstrap
ck_patch._bootstrap.start()
early = "ck_patch.patcher" in sys.modules
from comfy_kitchen.backends import cuda
import ck_patch
slot = ck_patch.status().slots[0]
result = {"early": early, "state": slot.state, "live": type(cuda._C.cutlass_int8_dequant).__name__}
"""
    )
    assert result == {"early": False, "state": "patched", "live": "FunctionWrapper"}


def test_threads_that_import_and_enable_at_once_neither_block_nor_patch_twice(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        """
import threading
import ck_patch, ck_patch._bootstrap
ck_patch._bootstrap.start()
together = threading.Barrier(8)
def work(number):
    together.wait()
    if number % 2:
        import comfy_kitchen
    for _ in range(20):
        ck_patch.enable()
        ck_patch.status()
threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
from comfy_kitchen.backends import cuda
live = cuda._C.cutlass_int8_dequant
result = {"blocked": sum(thread.is_alive() for thread in threads),
          "below": type(live.__wrapped__).__name__}
ck_patch.disable()
result["back"] = cuda._C.cutlass_int8_dequant is live.__wrapped__
"""
    )
    assert result == {"blocked": 0, "below": "nb_func", "back": True}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("CK_PATCH", "0", "CK_PATCH=0"),
        ("CK_PATCH_SLOTS", "int8_linear", "not in CK_PATCH_SLOTS"),
    ],
)
def test_the_environment_keeps_stock_even_against_an_explicit_enable(
    warm_interpreter: WarmInterpreter, name: str, text: str, reason: str
) -> None:
    result = warm_interpreter.run(PRELUDE + "ck_patch.enable(); result = look()", env={name: text})
    assert result == {"state": "stock", "reason": reason, "changed": []}


def test_the_release_decides(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    """Each version in turn is put in the metadata beside the real package."""
    site_packages.release(releases.NEWEST)
    versions = [
        *("0.2.12", "0.2.30", "0.2.31rc1", "0.2.31", "0.2.33", "0.2.34", "0.2.40"),
        *("0.2.40+cu130", "0.2.41", "0.3.0", "1.0", "unknown", "", "0.2.40"),
    ]
    result = warm_interpreter.run(
        PRELUDE
        + f"""
import pathlib
metadata = pathlib.Path({str(site_packages.path)!r}, "comfy_kitchen-0.dist-info", "METADATA")
result = []
for version in {versions!r}:
    metadata.write_text("Metadata-Version: 2.4\\nName: comfy-kitchen\\n"
                        + (f"Version: {{version}}\\n" if version else ""))
    ck_patch.enable()
    result.append([version, look(), ck_patch.status().check_first])
""",
        site=site_packages.path,
    )
    for version, seen, check_first in result[:3]:
        assert seen["state"] == "stock", version
        assert seen["reason"].endswith(f"{version} is older than the tested 0.2.31 to 0.2.40")
        assert seen["changed"] == []
        assert not check_first
    for version, seen, check_first in result[3:7] + result[-1:]:
        known = PATCHED[: 1 if version in ("0.2.31", "0.2.33") else 2]
        assert (seen["state"], seen["changed"]) == ("patched", known), version
        assert not check_first
    for version, seen, check_first in result[7:11]:
        assert (seen["state"], seen["changed"]) == ("patched", PATCHED), version
        assert check_first
    for version, seen, check_first in result[11:13]:
        assert (seen["state"], seen["changed"]) == ("stock", []), version
        assert "version" in seen["reason"]
        assert not check_first


def test_without_one_clear_version_everything_stays_stock(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    site_packages.release("0.2.40")
    result = warm_interpreter.run(
        PRELUDE
        + f"""
import pathlib, shutil
site = pathlib.Path({str(site_packages.path)!r})
result = {{}}
shutil.copytree(site / "comfy_kitchen-0.dist-info", site / "comfy_kitchen-1.dist-info")
ck_patch.enable()
result["same version twice"] = look()
metadata = site / "comfy_kitchen-1.dist-info" / "METADATA"
metadata.write_text(metadata.read_text().replace("0.2.40", "0.2.31"))
ck_patch.enable()
result["two versions"] = look()
metadata.write_bytes(b"\\xff\\xfe\\x00")
ck_patch.enable()
result["unreadable"] = look()
for folder in site.glob("comfy_kitchen-*.dist-info"):
    shutil.rmtree(folder)
ck_patch.enable()
result["none"] = look()
""",
        site=site_packages.path,
    )
    assert result.pop("same version twice")["state"] == "patched"
    assert result["two versions"]["reason"].endswith("more than one version: 0.2.31, 0.2.40")
    assert "no distribution metadata" in result["none"]["reason"]
    for name, seen in result.items():
        assert (seen["state"], seen["changed"]) == ("stock", []), name


def test_the_metadata_beside_the_loaded_package_counts(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages, tmp_path: Path
) -> None:
    """A second installation further down sys.path is not the one that runs."""
    other = SitePackages(tmp_path / "other")
    other.release("0.2.12")
    result = warm_interpreter.run(
        PRELUDE + "ck_patch.enable(); result = [look(), ck_patch.status().host_version]",
        site=other.path,
        first=[site_packages.path],
    )
    assert result[0]["state"] == "patched"
    assert result[1] != "0.2.12"


CHANGES = {
    "the extension failed to load": ("cuda._C = None", "_C.cutlass_int8_dequant is missing"),
    "there is no extension": ("del cuda._C", "_C.cutlass_int8_dequant is missing"),
    "the entry is gone": ("del vars(cuda._C)[NAME]", "_C.cutlass_int8_dequant is missing"),
    "the entry is no function": (
        "vars(cuda._C)[NAME] = 3",
        "cutlass_int8_dequant is not a function but int",
    ),
    "the module is gone": (
        "del sys.modules['comfy_kitchen.backends.cuda']",
        "_C.cutlass_int8_dequant is missing",
    ),
    "the signature is another": (
        "stub = lambda *args: True; stub.__doc__ = STOCK[NAME].__doc__.replace('bias', 'beta'); "
        "vars(cuda._C)[NAME] = stub",
        "has another signature than the known one",
    ),
    "there is no signature": (
        "vars(cuda._C)[NAME] = lambda *args: True",
        "has another signature than the known one: ''",
    ),
    "looking at it raises": (
        "cuda._C = type('Raises', (), {'__getattr__': lambda *_: 1 / 0})()",
        "_C.cutlass_int8_dequant cannot be looked at (ZeroDivisionError: division by zero)",
    ),
    "another patcher was first": (
        "import functools; first = functools.wraps(STOCK[NAME])(lambda *args: True); "
        "vars(cuda._C)[NAME] = first",
        "was replaced by another patcher",
    ),
}


def test_a_host_that_is_not_as_expected_stays_as_it_is(warm_interpreter: WarmInterpreter) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + f"""
import os
os.environ["CK_PATCH_SLOTS"] = NAME  # The other slot does not need the extension.
result = {{}}
extension = cuda._C
for name, (change, _) in {CHANGES!r}.items():
    cuda._C = extension
    sys.modules["comfy_kitchen.backends.cuda"] = cuda
    vars(extension).update(STOCK)
    exec(change)
    before = dict(vars(extension)), dict(vars(cuda))
    ck_patch.enable()
    slot = ck_patch.status().slots[0]
    after = dict(vars(extension)), dict(vars(cuda))
    same = all(a.keys() == b.keys() and all(a[k] is b[k] for k in a)
               for a, b in zip(before, after))
    result[name] = [slot.state, slot.reason, same]
"""
    )
    assert result.keys() == CHANGES.keys()
    for name, (_, expected) in CHANGES.items():
        state, reason, same = result[name]
        assert state == "stock", name
        assert expected in reason, name
        assert same, name


def test_a_reloaded_backend_shows_as_stock_until_it_is_patched_again(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import importlib
ck_patch.enable()
first = cuda._C
importlib.reload(cuda)
slot = ck_patch.status().slots[0]
result = {"reloaded": slot.state, "reason": slot.reason}
again = cuda._C.cutlass_int8_dequant
ck_patch.enable()
result["patched"] = ck_patch.status().slots[0].state
result["wraps_new"] = cuda._C.cutlass_int8_dequant.__wrapped__ is again
result["first_is_stock"] = first.cutlass_int8_dequant is STOCK[NAME]
ck_patch.disable()
result["back"] = cuda._C.cutlass_int8_dequant is again
"""
    )
    assert "enable() patches it" in result.pop("reason")
    assert result == {
        "reloaded": "stock",
        "patched": "patched",
        "wraps_new": True,
        "first_is_stock": True,
        "back": True,
    }


def test_a_patcher_on_top_of_the_real_slot_goes_on_working_after_disable(
    warm_interpreter: WarmInterpreter,
) -> None:
    result = warm_interpreter.run(
        PRELUDE
        + """
import functools
ck_patch.enable()
below = cuda._C.cutlass_int8_dequant
@functools.wraps(below)
def on_top(*args):
    return below(*args)
cuda._C.cutlass_int8_dequant = on_top
def error(call):
    try:
        return repr(call())
    except BaseException as raised:
        return type(raised).__name__
result = {"covered": look()["state"]}
ck_patch.disable()
result["after"] = look()["state"]
result["kept"] = cuda._C.cutlass_int8_dequant is on_top
result["as_stock"] = error(on_top) == error(STOCK[NAME]) == "TypeError"
cuda._C.cutlass_int8_dequant = below
ck_patch.enable()
result["again"] = look()["state"]
ck_patch.disable()
result["left"] = look()["changed"]
"""
    )
    assert result == {
        "covered": "covered",
        "after": "covered",
        "kept": True,
        "as_stock": True,
        "again": "patched",
        "left": [],
    }


def test_rocm_builds_of_torch_are_left_alone(warm_interpreter: WarmInterpreter) -> None:
    result = warm_interpreter.run(
        PRELUDE + "import torch; torch.version.hip = '7.1'; ck_patch.enable(); result = look()"
    )
    assert result == {"state": "stock", "reason": "torch is built for ROCm", "changed": []}


def test_without_the_host_enable_does_nothing_and_says_why(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    script = """
import sys
import ck_patch
ck_patch.enable()
ck_patch.disable()
ck_patch.enable()
status = ck_patch.status()
result = [status.host_reason, status.slots[0].state, "comfy_kitchen" in sys.modules]
"""
    reason = "comfy_kitchen has not been imported"
    assert warm_interpreter.run(script) == [reason, "stock", False]
    site_packages.remove("comfy_kitchen")
    absent: Any = warm_interpreter.run(script, site=site_packages.path)
    assert absent == ["comfy-kitchen is not installed", "stock", False]
