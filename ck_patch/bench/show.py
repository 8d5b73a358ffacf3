"""The rows of a benchmark as tables: one for each operation, the geometric means last."""

from __future__ import annotations

from collections.abc import Sequence

from ck_patch import tables
from ck_patch.bench.rows import OPS, QUANTIZERS, Mean, Row, means
from ck_patch.tables import number

_GEMM = (
    *("M x N x K", "route", "stock", "ours", "times", "cold", "eager", "BF16", "times BF16"),
    *("cuBLAS INT8", "FP8", "of FP8", "TOPS", "equal"),
)
_QUANTIZER = (
    *("M x K", "stock", "ours", "times", "cold", "eager"),
    *("copy", "of copy", "stock of copy", "equal"),
)
_HOST = ("call", "M x N x K", "stock", "ours", "times", "BF16", "equal")

HOW = (
    "Milliseconds by CUDA graph replay, medians of interleaved runs in one process, operands warm "
    "in the L2 where they fit. times: stock over ours; cold: the same with operands that rotate "
    "through copies of twice the size of the L2; eager: the same without graphs"
)
"""What the figures of the tables are."""


def show(rows: Sequence[Row]) -> None:
    """Print the tables and the means."""
    print(f"\n{HOW}.")
    for op, what in OPS.items():
        mine = [row for row in rows if row.op == op]
        eager = {row.shape: row for row in mine if row.timing == "eager"}
        graph = [row for row in mine if row.timing == "graph"]
        if not mine:
            continue
        if op == "host_us":
            tables.show(f"{op}: {what}, microseconds", _HOST, [_host(row) for row in mine])
        elif op in QUANTIZERS:
            cells = [_quantizer(row, eager.get(row.shape)) for row in graph]
            tables.show(f"{op}: {what}", _QUANTIZER, cells)
        else:
            cells = [_gemm(row, eager.get(row.shape)) for row in graph]
            tables.show(f"{op}: {what}", _GEMM, cells)
    tables.show(
        "Geometric means",
        ("operation", "ours", "rows", "mean", "worst", "at"),
        [_mean(mean) for mean in means(rows)],
    )


def _gemm(row: Row, eager: Row | None) -> list[str]:
    return [
        row.shape,
        row.path or "-",
        *_against_stock(row, eager),
        number(row.ms.get("bf16"), 4),
        number(row.ratio("bf16"), 2),
        number(row.ms.get("int_mm"), 4),
        number(row.ms.get("fp8"), 4),
        _percent(row.ratio("fp8")),
        number(row.tops(), 0),
        _equal(row),
    ]


def _quantizer(row: Row, eager: Row | None) -> list[str]:
    return [
        row.shape,
        *_against_stock(row, eager),
        number(row.ms.get("copy"), 4),
        _percent(row.ratio("copy")),
        _percent(row.ratio("copy", "stock")),
        _equal(row),
    ]


def _against_stock(row: Row, eager: Row | None) -> list[str]:
    return [
        number(row.ms.get("stock"), 4),
        number(row.ms.get("ours"), 4),
        number(row.ratio("stock"), 2),
        number(row.ratio("stock", cold=True), 2),
        number(None if eager is None else eager.ratio("stock"), 2),
    ]


def _host(row: Row) -> list[str]:
    us = {name: 1e3 * ms for name, ms in row.ms.items()}
    return [
        row.call or "-",
        row.shape,
        number(us.get("stock"), 1),
        number(us.get("ours"), 1),
        number(row.ratio("stock"), 2),
        number(us.get("bf16"), 1),
        _equal(row),
    ]


def _mean(mean: Mean) -> list[str]:
    return [
        mean.op,
        mean.what,
        str(mean.rows),
        number(mean.geometric_mean, 3),
        number(mean.worst, 3),
        mean.worst_shape,
    ]


def _equal(row: Row) -> str:
    return "yes" if row.equal else "NO"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.0f}%"
