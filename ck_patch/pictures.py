"""What the pictures of `bench` and `tune` share: bars and marks of how many times as fast as stock
something is, a line of them for each name."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

BETTER, WORSE, GRID = "#2a78b5", "#c0504d", "#dddddd"


def prepare(panel: Any, names: Sequence[str]) -> None:
    """Give an empty panel its axes, the last name at the top, and a line where stock is."""
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.set_ylim(-0.7, max(len(names), 1) - 0.3)
    panel.set_xlabel("times as fast as stock", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.grid(axis="x", color=GRID)
    panel.set_axisbelow(True)
    panel.axvline(1, color="black", linewidth=1, label="stock")


def bars(
    panel: Any, ratios: Mapping[int, float], texts: Sequence[str], colors: Sequence[str]
) -> None:
    """Draw a bar with a text in it at each place."""
    panel.barh(list(ratios), list(ratios.values()), color=colors, height=0.7)
    for place, text in zip(ratios, texts, strict=True):
        panel.annotate(
            text,
            (0, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
            color="white",
        )


def marks(panel: Any, ratios: Mapping[int, float], label: str, **look: Any) -> None:
    """Draw a mark at each place; `look` is matplotlib's."""
    panel.plot(list(ratios.values()), list(ratios), linestyle="none", label=label, **look)


def rendered(figure: Any, suffix: str) -> bytes:
    """The figure as a file of that suffix, the ratios of all its panels from 0 on."""
    for panel in figure.axes:
        panel.set_xlim(left=0)
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip(".").lower(), dpi=120)
    return content.getvalue()
