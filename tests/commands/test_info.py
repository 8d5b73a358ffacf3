"""`info`: right about this machine, and unimpressed by whatever is broken on it."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import ck_patch
from ck_patch import device, route
from tests.commands import running
from tests.conftest import SitePackages, WarmInterpreter

HAS_HOST = importlib.util.find_spec("comfy_kitchen") is not None
needs_host = pytest.mark.skipif(not HAS_HOST, reason="comfy-kitchen is not installed")

INFO = running.IN_CHILD.format(arguments=["info", "--json"])


def parsed(result: Any) -> dict[str, Any]:
    code, printed = result
    assert code == 0
    report: dict[str, Any] = json.loads(printed)
    return report


def slot(report: dict[str, Any], name: str = "cutlass_int8_dequant") -> dict[str, Any]:
    (found,) = (slot for slot in report["slots"] if slot["name"] == name)
    return dict(found)


def package(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (package for package in report["packages"] if package["name"] == name)
    return dict(found)


@needs_host
def test_the_real_host_is_patched_in_this_process_and_the_report_says_so(
    warm_interpreter: WarmInterpreter,
) -> None:
    report = parsed(warm_interpreter.run(INFO))
    assert report["version"] == ck_patch.__version__
    assert report["path"] == str(Path(ck_patch.__file__).parent)
    assert slot(report)["state"] == "patched"
    for name in ("torch", "triton", "wrapt", "packaging", "comfy_kitchen"):
        found = package(report, name)
        assert found["problem"] is None
        assert found["version"]
        assert Path(found["path"]).is_dir()
    assert {"cuda", "eager"} <= {backend["name"] for backend in report["backends"]}


@needs_host
def test_the_text_has_every_section(warm_interpreter: WarmInterpreter) -> None:
    code, printed = warm_interpreter.run(running.IN_CHILD.format(arguments=["info"]))
    assert code == 0
    for part in ("start-up", "site-packages", "Packages", "Slots", "Settings", "CK_PATCH_INT8"):
        assert part in printed
    assert re.search("cutlass_int8_dequant +patched: ", printed)


@needs_host
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CK_PATCH": "0"}, "CK_PATCH=0"),
        ({"CK_PATCH_SLOTS": "other"}, "not in CK_PATCH_SLOTS"),
    ],
)
def test_a_slot_on_stock_says_why(
    warm_interpreter: WarmInterpreter, variables: dict[str, str], reason: str
) -> None:
    report = parsed(warm_interpreter.run(INFO, env=variables))
    assert (slot(report)["state"], slot(report)["reason"]) == ("stock", reason)


def test_settings_that_are_not_understood_are_noted(warm_interpreter: WarmInterpreter) -> None:
    variables = {"CK_PATCH_INT8": "fast", "CK_PATCH_INT4": "1", "CK_PATCH_SLOTS": "other"}
    report = parsed(warm_interpreter.run(INFO, env=variables))
    given = {variable["name"]: variable["given"] for variable in report["settings"]}
    assert given["CK_PATCH_INT8"] == "fast"
    assert given["CK_PATCH_LOG"] is None
    notes = "\n".join(report["notes"])
    assert "CK_PATCH_INT8='fast' is none of auto, stock, triton, fp16; it means auto" in notes
    assert "CK_PATCH_INT4 is no variable of ck_patch" in notes
    assert "CK_PATCH_SLOTS names 'other', which is no slot" in notes


FAILURES = {
    "ImportError": "raise ImportError('DLL load failed')",
    "OSError": "raise OSError('libcudart.so.13: cannot open')",
    "SyntaxError": "def",
    "SystemExit": "raise SystemExit(3)",
    "RecursionError": "raise RecursionError",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_without_a_usable_torch_the_report_is_whole(tmp_path: Path, failure: str) -> None:
    (tmp_path / "torch.py").write_text(FAILURES[failure], encoding="utf-8")
    done = running.ck_patch("info", "--json", first=[tmp_path])
    report = parsed([done.returncode, done.stdout])
    assert failure in package(report, "torch")["problem"]
    assert report["devices"] == []
    assert report["no_devices"] == "torch cannot be imported"
    assert {entry["state"] for entry in report["slots"]} == {"stock"}


def test_a_leftover_folder_is_not_taken_for_torch(tmp_path: Path) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    done = running.python("-S", "-m", "ck_patch", "info", "--json", first=[tmp_path])
    report = parsed([done.returncode, done.stdout])
    assert package(report, "torch")["problem"] == "is an empty package"
    assert report["no_devices"]


@needs_host
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("triton", "OSError"),
        ("triton", "SystemExit"),
        ("wrapt", "SyntaxError"),
        ("packaging", "ImportError"),
        ("comfy_kitchen", "SystemExit"),
        ("comfy_kitchen", "RecursionError"),
    ],
)
def test_any_other_broken_package_is_named_and_the_rest_reported(
    warm_interpreter: WarmInterpreter, tmp_path: Path, name: str, failure: str
) -> None:
    (tmp_path / f"{name}.py").write_text(FAILURES[failure], encoding="utf-8")
    report = parsed(warm_interpreter.run(INFO, first=[tmp_path]))
    assert failure in package(report, name)["problem"]
    assert package(report, "torch")["problem"] is None
    assert all(entry["state"] == "stock" and entry["reason"] for entry in report["slots"])
    assert report["host"]
    if name == "comfy_kitchen":
        assert any("the Python that starts ComfyUI" in note for note in report["notes"])


def test_without_any_package_the_report_says_not_installed(
    warm_interpreter: WarmInterpreter, site_packages: SitePackages
) -> None:
    for name in ("comfy_kitchen", "wrapt", "triton"):
        site_packages.remove(name)
    script = running.IN_CHILD.format(arguments=["info"])
    code, printed = warm_interpreter.run(script, site=site_packages.path)
    assert code == 0
    assert "comfy_kitchen  not installed" in printed
    assert "wrapt          not installed" in printed


def test_json_is_alone_on_stdout_whatever_an_import_prints(tmp_path: Path) -> None:
    for name in ("torch", "comfy_kitchen"):
        text = "print('hello from an import')\nraise ImportError\n"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    done = running.ck_patch("info", "--json", first=[tmp_path])
    assert parsed([done.returncode, done.stdout])["packages"]
    assert done.stderr.count("hello from an import") == 2


CUDA_FAILURES = {
    "torch.cuda.is_available = lambda: 1 / 0": "ZeroDivisionError",
    "torch.cuda.is_available = lambda: bool(warnings.warn('driver too old')); "
    "torch.version.cuda = '13.0'": "driver too old",
    "torch.cuda.is_available = lambda: False; torch.version.cuda = '13.0'": "finds no device",
    "torch.cuda.is_available = lambda: False; torch.version.cuda = None": "built without CUDA",
    "del torch.cuda.is_available": "AttributeError",
}


@pytest.mark.parametrize("failure", CUDA_FAILURES)
def test_without_a_gpu_or_with_one_that_fails_the_reason_is_given(
    warm_interpreter: WarmInterpreter, failure: str
) -> None:
    report = parsed(warm_interpreter.run(f"import torch, warnings\n{failure}\n{INFO}"))
    assert report["devices"] == []
    assert CUDA_FAILURES[failure] in report["no_devices"]


NO_GPU = "import torch; torch.cuda.is_available = lambda: False\n"
FAKE_GPUS = """
import torch
from ck_patch import device
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 3
known = {gpu.name: gpu for gpu in device.KNOWN}
found = {0: known["H200"], 2: known["GeForce RTX 3090"]}
device.profile = lambda index, assume: found[index] if index in found else device.broken
"""


def test_each_gpu_gets_its_routes_and_one_that_fails_spoils_no_other(
    warm_interpreter: WarmInterpreter,
) -> None:
    report = parsed(warm_interpreter.run(FAKE_GPUS + INFO))
    hopper, broken, ampere = report["devices"]
    assert (hopper["name"], hopper["architecture"]) == ("H200", "sm_90")
    assert all(choice["path"].startswith("triton ") for choice in hopper["routes"])
    assert "AttributeError" in broken["problem"]
    assert broken["routes"] == broken["paths"] == []
    assert all(choice["path"].startswith("stock") for choice in ampere["routes"])
    assert [path["path"] for path in ampere["paths"]] == ["tuned", "triton", "triton"]
    text = running.IN_CHILD.format(arguments=["info"])
    _, printed = warm_interpreter.run(FAKE_GPUS + text, env={"CK_PATCH_INT8": "triton"})
    assert "GPU 2: GeForce RTX 3090, sm_86, 82 SMs, 99 KiB of shared memory per block" in printed
    assert "GPU 2: GEMMs of the cuda backend" in printed
    assert "  cuda    triton: CK_PATCH_INT8=triton" in printed


def test_each_gpu_has_its_table_and_why_it_is_not_used(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    cache = {"CK_PATCH_CACHE_DIR": str(tmp_path)}
    write = (
        "from ck_patch import table\n"
        f"made = table.for_device(known['H200'], {str(tmp_path)!r})\n"
        "made.put('key', table.Entry('stock', 1, {}, 'run'))\n"
        "assert made.save()\n"
    )
    hopper, broken, ampere = parsed(warm_interpreter.run(FAKE_GPUS + write + INFO, env=cache))[
        "devices"
    ]
    assert (hopper["tuned"]["entries"], hopper["tuned"]["unused"]) == (1, None)
    assert Path(hopper["tuned"]["path"]).is_file()
    assert (ampere["tuned"]["entries"], broken["tuned"]) == (0, None)
    assert not Path(ampere["tuned"]["path"]).exists()
    text = running.IN_CHILD.format(arguments=["info"])
    _, printed = warm_interpreter.run(FAKE_GPUS + text, env=cache | {"CK_PATCH_TUNE": "off"})
    path = hopper["tuned"]["path"]
    assert f"  tuned   1 choice in {path}; not used: CK_PATCH_TUNE=off" in printed
    Path(path).unlink()
    Path(path).mkdir()
    _, printed = warm_interpreter.run(FAKE_GPUS + text, env=cache)
    assert (
        f"0 choices in {path}; not used: the file is not a regular file; new ones cannot be kept: "
        f"{path} is not a regular file\n"
    ) in printed
    Path(path).rmdir()
    Path(path).write_text("{", encoding="utf-8")
    _, printed = warm_interpreter.run(FAKE_GPUS + text, env=cache)
    assert f"0 choices in {path}; not used: the file holds no table that can be read: " in printed


def test_a_cache_folder_where_nothing_can_be_kept_is_said(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cache = {"CK_PATCH_CACHE_DIR": str(tmp_path / "file" / "folder")}
    tuned = parsed(warm_interpreter.run(FAKE_GPUS + INFO, env=cache))["devices"][0]["tuned"]
    assert (tuned["entries"], tuned["unkept"]) == (
        0,
        f"{tuned['path']} cannot be read (Not a directory)",
    )
    assert (tmp_path / "file").read_bytes() == b""


def test_the_routes_are_those_that_were_measured_or_forced(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    cache = {"CK_PATCH_CACHE_DIR": str(tmp_path)}
    write = (
        "from ck_patch import candidates, table\n"
        "from ck_patch.route import GemmCall\n"
        f"made = table.for_device(known['H200'], {str(tmp_path)!r})\n"
        "entries = {(4096, 3072, 3072): 'cfg5', (1024, 4096, 4096): 'gone'}\n"
        "for shape, choice in entries.items():\n"
        "    key = candidates.key(GemmCall(*shape, 'bfloat16'))\n"
        "    made.put(key, table.Entry(choice, shape[0], {}, 'run'))\n"
        "assert made.save()\n"
    )

    def routes(first: str, **variables: str) -> dict[str, tuple[str, str]]:
        script = f"{FAKE_GPUS}torch.version.cuda = '13.0'\n{first}{INFO}"
        report = parsed(warm_interpreter.run(script, env=cache | variables))
        return {
            "x".join(str(route[size]) for size in "mnk"): (route["path"], route["reason"])
            for route in report["devices"][0]["routes"]
        }

    before, after = routes(""), routes(write)
    assert before.pop("4096x3072x3072") == routes("", CK_PATCH_TUNE="off")["4096x3072x3072"]
    measured = after.pop("4096x3072x3072")
    assert measured == ("stock's configuration 5", "measured on this machine")
    # Nobody has a candidate of that name.
    assert after == before
    assert set(routes("", CK_PATCH_FORCE="cfg3").values()) == {
        ("stock's configuration 3", "CK_PATCH_FORCE=cfg3")
    }


def test_a_forced_candidate_is_noted(warm_interpreter: WarmInterpreter) -> None:
    report = parsed(warm_interpreter.run(INFO, env={"CK_PATCH_FORCE": "cfg3"}))
    assert any("CK_PATCH_FORCE=cfg3 is set" in note for note in report["notes"])
    assert not any("FORCE" in note for note in parsed(warm_interpreter.run(INFO))["notes"])


def test_a_torch_for_which_comfyui_turns_the_cuda_backend_off_is_noted(
    warm_interpreter: WarmInterpreter,
) -> None:
    script = f"{FAKE_GPUS}torch.version.cuda = {{!r}}\n{INFO}"
    old = parsed(warm_interpreter.run(script.replace("{!r}", repr("12.8"))))
    new = parsed(warm_interpreter.run(script.replace("{!r}", repr("13.0"))))
    note = (
        "torch was built for CUDA 12.8: ComfyUI disables the CUDA backend below CUDA 13, and uses "
        "the eager backend, which is patched as well"
    )
    assert note in old["notes"]
    assert not any("torch was built for" in note for note in new["notes"])
    assert [report["devices"][2]["routes_of"] for report in (old, new)] == ["eager", "cuda"]
    assert all(choice["path"] != "stock" for choice in old["devices"][2]["routes"])


def test_every_backend_has_a_path_a_reason_and_what_stock_would_do(
    warm_interpreter: WarmInterpreter,
) -> None:
    variables = {"CK_PATCH_ASSUME_DEVICE": "sm_70"}
    (gpu,) = parsed(warm_interpreter.run(NO_GPU + INFO, env=variables))["devices"]
    assert gpu["index"] == -1
    assert [(path["backend"], path["path"]) for path in gpu["paths"]] == [
        ("cuda", "eager"),
        ("triton", "float16"),
        ("eager", "float16"),
    ]
    assert all(path["reason"] for path in gpu["paths"])
    assert "torch._int_mm" in gpu["paths"][2]["stock"]


def test_an_assumed_device_is_shown_and_said_to_be_assumed(
    warm_interpreter: WarmInterpreter,
) -> None:
    def info(assume: str) -> str:
        script = NO_GPU + running.IN_CHILD.format(arguments=["info"])
        _, printed = warm_interpreter.run(script, env={"CK_PATCH_ASSUME_DEVICE": assume})
        return str(printed)

    assumed = info("sm_70")
    assert "CPU: Tesla V100 (assumed), sm_70, 80 SMs" in assumed
    assert "  eager   float16: sm_70 has no INT8 tensor cores" in assumed
    assert "CK_PATCH_ASSUME_DEVICE is set: devices are taken for the GPUs shown" in assumed
    assert "(assumed)" not in info("0=sm_70")
    misspelt = info("volta")
    assert "CK_PATCH_ASSUME_DEVICE='volta' is not of the form sm_70" in misspelt
    assert "is set" not in misspelt


def test_each_gpu_is_assumed_by_its_own_index(warm_interpreter: WarmInterpreter) -> None:
    script = (
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        f"torch.cuda.device_count = lambda: 2\n{INFO}"
    )
    variables = {"CK_PATCH_ASSUME_DEVICE": "0=sm_86,1=sm_103"}
    report = parsed(warm_interpreter.run(script, env=variables))
    assert [gpu["architecture"] for gpu in report["devices"]] == ["sm_86", "sm_103"]


def test_every_known_gpu_has_a_reason_for_every_shape() -> None:
    from ck_patch import preview

    for gpu, backend in product(device.KNOWN, route.BACKENDS):
        found = preview.choices(gpu, "auto", backend=backend)
        assert len(found) == len(preview.SHAPES)
        path = route.device_path(gpu, "auto", backend)
        if not path.ours:
            assert {(choice.path, choice.reason) for choice in found} == {(path.path, path.reason)}
        assert all(choice.reason for choice in found)
        grouped = preview.grouped(found)
        assert {(path, reason) for _, path, reason in grouped} == {
            (choice.path, choice.reason) for choice in found
        }
