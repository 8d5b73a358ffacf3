"""The layer shapes of models that ship INT8 weights, by the name of the model, and of a user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

Shape = tuple[int, int, int]
"""M, N and K: x is [M, K], weight is [N, K]."""

Sets = dict[str, list[Shape]]

# Of one matrix. Far above it, torch cannot even express the size.
_MOST_ELEMENTS = 2**40
_LONGEST_TEXT = 60


def load() -> Sets:
    """All sets of `data/shapes.json`."""
    text = resources.files("ck_patch").joinpath("data/shapes.json").read_text(encoding="utf-8")
    return {
        name: [(m, n, k) for m, n, k in entry["shapes"]]
        for name, entry in json.loads(text)["sets"].items()
    }


def unique(sets: Mapping[str, list[Shape]] | None = None) -> list[Shape]:
    """Each shape of all sets once, the cheapest first."""
    found = {shape for shapes in (load() if sets is None else sets).values() for shape in shapes}
    return sorted(found, key=lambda shape: (shape[0] * shape[1] * shape[2], shape))


def named(shape: Shape) -> str:
    """For example `37296x21504x5376`."""
    return "x".join(map(str, shape))


def abridged(text: str) -> str:
    """What a user gave, for a message that is to be read."""
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def parse(text: str) -> Shape:
    """The shape that `named` writes; ValueError says what is wrong with the text."""
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise ValueError(f"{abridged(text)} is not of the form MxNxK")
    if max(map(len, sizes)) > 10:
        raise ValueError(f"{abridged(text)} is larger than any GPU's memory")
    return _checked(text, *map(int, sizes))


def select(text: str) -> Sets:
    """The sets that a comma-separated list names: sets of `data/shapes.json`, shapes MxNxK, and
    files of the form of `data/shapes.json`; ValueError says what is none of them."""
    found: Sets = {}
    known = load()
    for item in [text] if _is_file(text) else text.split(","):
        if item in known:
            found[item] = known[item]
        elif _is_file(item):
            found |= _read(Path(item))
        elif item[:1].isdigit():
            found.setdefault("--shapes", []).append(parse(item))
        else:
            raise ValueError(
                f"{abridged(item)!r} is neither a file nor MxNxK nor a set of shapes; "
                f"there are: {', '.join(known)}"
            )
    return found


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # Too long for a name, or with a NUL in it.
        return False


def _read(path: Path) -> Sets:
    try:
        sets: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["sets"]
        found = {
            str(name): [_checked(f"{m}x{n}x{k}", m, n, k) for m, n, k in entry["shapes"]]
            for name, entry in sets.items()
        }
    except (OSError, UnicodeDecodeError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no sets of shapes ({type(error).__name__})") from None
    except ValueError as error:
        raise ValueError(f"{path} holds no sets of shapes ({error})") from None
    if not any(found.values()):
        raise ValueError(f"{path} holds no shape")
    return found


def _checked(text: str, m: int, n: int, k: int) -> Shape:
    text = abridged(text)
    if not all(type(size) is int for size in (m, n, k)):
        raise ValueError(f"{text} is not of whole numbers")
    if max(m * k, n * k, m * n) > _MOST_ELEMENTS:
        raise ValueError(f"{text} is larger than any GPU's memory")
    if min(m, n, k) < 1:
        raise ValueError(f"{text} has nothing to compute")
    return m, n, k
