"""The layer shapes of models that ship INT8 weights, by the name of the model."""

from __future__ import annotations

import json
from importlib import resources

Shape = tuple[int, int, int]
"""M, N and K: x is [M, K], weight is [N, K]."""


def load() -> dict[str, list[Shape]]:
    """All sets of `data/shapes.json`."""
    text = resources.files("ck_patch").joinpath("data/shapes.json").read_text(encoding="utf-8")
    return {
        name: [(m, n, k) for m, n, k in entry["shapes"]]
        for name, entry in json.loads(text)["sets"].items()
    }


def unique() -> list[Shape]:
    """Each shape of all sets once, the cheapest first."""
    shapes = {shape for shapes in load().values() for shape in shapes}
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))
