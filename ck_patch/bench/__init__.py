"""The `bench` command: stock, ours, BF16, cuBLAS INT8 and FP8 beside one another on this GPU."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ck_patch import prerequisites, results, settings
from ck_patch.prerequisites import Missing
from ck_patch.shapes import Sets, unique


def run(sets: Sets, quick: bool, *, json_path: Path | None, plot_path: Path | None) -> int:
    """Measure the shapes, the first of each set alone if `quick`, print tables and write the files;
    1 if a result differs from stock's, or nothing can be measured or a file not be written."""
    try:
        return _run(sets, quick, json_path, plot_path)
    except Missing as reason:
        return prerequisites.refuse("bench", reason)


def _run(sets: Sets, quick: bool, json_path: Path | None, plot_path: Path | None) -> int:
    if plot_path is not None:
        prerequisites.need_matplotlib()
    if not prerequisites.has_gpu():
        raise Missing("torch finds no NVIDIA GPU, and there is nothing to time without one")
    # A trial in the middle of a measurement would be measured along with it.
    os.environ.setdefault(settings.TUNE.name, "frozen")
    prerequisites.patch()
    stamp = prerequisites.stamped("bench")
    from ck_patch.bench import measuring, plot, show

    wanted = {name: shapes[:1] for name, shapes in sets.items()} if quick else sets
    found = measuring.measure(unique(wanted))
    # First of all: whoever reads what is printed may be gone.
    draw = partial(plot.draw, found.rows)
    unwritten = results.write(document(stamp, found), json_path, plot_path, draw)
    show.show(found.rows)
    print()
    for name, reason in found.skipped.items():
        print(f"{name}: skipped, {reason}")
    for problem in (*found.problems, *unwritten):
        print(f"ck_patch bench: {problem}", file=sys.stderr)
    if found.problems or not found.rows:
        print("NOT every result was as promised.")
        return 1
    print(f"All {len(found.rows)} rows are equal to stock.")
    return 1 if unwritten else 0


def document(stamp: dict[str, str | None], found: Any) -> dict[str, Any]:
    """What --json writes; `found` is a `measuring.Found`."""
    from ck_patch.bench import rows, show

    return {
        "stamp": stamp,
        "how": show.HOW,
        "means": [dataclasses.asdict(mean) for mean in rows.means(found.rows)],
        "rows": [row.as_json() for row in found.rows],
        "skipped": found.skipped,
        "problems": found.problems,
    }
