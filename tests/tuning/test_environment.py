"""What a measurement is valid for: every part is there, found cheaply, and tells files apart."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ck_patch import environment as module
from ck_patch.device import KNOWN
from ck_patch.environment import differences, environment, fingerprint, table_name
from tests.conftest import REPOSITORY
from tests.tuning.examples import HERE


def no_library(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


H200 = next(gpu for gpu in KNOWN if gpu.name == "H200")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cached = module._driver, module._kernels_hash
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.11.0+cu130"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr(metadata, "version", {"comfy-kitchen": "0.2.40"}.__getitem__)
    monkeypatch.setattr(module, "_driver", lambda: "580.65.06")
    monkeypatch.setattr(module, "_kernels_hash", lambda: "0123456789ab")


@pytest.mark.usefixtures("installed")
def test_it_holds_device_driver_versions_and_sources() -> None:
    assert environment(H200) == {**HERE, "device": "H200"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("changed", [name for name in HERE if name != "format"])
def test_each_part_makes_another_file(changed: str) -> None:
    here = environment(H200)
    other = {**here, changed: "sm_86" if isinstance(here[changed], str) else 131}
    assert re.fullmatch(r"tuned-sm_90-[0-9a-f]{12}\.json", table_name(here))
    assert table_name(other) != table_name(here)
    assert fingerprint(dict(reversed(list(here.items())))) == fingerprint(here)


@pytest.mark.usefixtures("installed")
def test_a_partition_of_a_gpu_is_another_device() -> None:
    part = replace(H200, name="NVIDIA H200 MIG 1g.18gb", sm_count=16)
    assert table_name(environment(part)) != table_name(environment(H200))


def test_what_is_missing_or_broken_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(module, "_DRIVER_FILE", Path("/nonexistent"))
    monkeypatch.setattr(module, "_PACKAGE", Path("/nonexistent"))
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    found = environment(KNOWN[0])
    assert {name for name, value in found.items() if value == module.UNKNOWN} == {
        *("driver", "torch", "triton", "comfy_kitchen", "kernels")
    }
    assert table_name(found).startswith("tuned-sm_60-")


class Nvml:
    """A driver's management library, as ctypes shows it."""

    def __init__(self, name: str) -> None:
        if "nvml" not in name and "nvidia-ml" not in name:
            raise OSError(name)

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: int) -> int:
        assert size >= 80
        buffer.value = b"576.52"
        return 0

    def nvmlShutdown(self) -> int:
        return 0


class Cuda:
    """A driver's CUDA library, without NVML beside it."""

    def __init__(self, name: str) -> None:
        if "cuda" not in name:
            raise OSError(name)

    def cuDriverGetVersion(self, version: Any) -> int:
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 13020
        return 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.2.0\n"
            "GCC version: 11.4.0\n",
            "540.2.0",
        ),
        ("GCC version: 11.4.0\n", "576.52"),
        ("", "576.52"),
    ],
)
def test_the_driver_is_read_from_its_file_or_asked_of_nvml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, version: str
) -> None:
    file = tmp_path / "version"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(module, "_DRIVER_FILE", file)
    monkeypatch.setattr(ctypes, "CDLL", Nvml)
    assert module._driver() == version


def test_without_nvml_the_driver_is_named_by_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DRIVER_FILE", Path("/nonexistent"))
    monkeypatch.setattr(ctypes, "CDLL", Cuda)
    assert module._driver() == "CUDA 13.2"


def test_the_driver_is_asked_once_and_without_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(name: str) -> Any:
        asked.append(name)
        return no_library(name)

    monkeypatch.setattr(module, "_DRIVER_FILE", Path("/nonexistent"))
    monkeypatch.setattr(ctypes, "CDLL", ask)
    monkeypatch.delattr(subprocess, "Popen")
    assert [module._driver() for _ in range(3)] == [module.UNKNOWN] * 3
    assert len(asked) == 2


def hash_of(package: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "_PACKAGE", package)
    module._kernels_hash.cache_clear()
    return module._kernels_hash()


def test_the_sources_of_kernels_and_tiles_count_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "ck_patch"
    shutil.copytree(REPOSITORY / "ck_patch", package)
    known = hash_of(package, monkeypatch)
    assert re.fullmatch("[0-9a-f]{12}", known)
    for file in [package / "tiles.py", *(package / "kernels").glob("*.py"), package / "route.py"]:
        source = file.read_bytes()
        file.write_bytes(source + b"\n")
        assert (hash_of(package, monkeypatch) == known) == (file.name == "route.py"), file.name
        file.write_bytes(source.replace(b"\n", b"\r\n"))
        assert hash_of(package, monkeypatch) == known
        file.write_bytes(source)
    shutil.rmtree(package / "kernels")
    assert hash_of(package, monkeypatch) == module.UNKNOWN


def test_an_installed_copy_has_the_hash_of_the_checkout(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "ck_patch", tmp_path / "ck_patch")
    script = "from ck_patch import environment as e; print(e._kernels_hash(), e.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CK_PATCH": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split(maxsplit=1) == [
        module._kernels_hash(),
        f"{tmp_path / 'ck_patch' / 'environment.py'}\n",
    ]


def test_only_driver_torch_and_triton_may_differ_between_machines() -> None:
    software = {"driver": "590.1", "torch": "2.12.0", "triton": "3.7.0"}
    assert differences(HERE, {**HERE, **software}) == []
    assert differences(HERE, {**HERE, **software, "sm_count": 114, "kernels": "x"}) == [
        "kernels is 'x', here '0123456789ab'",
        "sm_count is 114, here 132",
    ]
    assert differences(HERE, {}) == [
        f"{name} is None, here {HERE[name]!r}"
        for name in ("capability", "comfy_kitchen", "device", "format", "kernels", "sm_count")
    ]
    assert differences(HERE, {**HERE, "tpc": 2}) == ["tpc is 2, here None"]
