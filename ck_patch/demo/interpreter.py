"""The demo without a GPU: the slot's kernel in Triton's interpreter, and what each GPU would do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import ck_patch
from ck_patch import device, preview, route, settings, tables
from ck_patch.demo.slot import PROMISED_UNITS, Inputs
from ck_patch.shapes import Shape

# Awkward on purpose: one row, one row more than a tile, sizes that are no multiple of a tile, and
# a K that the K loop does not divide.
SHAPES: tuple[Shape, ...] = ((1, 8, 16), (3, 16, 48), (33, 24, 64), (70, 56, 96), (17, 40, 2064))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """One call of the slot; `units` is the largest error, None where there is no number.

    Where the route is stock, `reason` says why; it is not run, for stock has no code for a CPU.
    """

    shape: str
    out: str
    bias: str
    path: str
    reason: str
    units: float | None = None
    problem: str = ""

    @property
    def verdict(self) -> str:
        """What the table says."""
        if self.problem:
            return f"WRONG: {self.problem}"
        return "right" if self.units is not None else f"not run: {self.reason}"


def run(shapes: Sequence[Shape] | None) -> dict[str, Any]:
    """Print both tables; the rows, the routes and whether all was as promised."""
    print(
        "No NVIDIA GPU: comfy_kitchen's own cutlass_int8_dequant, patched, runs our kernel in "
        "Triton's interpreter."
    )
    torch.manual_seed(0)
    rows = [
        _row(shape, out, bias)
        for shape in shapes or SHAPES
        for out in DTYPES
        for bias in (None, out)
    ]
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
    return {
        "kind": "interpreter",
        "ok": any(row.units is not None for row in rows) and not any(row.problem for row in rows),
        "rows": [dataclasses.asdict(row) for row in rows],
        "routes": _show_known(),
    }


def _row(shape: Shape, out: torch.dtype, bias: torch.dtype | None) -> Row:
    from comfy_kitchen.backends.cuda import _C

    out_name = str(out).removeprefix("torch.")
    bias_name = None if bias is None else str(bias).removeprefix("torch.")
    call = route.GemmCall(*shape, out_name, bias_name)
    chosen = route.decide(call, device.profile(-1), settings.load().int8)
    text = "x".join(map(str, shape))
    row = Row(text, out_name, bias_name or "none", chosen.path, chosen.reason)
    if chosen.config is None:
        return row
    inputs = Inputs.random(shape, out, bias, "cpu")
    d = inputs.output()
    try:
        # Stock refuses tensors of the CPU: only our kernel can have written `d`.
        if not inputs.call(_C.cutlass_int8_dequant, d, 0):
            return dataclasses.replace(row, problem="was not written")
    except Exception as error:
        reasons = [breaker.reason for breaker in ck_patch.status().breakers]
        problem = "; ".join(reasons) or f"went to stock, which raised {type(error).__name__}"
        return dataclasses.replace(row, problem=problem)
    units = inputs.units_off(d, rows=shape[0])
    if not math.isfinite(units):
        return dataclasses.replace(row, problem="is not a number somewhere")
    problem = "" if units <= PROMISED_UNITS else f"more than {PROMISED_UNITS} off"
    return dataclasses.replace(row, units=units, problem=problem)


def _show_known() -> list[dict[str, Any]]:
    int8 = settings.load().int8
    known = [(gpu, preview.choices(gpu, int8)) for gpu in device.KNOWN]
    tables.show(
        f"The route that each GPU gets under {settings.INT8.name}={int8} "
        "(bfloat16 output; shapes of real models)",
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
