"""What ck_patch adds to `python -c pass`: paired, interleaved medians.

Usage: python scripts/bench_startup.py [--pairs N] [PYTHON ...]

For each Python (this one if none is named) it makes a temporary environment with the files of the
package in site-packages, as the wheel puts them there, and a second one without. Each round starts
both once, in alternating order. The promise: at most 2 ms or 10 % more.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PROMISE_MS, PROMISE_PERCENT = 2.0, 10.0


def make_environment(python: str, path: Path, *, with_package: bool) -> Path:
    """An environment without pip; its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(path)], check=True)
    interpreter = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if with_package:
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        printed = subprocess.check_output([str(interpreter), "-c", where], text=True)
        site_packages = Path(printed.strip())
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "ck_patch", site_packages / "ck_patch", ignore=ignore)
        for name in ("ck_patch.pth", "ck_patch.start"):
            shutil.copy2(REPOSITORY / name, site_packages)
        # pip does this on install.
        compile_all = ["-m", "compileall", "-q", str(site_packages)]
        subprocess.run([str(interpreter), *compile_all], check=True)
    return interpreter


def start_ms(interpreter: Path, env: dict[str, str]) -> float:
    """One start, in milliseconds."""
    begin = time.perf_counter()
    subprocess.run([str(interpreter), "-c", "pass"], check=True, env=env)
    return (time.perf_counter() - begin) * 1e3


@dataclass(frozen=True)
class Medians:
    """Medians in ms; `added` is that of the differences within each round."""

    without: float
    with_it: float
    switched_off: float
    added: float


def measure(python: str, pairs: int, folder: Path) -> Medians:
    """Start an environment with the package and one without in turn."""
    without = make_environment(python, folder / "without", with_package=False)
    with_it = make_environment(python, folder / "with", with_package=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "CK_PATCH"))}
    variants = [(without, kept), (with_it, kept), (with_it, {**kept, "CK_PATCH": "0"})]
    times: list[list[float]] = [[], [], []]
    for number in range(-3, pairs):  # the first rounds fill the caches
        for variant in (0, 1, 2) if number % 2 else (2, 1, 0):
            taken = start_ms(*variants[variant])
            if number >= 0:
                times[variant].append(taken)
    added = [ours - bare for bare, ours, _ in zip(*times, strict=True)]
    bare, ours, off = map(statistics.median, times)
    return Medians(bare, ours, off, statistics.median(added))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("python", nargs="*", default=[sys.executable])
    parser.add_argument("--pairs", type=int, default=200, help="rounds per Python (200)")
    arguments = parser.parse_args()
    print(f"{arguments.pairs} rounds of `python -c pass`; medians in ms", flush=True)
    print("python    without     with  CK_PATCH=0   added  added %  promise", flush=True)
    for python in arguments.python:
        version = "import platform; print(platform.python_version())"
        name = subprocess.check_output([python, "-c", version], text=True).strip()
        with tempfile.TemporaryDirectory() as folder:
            found = measure(python, arguments.pairs, Path(folder))
        percent = 100 * found.added / found.without
        kept = found.added <= PROMISE_MS or percent <= PROMISE_PERCENT
        print(
            f"{name:8} {found.without:8.2f} {found.with_it:8.2f} {found.switched_off:11.2f} "
            f"{found.added:7.2f} {percent:8.1f}  {'kept' if kept else 'broken'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
