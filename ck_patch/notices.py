"""The one line a device gets, once per process, when INT8 takes a path that is slow for it."""

from __future__ import annotations

import sys

from ck_patch import log
from ck_patch.device import DeviceProfile
from ck_patch.route import Backend, DevicePath


def say(device: int, gpu: DeviceProfile, backend: Backend, path: DevicePath) -> None:
    """Log which path the INT8 linears of `backend` take on a device, why, and what is faster.

    Nothing where the path is the best that the device has: the eager backend is never that where
    comfy_kitchen's CUDA backend could run.
    """
    if not path.advice and path.path not in ("float16", "bfloat16", "eager"):
        return
    where = f"cuda:{device}" if device >= 0 else "cpu"
    parts = [f"{where} ({gpu.name}, {gpu.architecture}): INT8 linears of the {backend} backend"]
    parts.append(f"take the path {path.path}, because {path.reason}")
    if path.advice:
        parts.append(f"faster: {path.advice}")
    cause = _cause(backend)
    if cause:
        parts.append(cause)
    log.once(f"slow path {device} {backend}", "; ".join(parts))


def _cause(backend: Backend) -> str:
    """Why comfy_kitchen's CUDA backend is not in use, where the build of torch says so."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    major = str(cuda or "").partition(".")[0]
    if backend == "cuda" or not major.isdigit() or int(major) >= 13:
        return ""
    return f"torch was built for CUDA {cuda}: ComfyUI disables comfy_kitchen's CUDA backend there"
