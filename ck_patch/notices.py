"""The one line a device gets, once per process, when INT8 takes a path that is slow for it, or that
is not the one forced."""

from __future__ import annotations

import sys

from ck_patch import log, settings
from ck_patch.device import DeviceProfile
from ck_patch.route import CUDA_BACKEND, Backend, DevicePath

_VERBS = {
    "stock": "stay on stock's path",
    "triton": "run in our Triton GEMM",
    "float16": "run in FP16",
    "bfloat16": "run in BF16",
    "eager": "go to the eager backend",
}


def say(device: int, gpu: DeviceProfile, backend: Backend, path: DevicePath) -> None:
    """Log which path the INT8 linears of `backend` take on a device, why, and what is faster.

    Nothing where that is the best path the device has and stock's as well, or where it only
    replaces a path that was not slow: those come without advice, and as `stock` or with our GEMM.
    But a candidate that CK_PATCH_FORCE names has no part in a path without our GEMM, and its user
    is told so.
    """
    forced = None if path.ours else settings.load().force
    if forced == path.path == "stock":
        forced = None
    if not (path.advice or forced) and (path.ours or path.path == "stock"):
        return
    where = f"cuda:{device}" if device >= 0 else "cpu"
    line = (
        f"{where} ({gpu.name}, {gpu.architecture}): INT8 linears of the {backend} backend "
        f"{_VERBS[path.path]}: {path.reason}"
    )
    if path.advice:
        line += f"; faster: {path.advice}"
    obstacle = cuda_backend_obstacle() if path.advice == CUDA_BACKEND else None
    if obstacle:
        line += f" ({obstacle})"
    if forced:
        line += f"; {settings.FORCE.name}={forced} has no effect"
    log.once(f"slow path {device} {backend}", line)


def cuda_backend_obstacle() -> str | None:
    """Why ComfyUI does not use comfy_kitchen's CUDA backend, if the build of torch says so."""
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    major = str(cuda or "").partition(".")[0]
    if not major.isdigit() or int(major) >= 13:
        return None
    return f"torch was built for CUDA {cuda}: ComfyUI disables the CUDA backend below CUDA 13"
