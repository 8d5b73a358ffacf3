"""The `demo` command: the patched slot at work, on this GPU or in Triton's interpreter."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ck_patch
from ck_patch import activation
from ck_patch.shapes import Shape

_SLOT = "cutlass_int8_dequant"


def run(json_path: Path | None, shapes: Sequence[Shape] | None) -> int:
    """Run it and print tables; 1 if a result is not what was promised or nothing can be shown,
    2 if a shape is too large for the interpreter; 0 where every row is stock's, as documented."""
    try:
        import torch

        on_gpu = torch.version.hip is None and torch.cuda.is_available()
    except (Exception, SystemExit) as error:
        return _cannot(f"torch cannot be imported ({type(error).__name__}: {error})")
    if not on_gpu:
        told = os.environ.get("TRITON_INTERPRET") == "1"
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            importlib.import_module("numpy")
        except (Exception, SystemExit) as error:
            return _cannot(
                f"Triton's interpreter needs numpy ({type(error).__name__}: {error}); "
                f"install it with {activation.pip_install('numpy')}"
            )
        from ck_patch.demo import interpreter

        too_large = [text for shape in shapes or () if (text := interpreter.objection(shape))]
        if too_large:
            print("ck_patch demo: " + "\n".join(too_large), file=sys.stderr)
            return 2
        if "triton" in sys.modules and not told:
            # Its functions are made for the interpreter, or not, when it is imported.
            return subprocess.call(_command(json_path, shapes))
    try:
        import comfy_kitchen  # noqa: F401
    except (Exception, SystemExit) as error:
        return _cannot(f"comfy_kitchen cannot be imported ({type(error).__name__}: {error})")
    # Start-up has done so where ck_patch is installed; this makes it true of a checkout too.
    ck_patch.enable()
    status = ck_patch.status()
    (slot,) = (slot for slot in status.slots if slot.name == _SLOT)
    if slot.state != "patched":
        return _cannot(f"{slot.name} is not patched: {slot.reason}")
    from ck_patch.stamp import stamp

    measured = stamp()
    print(
        "ck_patch demo: " + ", ".join(f"{name} {text}" for name, text in measured.items() if text)
    )
    if on_gpu:
        from ck_patch.demo import gpu

        result = gpu.run(shapes)
    else:
        result = interpreter.run(shapes)
    if json_path is not None:
        document = {"stamp": measured, **result}
        text = json.dumps(document, indent=1, allow_nan=False)
        json_path.write_text(text + "\n", encoding="utf-8")
    print(f"\n{_conclusion(result)}")
    return 0 if result["ok"] else 1


def _conclusion(result: Mapping[str, Any]) -> str:
    if not result["ok"]:
        return "NOT every result was as promised."
    if not result["ours_ran"]:
        return "Nothing differs, but nothing of ours ran either: every row is stock's."
    return "Every result was as promised."


def _command(json_path: Path | None, shapes: Sequence[Shape] | None) -> list[str]:
    command = [sys.executable, "-m", "ck_patch", "demo"]
    if json_path is not None:
        command += ["--json", str(json_path)]
    for m, n, k in shapes or ():
        command += ["--shape", f"{m}x{n}x{k}"]
    return command


def _cannot(reason: str) -> int:
    print(f"ck_patch demo cannot run: {reason}", file=sys.stderr)
    print("`python -m ck_patch info` says more.", file=sys.stderr)
    return 1
