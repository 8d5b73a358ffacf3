"""What the benchmark found: a row for each operation, shape and way of timing, and their means."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Timing = Literal["graph", "eager"]

CONTENDERS = ("stock", "ours", "bf16", "int_mm", "fp8", "copy")
"""stock and ours are comfy_kitchen without and with ck_patch. bf16 is `F.linear`; int_mm is
`torch._int_mm`, cuBLAS INT8 without dequantization; fp8 is `torch._scaled_mm`, the GEMM alone; copy
moves as many bytes as the operation has to."""

OPS = {
    "gemm": "the INT8 GEMM entry, _C.cutlass_int8_dequant",
    "int8_linear": "all of comfy_kitchen.int8_linear",
    "int8_linear_convrot": "all of comfy_kitchen.int8_linear with ConvRot",
    "quantize": "the row quantizer, quantize_int8_rowwise",
    "quantize_convrot": "the ConvRot quantizer, quantize_int8_rowwise_convrot64",
    "class_sm80": "the GEMM of the mma.sync class (sm_80 to sm_89, sm_12x) on this GPU",
    "host_us": "host time of one call",
}
LINEARS = ("int8_linear", "int8_linear_convrot")
QUANTIZERS = ("quantize", "quantize_convrot")

LARGE_M = 1024
LARGE_BYTES = 8 * 10**6


@dataclass(frozen=True)
class Row:
    """One operation on one shape: x [M, K] and weight [N, K], or None for N where there is none.

    `ms` has milliseconds by contender, `cold_ms` those with the operands not in the L2, where the
    operands would fit into it. `call` tells rows of the same operation and shape apart, `path` is
    the route's.
    """

    op: str
    m: int
    n: int | None
    k: int
    timing: Timing
    ms: Mapping[str, float]
    equal: bool
    cold_ms: Mapping[str, float] = field(default_factory=dict)
    path: str | None = None
    call: str | None = None

    @property
    def shape(self) -> str:
        """For example `37296x21504x5376`, without N where there is none."""
        return "x".join(str(size) for size in (self.m, self.n, self.k) if size is not None)

    @property
    def limit(self) -> str:
        """The contender that does the least that has to be done."""
        return "copy" if self.op in QUANTIZERS else "fp8"

    def ratio(self, slower: str, faster: str = "ours", cold: bool = False) -> float | None:
        """How many times as long one contender takes as another, where both are known."""
        ms = self.cold_ms if cold else self.ms
        return ms[slower] / ms[faster] if slower in ms and faster in ms else None

    def tops(self, contender: str = "ours") -> float | None:
        """Tera-operations in a second of a GEMM."""
        if self.n is None or contender not in self.ms or self.op == "host_us":
            return None
        return 2e-9 * self.m * self.n * self.k / self.ms[contender]

    def as_json(self) -> dict[str, Any]:
        """All of it, what does not apply as None."""
        return {
            **{name: getattr(self, name) for name in ("op", "m", "n", "k", "timing", "path")},
            "call": self.call,
            **{f"{name}_ms": _rounded(self.ms.get(name), 6) for name in CONTENDERS},
            **{f"{name}_cold_ms": _rounded(self.cold_ms.get(name), 6) for name in CONTENDERS},
            "times_stock": _rounded(self.ratio("stock"), 4),
            "times_bf16": _rounded(self.ratio("bf16"), 4),
            "share_of_limit": _rounded(self.ratio(self.limit), 4),
            "tops": _rounded(self.tops(), 1),
            "equal": self.equal,
        }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


@dataclass(frozen=True)
class Mean:
    """A geometric mean of ratios, above 1 where ours is the faster one, and the worst of them."""

    what: str
    op: str
    rows: int
    geometric_mean: float
    worst: float
    worst_shape: str


def means(rows: Sequence[Row]) -> list[Mean]:
    """The means that there are rows for."""
    found = []
    for op in OPS:
        mine = [row for row in rows if row.op == op]
        graph = [row for row in mine if row.timing == "graph"]
        large = [row for row in graph if row.m >= LARGE_M]
        at_large = f"M >= {LARGE_M}"
        if op in QUANTIZERS:
            big = [row for row in graph if 2 * row.m * row.k >= LARGE_BYTES]
            found += [
                _mean(op, "over stock, all", graph, "stock"),
                _mean(op, "over stock, x from 8 MB", big, "stock"),
                _mean(op, "share of the speed of a copy, x from 8 MB", big, "copy"),
            ]
        elif op == "host_us":
            calls = dict.fromkeys(row.call for row in mine)
            found += [
                _mean(op, f"over stock, {call}", [row for row in mine if row.call == call], "stock")
                for call in calls
            ]
            continue
        else:
            found += [
                _mean(op, "over stock, all", graph, "stock"),
                _mean(op, f"over stock, {at_large}", large, "stock"),
                _mean(op, f"over BF16, {at_large}", large, "bf16"),
                _mean(op, f"over cuBLAS INT8, {at_large}", large, "int_mm"),
                _mean(op, f"over FP8, {at_large}", large, "fp8"),
            ]
        found += [
            _mean(op, "over stock, all, L2 cold", graph, "stock", cold=True),
            _mean(op, "over stock, all, eager", [r for r in mine if r.timing == "eager"], "stock"),
        ]
    return [mean for mean in found if mean is not None]


def _mean(op: str, what: str, rows: Iterable[Row], against: str, cold: bool = False) -> Mean | None:
    ratios = {
        row.shape: ratio for row in rows if (ratio := row.ratio(against, cold=cold)) is not None
    }
    if not ratios:
        return None
    worst = min(ratios, key=lambda shape: ratios[shape])
    mean = statistics.geometric_mean(ratios.values())
    return Mean(what, op, len(ratios), mean, ratios[worst], worst)
