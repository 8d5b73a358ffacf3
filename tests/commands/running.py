"""Runs the command line in an interpreter of its own, or in a forked child with torch loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import REPOSITORY

# For WarmInterpreter.run: `result` is the exit code and what was printed.
IN_CHILD = """
import contextlib, io, json
from ck_patch import cli
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    try:
        code = cli.main({arguments!r})
    except SystemExit as stop:
        code = stop.code
result = [code, printed.getvalue()]
"""


def python(
    *arguments: str, first: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on this checkout; `first` goes to the head of its path, `variables` to its
    environment, which has no other variable of ours."""
    env = {name: text for name, text in os.environ.items() if not name.startswith("CK_PATCH")}
    env.pop("TRITON_INTERPRET", None)
    env["PYTHONPATH"] = os.pathsep.join(map(str, [*first, REPOSITORY]))
    return subprocess.run(
        [sys.executable, *arguments], env=env | variables, capture_output=True, text=True
    )


def ck_patch(
    *arguments: str, first: Sequence[Path] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m ck_patch` with these arguments."""
    return python("-m", "ck_patch", *arguments, first=first, **variables)
