"""An environment and entries, and a process that uses a table of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ck_patch.environment import FORMAT
from ck_patch.table import Entry
from tests.conftest import REPOSITORY

HERE: dict[str, str | int] = {
    "format": FORMAT,
    "device": "NVIDIA H200",
    "capability": "sm_90",
    "sm_count": 132,
    "driver": "580.65.06",
    "torch": "2.11.0+cu130",
    "triton": "3.6.0",
    "comfy_kitchen": "0.2.40",
    "kernels": "0123456789ab",
}
KEY = "cuda 4096x3072x3072 bfloat16 no bias"
OTHER = "cuda 4096x12288x3072 bfloat16 float32 bias residual"
STOCK = Entry("stock", 4096, {"stock": 101.5, "cfg0": 120.25}, "run")
OURS = Entry("triton:tma-128x128x128-w4-s3-g16", 4032, {"stock": 90.0}, "run")
SWEPT = Entry("cfg0", 4096, {"cfg0": 80.0, "stock": 100.0}, "sweep")


def document(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def written(entries: Mapping[str, Any], **changed: Any) -> str:
    """A document as another program might write it."""
    return json.dumps({"format": FORMAT, "environment": HERE, "entries": entries, **changed})


def item(**changed: Any) -> dict[str, Any]:
    """An entry in a document."""
    return {"choice": "stock", "m": 4096, "us": {"stock": 1.0}, "source": "run", **changed}


def start(script: str, *arguments: object, **environ: str) -> subprocess.Popen[str]:
    """A Python process that runs `script`, with pipes for what it reads and writes."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "CK_PATCH": "0", **environ},
    )


def finish(process: subprocess.Popen[str], said: str = "") -> str:
    """What the process wrote, after it was told `said` and ended without an error."""
    out, err = process.communicate(said, timeout=60)
    assert (process.returncode, err) == (0, ""), err
    return out
