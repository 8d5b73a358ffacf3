"""The demo on an NVIDIA GPU: the patched slot and layer against stock and BF16, in one process."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import ck_patch
from ck_patch import device, preview, route, settings, tables
from ck_patch.breaker import describe
from ck_patch.demo.slot import PROMISED_UNITS, Inputs
from ck_patch.measure import graph_times, replayed
from ck_patch.prerequisites import breakers
from ck_patch.shapes import Shape, named

# Rows at either end that are compared with the exact reference; all rows are compared with stock.
_REFERENCE_ROWS = 8


@dataclass(frozen=True)
class Row:
    """One shape. Milliseconds: of the GEMM slot (`gemm_*`), of the whole `int8_linear` with the
    quantization of x (`layer_*`), and of `F.linear` in bfloat16. None where it could not run."""

    model: str
    m: int
    n: int
    k: int
    path: str
    reason: str
    problem: str = ""
    equal: bool | None = None
    units: float | None = None
    gemm_stock: float | None = None
    gemm_ours: float | None = None
    layer_stock: float | None = None
    layer_ours: float | None = None
    bf16: float | None = None

    @property
    def ok(self) -> bool:
        """Bit-equal to stock and right, or too large for this GPU."""
        return not self.problem or self.equal is None

    def ratio(self, slower: str, faster: str) -> float | None:
        """How many times as long `slower` takes as `faster`."""
        above, below = getattr(self, slower), getattr(self, faster)
        return above / below if above and below else None


RATIOS = {
    "GEMM, ours against stock": ("gemm_stock", "gemm_ours"),
    "layer, ours against stock": ("layer_stock", "layer_ours"),
    "layer, ours against BF16": ("bf16", "layer_ours"),
    "layer, stock against BF16": ("bf16", "layer_stock"),
}


def run(shapes: Sequence[Shape] | None) -> dict[str, Any]:
    """Print the table; the rows, the geometric means and whether all was as promised."""
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for model, shape in preview.named(shapes):
            print(f"measuring {named(shape)} ...", flush=True)
            rows.append(_row(model, shape))
    tables.show(
        "INT8 linears with bfloat16 output; milliseconds by CUDA graph replay. GEMM: the patched "
        "slot. Layer: all of comfy_kitchen.int8_linear",
        (
            *("model", "M x N x K", "route", "GEMM stock", "ours", "times"),
            *("layer stock", "ours", "times", "BF16", "times BF16", "equal to stock"),
        ),
        [_cells(row) for row in rows],
    )
    for path, reason in dict.fromkeys((row.path, row.reason) for row in rows):
        print(f"{path}: {reason}")
    means = _means(rows)
    for name, mean in means.items():
        print(f"geometric mean of {name}: {mean:.2f} times as fast")
    return {
        "kind": "gpu",
        "ok": all(row.ok for row in rows),
        "ours_ran": any(row.path != "stock" and row.equal is not None for row in rows),
        "geometric_means": means,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _row(model: str, shape: Shape) -> Row:
    index = torch.cuda.current_device()
    chosen = route.decide(
        route.GemmCall(*shape, "bfloat16"), device.profile(index), settings.load().int8
    )
    row = Row(model, *shape, chosen.path, chosen.reason)
    try:
        torch.cuda.empty_cache()
        row = _gemm(row)
        return _layer(row)
    except torch.OutOfMemoryError:
        if row.problem:
            return row
        return dataclasses.replace(row, problem="does not fit in this GPU's memory", equal=None)
    except Exception as error:
        problem = row.problem or f"failed: {describe(error)}"
        return dataclasses.replace(row, problem=problem, equal=False)


def _gemm(row: Row) -> Row:
    """Compare and time the slot itself: ours as it is patched in, and the stock it wraps."""
    from comfy_kitchen.backends.cuda import _C

    ours = _C.cutlass_int8_dequant
    stock = ours.__wrapped__
    inputs = Inputs.random((row.m, row.n, row.k), torch.bfloat16, None, "cuda")
    d, expected = inputs.output(), inputs.output()
    stream = torch.cuda.current_stream().cuda_stream
    if not inputs.call(stock, expected, stream):
        # Stock leaves it to cuBLAS, and so do we: there is nothing to compare.
        return row

    def poisoned() -> None:
        d.fill_(torch.nan)
        inputs.call(ours, d, torch.cuda.current_stream().cuda_stream)

    # The first call proves the kernel against stock; a replay runs it alone, at any size.
    replayed(poisoned)
    units = inputs.units_off(d, _REFERENCE_ROWS)
    equal = torch.equal(d, expected)
    row = dataclasses.replace(
        row, equal=equal, units=units if math.isfinite(units) else None, problem=breakers()
    )
    if not equal:
        return dataclasses.replace(row, problem="the GEMM differs from stock")
    if not units <= PROMISED_UNITS:
        return dataclasses.replace(row, problem=f"{units} units off the exact result")

    def timed(function: Callable[..., Any]) -> Callable[[], object]:
        # Asked for at each call: capture runs on a stream of its own.
        return lambda: inputs.call(function, d, torch.cuda.current_stream().cuda_stream)

    times = graph_times({"ours": timed(ours), "stock": timed(stock)})
    return dataclasses.replace(row, gemm_ours=times["ours"], gemm_stock=times["stock"])


def _layer(row: Row) -> Row:
    """Compare and time all of `int8_linear`, through comfy_kitchen's registry."""
    import comfy_kitchen

    x = torch.randn(row.m, row.k, dtype=torch.bfloat16, device="cuda")
    weight = torch.randint(-128, 128, (row.n, row.k), dtype=torch.int8, device="cuda")
    scale = torch.rand(row.n, device="cuda") * 0.01 + 0.001
    bias = torch.randn(row.n, dtype=torch.bfloat16, device="cuda")
    plain = torch.randn(row.n, row.k, dtype=torch.bfloat16, device="cuda")

    def layer() -> torch.Tensor:
        found: torch.Tensor = comfy_kitchen.int8_linear(x, weight, scale, bias, torch.bfloat16)
        return found

    def stock() -> torch.Tensor:
        ck_patch.disable()
        return layer()

    try:
        expected = stock()
        ck_patch.enable()
        layer()  # Proves the kernel anew: enabling is a fresh start.
        equal = torch.equal(replayed(layer), expected)
        del expected
        problem = row.problem or breakers() or ("" if equal else "the layer differs from stock")
        row = dataclasses.replace(row, equal=equal and row.equal is not False, problem=problem)
        # In this order: what is captured after the first call of `stock` is stock.
        functions = {"bf16": lambda: F.linear(x, plain, bias), "ours": layer, "stock": stock}
        times = graph_times(functions)
    finally:
        ck_patch.enable()
    return dataclasses.replace(
        row, layer_ours=times["ours"], layer_stock=times["stock"], bf16=times["bf16"]
    )


def _means(rows: Sequence[Row]) -> dict[str, float]:
    means = {}
    for name, (slower, faster) in RATIOS.items():
        ratios = [ratio for row in rows if (ratio := row.ratio(slower, faster))]
        if ratios:
            means[name] = statistics.geometric_mean(ratios)
    return means


def _cells(row: Row) -> list[str]:
    number = tables.number
    return [
        row.model,
        named((row.m, row.n, row.k)),
        row.path,
        number(row.gemm_stock, 4),
        number(row.gemm_ours, 4),
        number(row.ratio("gemm_stock", "gemm_ours"), 2),
        number(row.layer_stock, 4),
        number(row.layer_ours, 4),
        number(row.ratio("layer_stock", "layer_ours"), 2),
        number(row.bf16, 4),
        number(row.ratio("bf16", "layer_ours"), 2),
        row.problem or ("yes" if row.equal else "no"),
    ]
