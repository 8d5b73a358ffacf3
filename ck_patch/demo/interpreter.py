"""The demo without a GPU: the slot's kernel in Triton's interpreter, and what each GPU would do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ck_patch
from ck_patch import device, preview, route, settings, tables, tiles
from ck_patch.demo.slot import PROMISED_UNITS, Inputs
from ck_patch.shapes import Shape

# Awkward on purpose: one row, one row more than a tile, sizes that are no multiple of a tile, and
# a K that the K loop does not divide.
SHAPES: tuple[Shape, ...] = ((1, 8, 16), (3, 16, 48), (33, 24, 64), (70, 56, 96), (17, 40, 2064))
# One tile of the kernel costs the interpreter about as much as this many steps of its K loop.
_TILE_COST = 32
# Steps in one call: some six seconds of it.
_LIMIT = 2**13
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One call of the slot; `units` is the largest error, None where there is no number.

    Where the route is stock, `reason` says why; it is not run, for stock has no code for a CPU.
    `problem` says what is wrong with the result, `failure` why there is none.
    """

    shape: str
    out: str
    bias: str
    path: str
    reason: str
    units: float | None = None
    problem: str = ""
    failure: str = ""

    @property
    def verdict(self) -> str:
        """What the table says."""
        if self.problem:
            return f"WRONG: {self.problem}"
        if self.failure:
            return f"failed: {self.failure}"
        return "right" if self.units is not None else f"stock: {self.reason}"


def objection(shape: Shape) -> str | None:
    """Why the interpreter should not be given this shape, or None."""
    if _route(shape, torch.bfloat16, None).config is None:
        return None  # Nothing will be run.
    tile = tiles.INTERPRETER
    m, n, k = shape
    effort = tile.tiles(m, n) * (_TILE_COST + -(-k // tile.block_k))
    if effort <= _LIMIT:
        return None
    return (
        f"{m}x{n}x{k} is too large for Triton's interpreter, which would take some "
        f"{6 * effort // _LIMIT:,} seconds for each call; real layers need a GPU, "
        "a shape like 256x256x256 does not"
    )


def run(shapes: Sequence[Shape] | None) -> dict[str, Any]:
    """Print both tables; the rows, the routes and whether all was as promised."""
    print(
        "No NVIDIA GPU: comfy_kitchen's own cutlass_int8_dequant, patched, runs our kernel in "
        "Triton's interpreter."
    )
    torch.manual_seed(0)
    calls = [
        (shape, out, bias) for shape in shapes or SHAPES for out in DTYPES for bias in (None, out)
    ]
    rows = []
    for number, call in enumerate(calls, 1):
        row = _row(*call)
        rows.append(row)
        print(
            f"{number} of {len(calls)}: {row.shape}, output {row.out}, bias {row.bias}: "
            f"{row.verdict}",
            flush=True,
        )
    tables.show(
        "Error against an exact reference, in units in the last place",
        ("M x N x K", "output", "bias", "route", "error", "verdict"),
        [
            (
                row.shape,
                row.out,
                row.bias,
                row.path,
                "-" if row.units is None else f"{row.units:.2f}",
                row.verdict,
            )
            for row in rows
        ],
    )
    print(
        "Triton's interpreter truncates to bfloat16, so up to 1 unit is right there; on a GPU the "
        "results are compared with stock's bit by bit."
    )
    return {
        "kind": "interpreter",
        "ok": not any(row.problem or row.failure for row in rows),
        "ours_ran": any(row.units is not None for row in rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "routes": _show_known(shapes),
    }


def _row(shape: Shape, out: torch.dtype, bias: torch.dtype | None) -> Row:
    from comfy_kitchen.backends.cuda import _C

    chosen = _route(shape, out, bias)
    text = "x".join(map(str, shape))
    row = Row(text, _name(out), "none" if bias is None else _name(bias), chosen.path, chosen.reason)
    if chosen.config is None:
        return row
    try:
        inputs = Inputs.random(shape, out, bias, "cpu")
        d = inputs.output()
        # Stock refuses tensors of the CPU: only our kernel can have written `d`.
        if not inputs.call(_C.cutlass_int8_dequant, d, 0):
            return dataclasses.replace(row, problem="was not written")
    except Exception as error:
        reasons = [breaker.reason for breaker in ck_patch.status().breakers]
        failure = "; ".join(reasons) or f"{type(error).__name__}: {error}"
        return dataclasses.replace(row, failure=failure)
    units = inputs.units_off(d, rows=shape[0])
    if not math.isfinite(units):
        return dataclasses.replace(row, problem="is not a number somewhere")
    problem = "" if units <= PROMISED_UNITS else f"more than {PROMISED_UNITS} off"
    return dataclasses.replace(row, units=units, problem=problem)


def _route(shape: Shape, out: torch.dtype, bias: torch.dtype | None) -> route.Route:
    call = route.GemmCall(*shape, _name(out), None if bias is None else _name(bias))
    return route.decide(call, device.profile(-1), settings.load().int8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _show_known(shapes: Sequence[Shape] | None) -> list[dict[str, Any]]:
    given = settings.load()
    int8 = given.int8
    wanted = preview.named(shapes)
    known = [(gpu, preview.choices(gpu, int8, wanted, force=given.force)) for gpu in device.KNOWN]
    tables.show(
        f"The route that each GPU gets under {settings.INT8.name}={int8} "
        f"(bfloat16 output; {'as asked for' if shapes else 'shapes of real models'})",
        ("GPU", "class", "M x N x K", "route", "reason"),
        [
            (gpu.name, gpu.architecture, *group)
            for gpu, choices in known
            for group in preview.grouped(choices)
        ],
    )
    return [
        {"gpu": gpu.name, "architecture": gpu.architecture, **dataclasses.asdict(choice)}
        for gpu, choices in known
        for choice in choices
    ]
