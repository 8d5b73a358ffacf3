"""The command that runs compute-sanitizer, without one: what it needs, and how it reads it."""

from __future__ import annotations

import os
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.commands.running import python
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "sanitize.py"
LAUNCHES = '{"launches": {"_a_kernel": 2, "_b_kernel": 3}}\n'
CLEAN = f"========= COMPUTE-SANITIZER\n{LAUNCHES}========= ERROR SUMMARY: 0 errors\n"
NO_RACE = CLEAN.replace(
    "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
)
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _a_kernel+0x3e0 in a.py:70
=========     and Read access at _a_kernel+0x420 in a.py:71 [12 hazards]
=========
========= Error: Race reported between Write access at _a_kernel+0x4e0 in a.py:70
=========     and Read access at _a_kernel+0x520 in a.py:71 [12 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
BEYOND = f"""========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 1 bytes
=========     at _b_kernel+0x150 in b.py:9
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f44 is out of bounds
=========
{LAUNCHES}========= ERROR SUMMARY: 1 error
"""
REFUSED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to\n"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_a_missing_sanitizer_is_named_with_what_to_do() -> None:
    done = python(str(SCRIPT), "--sanitizer", "no-such-sanitizer")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "no-such-sanitizer was not found. It comes with the CUDA toolkit: put it on PATH, or name "
        "it with --sanitizer\n"
    )


def test_each_tool_but_one_has_an_error_planted_for_it(script: dict[str, Any]) -> None:
    tools = list(script["TOOLS"])
    assert tools == ["memcheck", "racecheck", "initcheck", "synccheck"]
    named = [(job.tool, job.planted) for job in script["jobs"](tools, False)]
    assert named == [(tool, True) for tool in tools[:3]] + [(tool, False) for tool in tools]
    assert [job.tool for job in script["jobs"](tools, True)] == tools[:3]
    done = python(str(SCRIPT), "--plant", "--tools", "synccheck")
    assert done.returncode == 2
    assert "nothing is planted for synccheck" in done.stderr


@pytest.mark.parametrize(
    ("planted", "code", "output", "expected"),
    [
        (False, 0, CLEAN, ("clean", 0)),
        (False, 0, NO_RACE, ("clean", 0)),
        (False, 9, RACE, ("errors", 2)),
        (False, 9, BEYOND, ("errors", 1)),
        (False, 1, CLEAN, ("the cases failed", 0)),
        (False, 0, CLEAN.replace("3", "2"), ("the cases failed", 0)),
        (False, 0, CLEAN.replace(LAUNCHES, ""), ("the cases failed", 0)),
        (False, -9, LAUNCHES, ("did not end", None)),
        (False, 1, REFUSED, ("refused", None)),
        (True, 9, RACE.replace("_a_kernel", "_planted_race_kernel"), ("found", 2)),
        (True, 9, RACE, ("not found", 2)),
        (True, 0, CLEAN, ("not found", 0)),
        (True, 1, REFUSED, ("refused", None)),
    ],
)
def test_the_verdict_is_what_the_tool_and_the_cases_say(
    script: dict[str, Any],
    planted: bool,
    code: int,
    output: str,
    expected: tuple[str, int | None],
) -> None:
    job = script["Job"]("memcheck", planted)
    assert script["verdict"](job, code, output, 5) == expected


def test_equal_reports_are_told_once(script: dict[str, Any]) -> None:
    race = "Error: Race reported between Write access at _a_kernel in a.py:70 "
    race += "and Read access at _a_kernel in a.py:71 [12 hazards]"
    assert script["reports"](RACE) == {race: 2}
    invalid = "Invalid __global__ write of size 1 bytes at _b_kernel in b.py:9"
    assert script["reports"](BEYOND) == {invalid: 1}
    assert script["reports"](CLEAN) == {}


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
def test_a_tool_is_told_which_kernels_to_look_at(
    script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a stand-in that prints what it was given."""
    stand_in = tmp_path / "compute-sanitizer"
    stand_in.write_text('#!/bin/sh\necho "$@"\necho "========= ERROR SUMMARY: 0 errors"\n')
    stand_in.chmod(0o755)
    job = script["Job"]("memcheck", False)
    kernels = Counter({"_a_kernel": 2, "_b_kernel": 3})
    row = script["check"](str(stand_in), kernels, 60.0, job)
    assert (row.verdict, row.errors, row.launches) == ("the cases failed", 0, 0)
    printed = capsys.readouterr().out
    assert "--tool memcheck --error-exitcode 9" in printed
    assert "--kernel-name kns=_a_kernel --kernel-name kns=_b_kernel" in printed
    assert "-m tests.gpu.sanitized" in printed


def test_a_process_that_hangs_is_ended_with_what_it_started(script: dict[str, Any]) -> None:
    code, output = script["run"](["sh", "-c", "echo begun; sleep 60; echo done"], 0.5)
    assert code != 0
    assert output == "begun\n\nended after 0 s"
