"""Draws what tests/gpu/test_tuning.py recorded: python -m scripts.plot_tuning FILE.json FILE.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def main(source: Path, target: Path) -> None:
    document = json.loads(source.read_text(encoding="utf-8"))
    figure = Figure(figsize=(11, 9), layout="constrained")
    left, right = figure.subplots(1, 2)
    _passes(left, document["passes"])
    _choices(right, document["choices"])
    stamp = document["stamp"]
    figure.suptitle(", ".join(f"{name} {text}" for name, text in stamp.items()), fontsize=7)
    figure.savefig(target, dpi=110)


def _passes(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The first pass of forty blocks, and one that knows, over stock's."""
    names = [row["model"] for row in rows]
    for shift, key, label in (
        (-0.2, "learning_ms", "first pass, measuring"),
        (0.2, "learned_ms", "a process that knows"),
    ):
        ratios = [row["stock_ms"] / row[key] for row in rows]
        places = [index + shift for index in range(len(rows))]
        bars = axes.barh(places, ratios, height=0.38, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set_title("GEMMs of 40 blocks, times as fast as stock")
    _finish(axes)


def _choices(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Each choice over stock, beside the best of a sweep."""
    places = range(len(rows))
    best = [row["times_stock"] * (1 + row["regret"]) for row in rows]
    axes.barh(places, [row["times_stock"] for row in rows], label="chosen in use")
    axes.plot(best, places, "k|", markersize=9, label="best of a sweep")
    names = ["x".join(str(row[size]) for size in "mnk") for row in rows]
    axes.set_yticks(places, names, fontsize=7)
    axes.set_title("choices, times as fast as stock")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.axvline(1, color="black", linewidth=1)
    axes.legend(fontsize=8, loc="lower right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
