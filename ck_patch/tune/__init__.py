"""The `tune` command: measures every candidate of the INT8 GEMM on this GPU into its table, and
moves a table to another machine of the same kind."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ck_patch import files, notices, prerequisites, results, settings
from ck_patch.prerequisites import Missing
from ck_patch.route import GemmCall
from ck_patch.shapes import Sets, unique
from ck_patch.table_file import Entry
from ck_patch.tune import unused

if TYPE_CHECKING:
    from ck_patch.device import DeviceProfile
    from ck_patch.table import Table
    from ck_patch.tune.sweeping import Done, Found


def run(
    sets: Sets | None,
    *,
    bias: bool,
    budget: float | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    """Measure the shapes with bfloat16 output, or what the table has met if there are none, keep
    the choices, print a table and write the files.

    1 if a candidate fails or differs from stock, nothing can be measured, or something not be
    saved. `budget` is in seconds.
    """
    return _told(lambda: _run(sets, bias, budget, json_path, plot_path))


def export(path: Path) -> int:
    """Write the table of this machine to a file; 1 if there is nothing in it."""
    return _told(lambda: _export(path))


def import_(path: Path) -> int:
    """Take over what `export` wrote on a machine of the same kind; 1 if it is none."""
    return _told(lambda: _import(path))


def sweep(
    calls: Sequence[GemmCall],
    budget: float | None = None,
    *,
    known: Mapping[str, Entry] | None = None,
    done: Done = lambda call, row: None,
) -> Found:
    """Measure every candidate of these calls on the current GPU, for so many seconds.

    comfy_kitchen must be importable; whether it is patched is all the same, and nothing of it is
    touched. `known` has the entries of a table, by key, for the choices before; `done` is called
    after each call.
    """
    import comfy_kitchen  # noqa: F401
    import torch

    from ck_patch.candidates import STOCK_CONFIGS
    from ck_patch.ops.references import cutlass_config
    from ck_patch.tune.contest import GpuContest
    from ck_patch.tune.sweeping import Sweep

    gpu = _gpu()
    configs = 0 if cutlass_config(0) is None else STOCK_CONFIGS
    with torch.no_grad():
        torch.manual_seed(0)
        one = Sweep(gpu, lambda call: GpuContest(call, gpu), known or {}, configs)
        return one.run(calls, budget, done)


def document(stamp: dict[str, str | None], found: Found) -> dict[str, Any]:
    """What --json writes."""
    from ck_patch.tune import rows, show

    return {
        "stamp": stamp,
        "how": show.HOW,
        "means": [dataclasses.asdict(mean) for mean in rows.means(found.rows)],
        "rows": [row.as_json() for row in found.rows],
        "skipped": found.skipped,
        "left": found.left,
        "problems": found.problems,
    }


def _told(command: Callable[[], int]) -> int:
    try:
        return command()
    except Missing as reason:
        return prerequisites.refuse("tune", reason)


def _run(
    sets: Sets | None,
    bias: bool,
    budget: float | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> int:
    if plot_path is not None:
        prerequisites.need_matplotlib()
    table = _table()
    reason = table.unwritable()
    if reason is not None:
        raise Missing(f"no choice could be kept: {reason}")
    prerequisites.patch()
    stamp = prerequisites.stamped("tune")
    found = _swept(_calls(sets, bias, table), budget, table)
    # First of all: whoever reads what is printed may be gone.
    unsaved = [] if table.save(last=True) else ["the choices could not be saved"]
    from ck_patch.tune import plot, show

    draw = partial(plot.draw, found.rows)
    unsaved += results.write(document(stamp, found), json_path, plot_path, draw)
    show.show(found.rows)
    return _concluded(found, budget, unsaved)


def _calls(sets: Sets | None, bias: bool, table: Table) -> list[GemmCall]:
    from ck_patch.tune import calls

    if sets is None:
        found = calls.recorded(table.entries())
        if not found:
            _need_readable(table)
            raise Missing("the table of this machine has met no shapes yet; --shapes names some")
        return found
    if not bias:
        return calls.of_shapes(unique(sets), None)
    from ck_patch.tune.contest import bias_dtype

    return calls.of_shapes(unique(sets), bias_dtype())


def _swept(calls: Sequence[GemmCall], budget: float | None, table: Table) -> Found:
    """Measure, and keep each choice at once: a sweep may be interrupted."""
    from ck_patch.candidates import key
    from ck_patch.tune import progress
    from ck_patch.tune.calls import named
    from ck_patch.tune.rows import Row

    with progress.shown("tuning", len(calls)) as advance:
        begin = time.perf_counter()

        def done(call: GemmCall, row: Row | None) -> None:
            nonlocal begin
            begin, before = time.perf_counter(), begin
            if row is not None:
                us = {name: round(time, 2) for name, time in row.us.items()}
                table.put(key(call), Entry(row.choice, call.m, us, "sweep"))
                table.save()
            chosen = "nothing" if row is None else row.choice
            advance(f"{named(call)}, {chosen}, {begin - before:.1f} s")

        return sweep(calls, budget, known=table.entries(), done=done)


def _concluded(found: Found, budget: float | None, unsaved: Sequence[str]) -> int:
    print()
    for name, reason in found.skipped.items():
        print(f"{name}: skipped, {reason}")
    if found.left:
        text = "" if budget is None else f" within {budget:g} s"
        print(f"Not reached{text}: {', '.join(found.left)}")
    _print_unused()
    for problem in (*found.problems, *unsaved):
        print(f"ck_patch tune: {problem}", file=sys.stderr)
    if found.problems:
        print("NOT every result was as promised.")
        return 1
    if not found.rows:
        print("Nothing was measured.")
        return 1
    print(
        f"All candidates of {_many(len(found.rows), 'call')} are equal to stock"
        + ("." if unsaved else "; the choices are saved, and count from the next start on.")
    )
    return 1 if unsaved else 0


def _print_unused() -> None:
    reason = unused.reason(settings.load())
    if reason is not None:
        print(f"The table is not used as long as {reason} is set.")
    obstacle = notices.cuda_backend_obstacle()
    if obstacle is not None:
        print(f"ComfyUI has no use for choices of the CUDA backend: {obstacle}.")


def _export(path: Path) -> int:
    table = _table()
    if not table.entries():
        _need_readable(table)
        raise Missing("the table of this machine is empty: there is nothing to export")
    try:
        count = table.export(path)
    except OSError as error:
        raise Missing(f"{path} cannot be written ({files.reason(error)})") from None
    print(f"{_many(count, 'choice')} of {_gpu().name} written to {path}.")
    return 0


def _import(path: Path) -> int:
    table = _table()
    try:
        taken, there = table.import_(path)
    except OSError as error:
        raise Missing(f"{path} cannot be read ({files.reason(error)})") from None
    except ValueError as error:
        raise Missing(str(error)) from None
    if not table.save():
        raise Missing("what was read could not be saved")
    print(f"{_many(taken, 'choice')} for {_gpu().name} taken over from {path}.")
    if taken < there:
        left = _many(there - taken, "other")
        print(f"{left} left out: a sweep has chosen here, or there is no such candidate.")
    _print_unused()
    return 0


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _table() -> Table:
    """The table of this environment; raises Missing where there is no GPU."""
    if not prerequisites.has_gpu():
        raise Missing("torch finds no NVIDIA GPU, and there is no table without one")
    from ck_patch import table

    return table.for_device(_gpu(), settings.load().cache_dir)


def _need_readable(table: Table) -> None:
    reason = table.unreadable()
    if reason is not None:
        raise Missing(f"{table.path} {reason}")


def _gpu() -> DeviceProfile:
    """The current device, as the ops see it."""
    import torch

    from ck_patch import device

    index = torch.cuda.current_device()
    return device.profile(index, settings.load().assumed(index))
