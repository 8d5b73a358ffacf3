"""The command line: `ck-patch`, and `python -m ck_patch` all the same."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import ck_patch
from ck_patch import files, shapes

T = TypeVar("T")

# As a shell has it for a process that SIGINT has ended.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a usage error exits with 2."""
    _prepare_streams()
    options = _parser().parse_args(arguments)
    if options.command == "tune":
        _check_tune(options)
    try:
        return _run(options)
    except KeyboardInterrupt:
        kept = "; the choices made so far are kept" if options.command == "tune" else ""
        return _ended(_INTERRUPTED, f"ck_patch {options.command}: interrupted{kept}\n")
    except BrokenPipeError:  # The reader has seen enough.
        return _ended(1)
    except OSError as error:
        return _ended(1, f"ck_patch {options.command}: {error}\n")


def _prepare_streams() -> None:
    for name in ("stdout", "stderr"):
        # Closed by the shell, or never there: pythonw.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        stream = getattr(sys, name)
        # A path may hold letters that the terminal's encoding lacks: show them escaped.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _ended(code: int, line: str = "") -> int:
    try:
        sys.stdout.flush()
    except OSError:
        # What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stderr.write(line)
    return code


def _run(options: argparse.Namespace) -> int:
    # This program has no logging of its own that would show the lines of ck_patch.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ck_patch: %(message)s"))
    logger = logging.getLogger("ck_patch")
    logger.addHandler(handler)
    try:
        return _command(options)
    finally:
        logger.removeHandler(handler)


def _command(options: argparse.Namespace) -> int:
    # Imported by whoever runs it: each must work where what the other needs is broken.
    if options.command == "info":
        from ck_patch import info

        code = info.run(as_json=options.json)
    elif options.command == "bench":
        from ck_patch import bench

        sets = options.shapes or shapes.load()
        code = bench.run(sets, options.quick, json_path=options.json, plot_path=options.plot)
    elif options.command == "tune":
        code = _tune(options)
    else:
        from ck_patch import demo

        code = demo.run(json_path=options.json, shapes=options.shape)
    sys.stdout.flush()
    return code


def _tune(options: argparse.Namespace) -> int:
    from ck_patch import tune

    if options.export is not None:
        return tune.export(options.export)
    if options.import_ is not None:
        return tune.import_(options.import_)
    return tune.run(
        None if options.recorded else options.shapes or shapes.load(),
        bias=options.bias,
        budget=options.budget,
        json_path=options.json,
        plot_path=options.plot,
    )


def _check_tune(options: argparse.Namespace) -> None:
    """End with a usage error where an option of measuring is given and nothing is measured by it.

    argparse has groups of options that exclude one another, but not this.
    """
    given = {"--bias": options.bias}
    if options.recorded:
        other = "--recorded, whose calls have one or not"
    else:
        other = "--export or --import"
        for name in ("budget", "json", "plot"):
            given[f"--{name}"] = getattr(options, name) is not None
        if options.export is None and options.import_ is None:
            return
    for name, is_given in given.items():
        if is_given:
            options.usage_error(f"argument {name}: not allowed with {other}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ck-patch",
        description="Faster INT8 for comfy_kitchen: what is patched here, and proof that it works.",
    )
    parser.add_argument("--version", action="version", version=f"ck_patch {ck_patch.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    info = commands.add_parser(
        "info",
        help="say what is installed, what is patched or why not, and which route each GPU takes",
    )
    info.add_argument("--json", action="store_true", help="print one JSON document instead")
    demo = commands.add_parser(
        "demo",
        help="run the patched INT8 GEMM against stock and BF16; without a GPU, in Triton's "
        "interpreter against an exact reference",
    )
    _add_json(demo)
    demo.add_argument(
        "--shape",
        metavar="MxNxK",
        type=_understood(shapes.parse),
        action="append",
        help="run this shape instead of the usual ones (x is [M, K], weight is [N, K]); repeatable",
    )
    bench = commands.add_parser(
        "bench",
        help="time the INT8 GEMM, the quantizers, the whole linear and the host against stock, "
        "BF16, cuBLAS INT8 and FP8; needs an NVIDIA GPU",
    )
    bench.add_argument(
        "--shapes",
        metavar="SET|FILE|MxNxK,...",
        type=_understood(shapes.select),
        help="measure these instead of all sets of layer shapes: names of sets, shapes (x is "
        "[M, K], weight is [N, K]), or files of the form of ck_patch/data/shapes.json",
    )
    bench.add_argument("--quick", action="store_true", help="the first shape of each set alone")
    _add_json(bench)
    _add_plot(bench)
    _add_tune(commands)
    return parser


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="time every candidate of the INT8 GEMM on this GPU and keep the choices; needs an "
        "NVIDIA GPU",
    )
    tune.set_defaults(usage_error=tune.error)
    what = tune.add_mutually_exclusive_group()
    what.add_argument(
        "--shapes",
        metavar="SET|FILE|MxNxK,...",
        type=_understood(shapes.select),
        help="measure these instead of all sets of layer shapes, as `bench` has them",
    )
    what.add_argument(
        "--recorded",
        action="store_true",
        help="measure what this machine's table has met in runs, with the dtypes of those calls",
    )
    what.add_argument(
        "--export", metavar="FILE", type=_file, help="write this machine's table to FILE, and end"
    )
    what.add_argument(
        "--import",
        metavar="FILE",
        type=Path,
        dest="import_",
        help="take over the table that --export wrote on a machine of the same kind, and end",
    )
    tune.add_argument(
        "--budget",
        metavar="SECONDS",
        type=_understood(_seconds),
        help="stop after so long; the cheapest shapes come first, and what was measured is kept",
    )
    tune.add_argument(
        "--bias", action="store_true", help="calls with a bias, which have a choice of their own"
    )
    _add_json(tune)
    _add_plot(tune)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", metavar="FILE", type=_file, help="write the rows and the versions to FILE too"
    )


def _add_plot(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plot",
        metavar="FILE.png",
        type=_plot,
        help="draw the rows too (or FILE.svg, FILE.pdf); needs matplotlib",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{shapes.abridged(text)} is no number of seconds")
    return seconds


def _file(text: str) -> Path:
    """A file that can be written: found out now and not after minutes of measuring."""
    path = Path(text)
    try:
        files.check(path)
    except OSError as error:
        reason = f"{text} cannot be written ({files.reason(error)})"
        raise argparse.ArgumentTypeError(reason) from None
    return path


def _plot(text: str) -> Path:
    if Path(text).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} does not end with .png, .svg or .pdf")
    return _file(text)


def _understood(parse: Callable[[str], T]) -> Callable[[str], T]:
    """For argparse, which shows the text of no other error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
