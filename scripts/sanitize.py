"""Runs every kernel of ours under compute-sanitizer: memcheck, racecheck, initcheck, synccheck.

Usage, from a checkout with the package installed, on a machine with an NVIDIA GPU and the CUDA
toolkit: python scripts/sanitize.py [--json FILE] [--plant] [--tools TOOL ...]

What runs is `tests/gpu/sanitized.py`: odd sizes, each tensor alone in an allocation that ends where
it ends. First without a tool, in several processes, to fill Triton's cache; then each tool in a
process of its own, all at once. The tools look at our kernels alone, by their names: what torch
launches is left out. Beside each of them one finds what was planted for it (`--plant`: nothing
else), or its "no error" would mean nothing; synccheck has nothing planted.

The exit status is 0 if all is clean and all that was planted was found, 1 if not, 2 if there is no
compute-sanitizer or GPU, or the one refuses the other.

compute-sanitizer 2025.3, of CUDA 13.0, sees neither the addresses nor the reads of TMA loads, which
the hardware keeps within their tensor; memcheck does from 2026.2 on, and initcheck from 2025.4 on.
Its racecheck may report races on mbarriers (until 2025.4) and warpgroups (until 2026.1) that are
none, by its release notes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from ck_patch import tables
from ck_patch.stamp import stamp

REPOSITORY = Path(__file__).resolve().parent.parent
CASES = (sys.executable, "-m", "tests.gpu.sanitized")
TOOLS: Mapping[str, tuple[str, ...]] = {
    # Without the padding, what lies behind an allocation may be another one.
    "memcheck": ("--padding", "65536", "--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
"""Their own options."""
COMMON = (
    *("--error-exitcode", "9", "--target-processes", "application-only"),
    # After an error the cases go on. Importing torch takes longer than the usual ten seconds.
    *("--destroy-on-device-error", "kernel", "--launch-timeout", "120", "--show-backtrace", "no"),
)
PROCESSES = 12
"""At the most, that compile: each has a CUDA context of some hundred MB."""

SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", re.MULTILINE)
OFFSET = re.compile(r"\+?0x[0-9a-f]+")


@dataclass(frozen=True)
class Job:
    """One tool on the kernels, or on what was planted for it."""

    tool: str
    planted: bool

    @property
    def on(self) -> str:
        return "planted errors" if self.planted else "kernels"

    @property
    def port(self) -> int:
        """The first of sixteen by which the tool may speak to its process."""
        return 49152 + 16 * (2 * list(TOOLS).index(self.tool) + self.planted)


@dataclass(frozen=True)
class Row:
    """What a job came to; no `errors` if the tool did not say."""

    tool: str
    on: str
    errors: int | None
    launches: int
    seconds: float
    verdict: str
    reports: Mapping[str, int]

    @property
    def good(self) -> bool:
        return self.verdict in ("clean", "found")


class Refused(Exception):
    """There is nothing to run with; the message says what is missing."""


def find_sanitizer(named: str | None) -> str:
    """The command; raises Refused."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, toolkits)])
    found = shutil.which(named or "compute-sanitizer", path=path)
    if found is None:
        raise Refused(
            f"{named or 'compute-sanitizer'} was not found. It comes with the CUDA toolkit: put it "
            "on PATH, or name it with --sanitizer"
        )
    return found


def run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """Exit status and output; what takes longer is ended, with all that it has started."""
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CK_PATCH": "0"}
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nended after {timeout:.0f} s"
    return process.returncode, output


def launches(output: str) -> Counter[str]:
    """By kernel, from the last line of JSON of the cases; empty if they did not get there."""
    for line in reversed(output.splitlines()):
        if line.startswith('{"launches": '):
            return Counter(json.loads(line)["launches"])
    return Counter()


def compile_all(timeout: float) -> Counter[str]:
    """Run all cases without a tool, which compiles them; the number of launches by kernel."""
    count = min(PROCESSES, os.cpu_count() or 1)
    commands = [(*CASES, "--part", f"{index}/{count}") for index in range(count)]
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(partial(run, timeout=timeout), commands))
    for code, output in results:
        if code:
            raise SystemExit(f"{output}\nthe cases fail without a tool")
    return sum((launches(output) for _, output in results), Counter[str]())


def reports(output: str) -> Counter[str]:
    """The distinct reports of a tool, without offsets and addresses, and how often it made them."""
    lines = [line.removeprefix("=========") for line in output.splitlines() if line[:9] == "=" * 9]
    found: Counter[str] = Counter()
    for line, following in pairwise([*lines, ""]):
        text = line.strip()
        if line[:2] == " " + text[:1] and "SUMMARY" not in text and text != "COMPUTE-SANITIZER":
            place = following.strip() if following.strip()[:3] in ("at ", "and") else ""
            found[OFFSET.sub("", f"{text} {place}".strip())] += 1
    return found


def verdict(job: Job, code: int, output: str, expected: int) -> tuple[str, int | None]:
    """What a run means, and the errors that the tool counted; all cases are `expected` launches."""
    counts = [int(count) for count in SUMMARY.findall(output)]
    if not counts:
        return ("refused" if "not supported" in output.lower() else "did not end"), None
    errors = sum(counts)
    if job.planted:
        return ("found" if errors and "_planted_" in output else "not found"), errors
    if errors:
        return "errors", errors
    # An exit status alone would not show that a process ended early.
    complete = code == 0 and launches(output).total() == expected
    return ("clean" if complete else "the cases failed"), errors


def check(sanitizer: str, kernels: Counter[str], timeout: float, job: Job) -> Row:
    """Run a tool, which looks at these kernels alone; they come with their launches."""
    names = [*kernels, "_planted_"]
    filters = [option for name in names for option in ("--kernel-name", f"kns={name}")]
    options = [*COMMON, *TOOLS[job.tool], "--port", str(job.port), *filters]
    cases = [*CASES, "--plant"] if job.planted else CASES
    start = time.monotonic()
    code, output = run([sanitizer, "--tool", job.tool, *options, *cases], timeout)
    seconds = round(time.monotonic() - start, 1)
    says, errors = verdict(job, code, output, kernels.total())
    found = dict(reports(output).most_common(20))
    row = Row(job.tool, job.on, errors, launches(output).total(), seconds, says, found)
    if not row.good:
        print(f"\n{job.tool} on {job.on}: {says}\n{_abridged(output)}", flush=True)
    return row


def _abridged(output: str, lines: int = 40) -> str:
    whole = output.splitlines()
    if len(whole) <= 2 * lines:
        return output
    return "\n".join([*whole[:lines], f"... {len(whole) - 2 * lines} lines ...", *whole[-lines:]])


def jobs(tools: Sequence[str], plant: bool) -> list[Job]:
    """What to run, the planted errors first; nothing is planted for synccheck."""
    planted = [Job(tool, True) for tool in tools if tool != "synccheck"]
    return planted if plant else [*planted, *(Job(tool, False) for tool in tools)]


def show(rows: Sequence[Row]) -> None:
    cells = [
        [
            row.tool,
            row.on,
            str(row.launches or "-"),
            "-" if row.errors is None else str(row.errors),
            f"{row.seconds:.0f}",
            row.verdict,
        ]
        for row in rows
    ]
    headers = ("tool", "on", "launches", "errors", "s", "verdict")
    tables.show("compute-sanitizer", headers, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--plant", action="store_true", help="look for the planted errors alone")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), metavar="TOOL")
    parser.add_argument("--sanitizer", metavar="COMMAND", help="compute-sanitizer, if not on PATH")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for each process")
    given = parser.parse_args(arguments)
    todo = jobs(given.tools, given.plant)
    if not todo:
        parser.error("nothing is planted for synccheck")
    start = time.monotonic()
    try:
        sanitizer = find_sanitizer(given.sanitizer)
        _, version = run([sanitizer, "--version"], 30)
        import torch

        if not torch.cuda.is_available():
            raise Refused("there is no GPU that torch can use")
    except Refused as why:
        print(why, file=sys.stderr)
        return 2
    kernels = Counter[str]()
    if not given.plant:
        kernels = compile_all(given.timeout)
        spent = time.monotonic() - start
        print(f"{kernels.total()} launches without a tool: {spent:.0f} s", flush=True)
    with ThreadPoolExecutor(len(todo)) as pool:
        rows = list(pool.map(partial(check, sanitizer, kernels, given.timeout), todo))
    show(rows)
    print(f"{time.monotonic() - start:.0f} s in all")
    if given.json is not None:
        document = {
            "stamp": stamp(),
            "sanitizer": version.strip().splitlines()[-1],
            "launches": kernels,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if any(row.verdict == "refused" for row in rows):
        print("compute-sanitizer refuses this device: see above", file=sys.stderr)
        return 2
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
