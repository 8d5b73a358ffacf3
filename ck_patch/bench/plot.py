"""The rows of a benchmark as a picture: how many times as fast as stock, shape by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ck_patch import pictures
from ck_patch.bench.rows import QUANTIZERS, Row
from ck_patch.pictures import BETTER, WORSE

_BF16, _FP8, _COPY = "#d9822b", "#7d4aa8", "#4a4a4a"
_TITLES = {
    "gemm": "INT8 GEMM",
    "int8_linear": "int8_linear",
    "int8_linear_convrot": "int8_linear, ConvRot",
    "quantize": "row quantizer",
    "quantize_convrot": "ConvRot quantizer",
}
_MARKS: Mapping[str, tuple[str, str, str]] = {
    "bf16": ("D", _BF16, "BF16 F.linear"),
    "fp8": ("|", _FP8, "FP8 GEMM alone (limit)"),
    "copy": ("|", _COPY, "copy of as many bytes (limit)"),
}


def draw(rows: Sequence[Row], title: str, suffix: str) -> bytes:
    """The picture, in the format of that suffix: a panel for each operation, bars for ours, marks
    for the others, stock at 1."""
    from matplotlib.figure import Figure

    graph = [row for row in rows if row.timing == "graph"]
    upper = [op for op in _TITLES if op not in QUANTIZERS and any(r.op == op for r in graph)]
    lower = [op for op in _TITLES if op in QUANTIZERS and any(r.op == op for r in graph)]
    bands = [ops for ops in (upper, lower) if ops]
    heights = [1.2 + 0.23 * max(_count(graph, op) for op in ops) for ops in bands]
    figure = Figure(figsize=(14, sum(heights) + 1.2), layout="constrained")
    figure.suptitle(title, fontsize=10)
    # Without a band there is nothing but the title.
    parts = _parts(figure, heights) if bands else []
    for part, ops in zip(parts, bands, strict=True):
        panels = part.subplots(1, len(ops), sharey=True, squeeze=False)[0]
        shapes = _shapes(graph, ops)
        for panel, op in zip(panels, ops, strict=True):
            _panel(panel, op, {row.shape: row for row in graph if row.op == op}, shapes)
        handles: dict[str, Any] = {}
        for panel in panels:
            found, labels = panel.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        part.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False
        )
    return pictures.rendered(figure, suffix)


def _parts(figure: Any, heights: Sequence[float]) -> list[Any]:
    given = {"height_ratios": heights, "squeeze": False}
    return [part for (part,) in figure.subfigures(len(heights), 1, **given)]


def _count(rows: Sequence[Row], op: str) -> int:
    return sum(row.op == op for row in rows)


def _shapes(rows: Sequence[Row], ops: Sequence[str]) -> list[str]:
    """The largest last: it is drawn at the top."""
    mine = [row for row in rows if row.op in ops]
    ordered = sorted(mine, key=lambda row: (row.m, row.n or 0, row.k))
    return list(dict.fromkeys(row.shape for row in ordered))


def _panel(panel: Any, op: str, rows: Mapping[str, Row], shapes: Sequence[str]) -> None:
    panel.set_title(_TITLES[op], fontsize=10)
    pictures.prepare(panel, shapes)
    at = {shape: place for place, shape in enumerate(shapes)}
    ours = {at[shape]: ratio for shape, row in rows.items() if (ratio := row.ratio("stock"))}
    texts = [f"{ratio:.2f}" for ratio in ours.values()]
    colors = [BETTER if ratio >= 1 else WORSE for ratio in ours.values()]
    pictures.bars(panel, ours, texts, colors)
    # For the legend, whichever color the first bar has.
    panel.barh([], [], color=BETTER, label="ours (red: slower than stock)")
    for contender, (marker, color, label) in _MARKS.items():
        found = {
            at[shape]: ratio
            for shape, row in rows.items()
            if (ratio := row.ratio("stock", contender))
        }
        if found:
            size, edge = (4, 1) if marker == "D" else (9, 2)
            look = {"marker": marker, "color": color, "markersize": size, "markeredgewidth": edge}
            pictures.marks(panel, found, label, **look)
