"""The `demo` command: the patched slot at work, on this GPU or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ck_patch import prerequisites, results
from ck_patch.prerequisites import Missing
from ck_patch.shapes import Shape


def run(json_path: Path | None, shapes: Sequence[Shape] | None) -> int:
    """Run it and print tables; 1 if a result is not what was promised or nothing can be shown,
    2 if a shape is too large for the interpreter; 0 where every row is stock's, as documented."""
    try:
        return _run(json_path, shapes)
    except Missing as reason:
        return prerequisites.refuse("demo", reason)


def _run(json_path: Path | None, shapes: Sequence[Shape] | None) -> int:
    on_gpu = prerequisites.has_gpu()
    if not on_gpu:
        told = os.environ.get("TRITON_INTERPRET") == "1"
        os.environ["TRITON_INTERPRET"] = "1"
        prerequisites.need_numpy()
        from ck_patch.demo import interpreter

        too_large = [text for shape in shapes or () if (text := interpreter.objection(shape))]
        if too_large:
            print("ck_patch demo: " + "\n".join(too_large), file=sys.stderr)
            return 2
        if "triton" in sys.modules and not told:
            # Its functions are made for the interpreter, or not, when it is imported.
            return subprocess.call(_command(json_path, shapes))
    prerequisites.patch()
    measured = prerequisites.stamped("demo")
    if on_gpu:
        from ck_patch.demo import gpu

        result = gpu.run(shapes)
    else:
        result = interpreter.run(shapes)
    unwritten = results.write({"stamp": measured, **result}, json_path)
    for problem in unwritten:
        print(f"ck_patch demo: {problem}", file=sys.stderr)
    print(f"\n{_conclusion(result)}")
    return 0 if result["ok"] and not unwritten else 1


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
