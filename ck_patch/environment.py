"""What a measured choice is valid for: the device, and everything that decides how fast it runs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from ck_patch.device import DeviceProfile

FORMAT = 1
"""Of keys, entries and files; a higher number is written by a newer ck_patch."""

UNKNOWN = "unknown"

Environment = Mapping[str, str | int]

# These may differ between machines of the same kind.
_SOFTWARE = frozenset({"driver", "torch", "triton"})

_PACKAGE = Path(__file__).parent
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_WINDOWS = sys.platform == "win32"


def environment(profile: DeviceProfile) -> dict[str, str | int]:
    """What a table is valid for; what cannot be found out is UNKNOWN. Imports torch and Triton."""
    return {
        "format": FORMAT,
        "device": profile.name,
        "capability": profile.architecture,
        "sm_count": profile.sm_count,
        "driver": _driver(),
        "torch": _module_version("torch"),
        "triton": _module_version("triton"),
        "comfy_kitchen": _comfy_kitchen_version(),
        "kernels": _kernels_hash(),
    }


def fingerprint(environment: Environment) -> str:
    """12 hexadecimal digits that another environment does not have."""
    text = json.dumps(dict(environment), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def table_name(environment: Environment) -> str:
    """The name of the table file of an environment, for example `tuned-sm_90-0123456789ab.json`."""
    return f"tuned-{environment['capability']}-{fingerprint(environment)}.json"


def differences(ours: Environment, theirs: Mapping[str, object]) -> list[str]:
    """Why what was measured in `theirs` says nothing about `ours`, a phrase for each difference:
    another device, kernels, comfy-kitchen or format. Driver, torch and Triton may differ."""
    return [
        f"{name} is {theirs.get(name)!r}, here {ours.get(name)!r}"
        for name in sorted({*ours, *theirs} - _SOFTWARE)
        if theirs.get(name) != ours.get(name)
    ]


def _module_version(name: str) -> str:
    # The distribution's version lacks the CUDA version in torch's own wheels, and Triton comes as
    # several distributions. An installation that is broken can raise anything.
    try:
        return str(importlib.import_module(name).__version__)
    except (Exception, SystemExit):
        return UNKNOWN


def _comfy_kitchen_version() -> str:
    try:
        return str(metadata.version("comfy-kitchen"))
    except Exception:
        return UNKNOWN


@functools.cache
def _kernels_hash() -> str:
    """Of the sources that decide what a candidate of some name runs, whatever their line ends."""
    digest = hashlib.sha256()
    try:
        files = sorted((_PACKAGE / "kernels").glob("*.py"), key=lambda file: file.name)
        if not files:
            return UNKNOWN
        for file in [*files, _PACKAGE / "tiles.py"]:
            source = file.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{file.name} {len(source)}\n".encode() + source)
    except OSError:
        return UNKNOWN
    return digest.hexdigest()[:12]


@functools.cache
def _driver() -> str:
    """The driver's version; that of its CUDA (`CUDA 13.0`) where NVML is missing."""
    for ask in (_driver_by_file, _driver_by_nvml, _driver_by_cuda):
        with contextlib.suppress(OSError, AttributeError, ValueError):
            version = ask()
            if version:
                return version
    return UNKNOWN


def _driver_by_file() -> str | None:
    # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (...)"
    text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^NVRM version:.*?\s([0-9]+(?:\.[0-9]+)+)(?:\s|$)", text, re.MULTILINE)
    return match and match[1]


def _driver_by_nvml() -> str | None:
    nvml = ctypes.CDLL("nvml.dll" if _WINDOWS else "libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        version = ctypes.create_string_buffer(96)
        failed = nvml.nvmlSystemGetDriverVersion(version, len(version))
        return None if failed else version.value.decode()
    finally:
        nvml.nvmlShutdown()


def _driver_by_cuda() -> str | None:
    cuda = ctypes.CDLL("nvcuda.dll" if _WINDOWS else "libcuda.so.1")
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value < 1000:
        return None
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
