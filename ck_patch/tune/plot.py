"""The rows of a sweep as a picture: how many times as fast as stock, call by call."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ck_patch.candidates import STOCK
from ck_patch.tune.rows import Row

_BEST, _WORSE, _GRID = "#2a78b5", "#c0504d", "#dddddd"


def draw(rows: Sequence[Row], title: str, suffix: str) -> bytes:
    """The picture, in the format of that suffix: bars for the best of the sweep, diamonds for the
    prior, stock at 1; the largest call at the top."""
    from matplotlib.figure import Figure

    known = [row for row in rows if STOCK.name in row.us]
    figure = Figure(figsize=(9, 1.8 + 0.23 * len(known)), layout="constrained")
    figure.suptitle(title, fontsize=8, wrap=True)
    panel = figure.subplots()
    panel.set_yticks(range(len(known)), [row.name for row in known], fontsize=7)
    panel.set_ylim(-0.7, max(len(known), 1) - 0.3)
    panel.set_xlabel("times as fast as stock", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", color=_GRID)
    panel.set_axisbelow(True)
    panel.axvline(1, color="black", linewidth=1, label="stock")
    bests = [row.speed_up(row.best) or 1.0 for row in known]
    panel.barh(range(len(known)), bests, color=_BEST, height=0.7, label="best of the sweep")
    for place, (row, best) in enumerate(zip(known, bests, strict=True)):
        panel.annotate(
            f"{best:.2f} {row.best.removeprefix('triton:')}",
            (0, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
            color="white",
        )
    for color, label, slower in ((_GRID, "prior", False), (_WORSE, "prior, below stock", True)):
        marks = {
            place: ratio
            for place, row in enumerate(known)
            if (ratio := row.speed_up(row.prior)) and (ratio < 1) == slower
        }
        if marks or not slower:
            panel.plot(
                list(marks.values()),
                list(marks),
                linestyle="none",
                marker="D",
                color=color,
                markeredgecolor="black",
                markeredgewidth=0.6,
                markersize=4,
                label=label,
            )
    panel.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
