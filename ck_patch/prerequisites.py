"""What `demo`, `bench` and `tune` ask for before they run: torch, a GPU, a patched comfy_kitchen,
matplotlib for a plot, numpy for the interpreter."""

from __future__ import annotations

import importlib
import sys

import ck_patch
from ck_patch import activation

_SLOT = "cutlass_int8_dequant"


class Missing(Exception):
    """Something without which the command cannot run; the text says what."""


def has_gpu() -> bool:
    """Whether torch has an NVIDIA GPU; raises Missing where there is no torch."""
    try:
        import torch

        return torch.version.hip is None and torch.cuda.is_available()
    except (Exception, SystemExit) as error:
        reason = f"torch cannot be imported ({type(error).__name__}: {error})"
        raise Missing(reason) from None


def need_matplotlib() -> None:
    """Raises Missing where nothing can be drawn: before minutes of measuring."""
    _need("matplotlib.figure", "--plot")


def need_numpy() -> None:
    """Raises Missing where Triton's interpreter cannot run."""
    _need("numpy", "Triton's interpreter")


def _need(module: str, who: str) -> None:
    package = module.partition(".")[0]
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise Missing(
            f"{who} needs {package} ({type(error).__name__}: {error}); "
            f"install it with {activation.pip_install(package)}"
        ) from None


def patch() -> None:
    """Import comfy_kitchen and patch it; raises Missing unless the GEMM slot is ours then."""
    try:
        import comfy_kitchen  # noqa: F401
    except (Exception, SystemExit) as error:
        reason = f"comfy_kitchen cannot be imported ({type(error).__name__}: {error})"
        raise Missing(reason) from None
    # Start-up has done so where ck_patch is installed; this makes it true of a checkout too.
    ck_patch.enable()
    (slot,) = (slot for slot in ck_patch.status().slots if slot.name == _SLOT)
    if slot.state != "patched":
        raise Missing(f"{slot.name} is not patched: {slot.reason}")


def stamped(command: str) -> dict[str, str | None]:
    """The stamp of this run, printed as its first line."""
    from ck_patch.stamp import facts, stamp

    found = stamp()
    print(f"ck_patch {command}: {facts(found)}", flush=True)
    return found


def refuse(command: str, reason: Missing) -> int:
    """Say on standard error why the command cannot run; its exit code."""
    print(f"ck_patch {command} cannot run: {reason}", file=sys.stderr)
    print("`python -m ck_patch info` says more.", file=sys.stderr)
    return 1


def breakers() -> str:
    """Why ours went back to stock, if it did; `ck_patch.disable()` forgets, so ask before."""
    return "; ".join(breaker.reason for breaker in ck_patch.status().breakers)
