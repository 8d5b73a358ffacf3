"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import ck_patch


def stamp() -> dict[str, str | None]:
    """GPU, driver, versions, commit and date; what cannot be found is None.

    The commit is that of a checkout this package runs from, or the value of GIT_COMMIT: a
    wheel does not know where it was built.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": _gpu(),
        "driver": _driver(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton") or _version("triton-windows"),
        "comfy_kitchen": _version("comfy-kitchen"),
        "ck_patch": ck_patch.__version__,
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
    }


def facts(stamp: Mapping[str, str | None]) -> str:
    """What is known of a stamp, in one line."""
    return ", ".join(f"{name} {text}" for name, text in stamp.items() if text)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _output(*command: str, cwd: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if lines else None


def _driver() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str | None:
    return _output("git", "rev-parse", "--short=12", "HEAD", cwd=Path(__file__).parent)
