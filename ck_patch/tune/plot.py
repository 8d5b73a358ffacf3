"""The rows of a sweep as a picture: how many times as fast as stock, call by call."""

from __future__ import annotations

from collections.abc import Sequence

from ck_patch import pictures
from ck_patch.candidates import STOCK
from ck_patch.pictures import BETTER, GRID, WORSE
from ck_patch.tune.rows import Row


def draw(rows: Sequence[Row], title: str, suffix: str) -> bytes:
    """The picture, in the format of that suffix: bars for the best of the sweep, diamonds for the
    prior, stock at 1; the largest call at the top."""
    from matplotlib.figure import Figure

    known = [row for row in rows if STOCK.name in row.us]
    figure = Figure(figsize=(9, 1.8 + 0.23 * len(known)), layout="constrained")
    figure.suptitle(title, fontsize=8, wrap=True)
    panel = figure.subplots()
    pictures.prepare(panel, [row.name for row in known])
    bests = {place: row.speed_up(row.best) or 1.0 for place, row in enumerate(known)}
    texts = [
        f"{best:.2f} {row.best.removeprefix('triton:')}"
        for row, best in zip(known, bests.values(), strict=True)
    ]
    pictures.bars(panel, bests, texts, [BETTER] * len(bests))
    panel.barh([], [], color=BETTER, label="best of the sweep")
    for color, label, slower in ((GRID, "prior", False), (WORSE, "prior, below stock", True)):
        found = {
            place: ratio
            for place, row in enumerate(known)
            if (ratio := row.speed_up(row.prior)) and (ratio < 1) == slower
        }
        if found or not slower:
            look = {"marker": "D", "markersize": 4, "color": color}
            edge = {"markeredgecolor": "black", "markeredgewidth": 0.6}
            pictures.marks(panel, found, label, **look, **edge)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return pictures.rendered(figure, suffix)
