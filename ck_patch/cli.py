"""The command line: `ck-patch`, and `python -m ck_patch` all the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import ck_patch
from ck_patch import shapes

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a usage error exits with 2."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except BrokenPipeError:
        # The reader has seen enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    for stream in (sys.stdout, sys.stderr):
        # A path may hold letters that the terminal's encoding lacks: show them escaped.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
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
    else:
        from ck_patch import demo

        code = demo.run(json_path=options.json, shapes=options.shape)
    sys.stdout.flush()
    return code


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
    demo.add_argument(
        "--json", metavar="FILE", type=_file, help="write the rows and the versions to FILE too"
    )
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
    bench.add_argument(
        "--json", metavar="FILE", type=_file, help="write the rows and the versions to FILE too"
    )
    bench.add_argument(
        "--plot",
        metavar="FILE.png",
        type=_plot,
        help="draw the rows too (or FILE.svg, FILE.pdf); needs matplotlib",
    )
    return parser


def _file(text: str) -> Path:
    """A file that can be written: found out now and not after minutes of measuring."""
    path = Path(text)
    try:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is not a file in an existing folder")
        is_there = path.exists()
        # Opening a pipe and closing it again would look like the end to its reader.
        if path.is_file() or not is_there:
            path.open("a").close()
        if not is_there:
            path.unlink()
    except OSError as error:
        reason = f"{text} cannot be written ({error.strerror})"
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
