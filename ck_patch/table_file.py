"""The file of a tuning table: what it holds, and how it is read."""

from __future__ import annotations

import contextlib
import json
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ck_patch import candidates, files
from ck_patch.environment import FORMAT, Environment

LARGEST = 8 * 2**20
"""No more bytes than that are read: an entry has a few hundred, a table some hundred entries."""

_LARGEST_M = 2**63


@dataclass(frozen=True)
class Entry:
    """What was measured for one key: the candidate chosen, the M it was measured at, microseconds
    by candidate, and whether by calls of a render ("run") or by a sweep.

    Raises ValueError or TypeError for what is none of that, so that a file can hold it.
    """

    choice: str
    m: int
    us: Mapping[str, float]
    source: Literal["run", "sweep"]

    def __post_init__(self) -> None:
        if not isinstance(self.choice, str) or not self.choice:
            raise ValueError(f"choice is {self.choice!r}")
        if type(self.m) is not int or not 0 < self.m < _LARGEST_M:
            raise ValueError(f"m is {self.m!r}")
        if self.source not in ("run", "sweep"):
            raise ValueError(f"source is {self.source!r}")
        if not isinstance(self.us, Mapping):
            raise TypeError(f"us is {self.us!r}")
        # A copy: the table is written by another thread.
        object.__setattr__(self, "us", {name: _time(us) for name, us in self.us.items()})


def _time(us: object) -> float:
    if isinstance(us, bool) or not isinstance(us, int | float):
        raise TypeError(f"a time is {us!r}")
    if not 0 <= us <= sys.float_info.max:
        raise ValueError(f"a time is {us!r}")
    return float(us)


class NewerFormat(ValueError):
    """The file was written by a newer ck_patch."""


class TooLarge(ValueError):
    """The file is larger than what is read."""


@dataclass(frozen=True)
class Content:
    """The entries found; `obstacle` says why the file must stay as it is, `fault` what is wrong
    with one that may be replaced."""

    entries: dict[str, Entry]
    obstacle: str | None = None
    fault: str | None = None


def displaces(entry: Entry, known: Entry | None) -> bool:
    """Whether `entry`, the newer, takes the place of `known`: what a render measured, beside its
    own work, never does that to what a sweep measured, unless that names no candidate."""
    if known is None or known.source == "run" or entry.source == "sweep":
        return True
    return not names_candidate(known)


def names_candidate(entry: Entry) -> bool:
    """Whether the choice is one that this version has."""
    try:
        candidates.parse(entry.choice)
    except ValueError:
        return False
    return True


def merged(older: Mapping[str, Entry], newer: Mapping[str, Entry]) -> dict[str, Entry]:
    """All entries, and of two with one key the one that stays."""
    displacing = {key: e for key, e in newer.items() if displaces(e, older.get(key))}
    return {**older, **displacing}


def render(environment: Environment, entries: Mapping[str, Entry]) -> bytes:
    """The document of a table."""
    document = {
        "format": FORMAT,
        "environment": dict(environment),
        "entries": {
            key: {"choice": e.choice, "m": e.m, "us": e.us, "source": e.source}
            for key, e in entries.items()
        },
    }
    return f"{json.dumps(document, indent=1, sort_keys=True, allow_nan=False)}\n".encode()


def fitting(
    environment: Environment, older: Mapping[str, Entry], newer: Mapping[str, Entry]
) -> dict[str, Entry]:
    """As many of `newer`, from the first, as can join `older` in a document that is not too large
    to be read."""

    def size(entries: Mapping[str, Entry]) -> int:
        return len(render(environment, entries))

    room = LARGEST - size(older)
    found = {}
    for key, entry in newer.items():
        needed = size({key: entry}) - size({key: older[key]} if key in older else {})
        if needed <= room:
            room -= needed
            found[key] = entry
    return found


def parse(content: bytes) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Environment and entries of a document, without the entries that are malformed.

    Raises ValueError for what is no table, NewerFormat for one of a later format, TooLarge.
    """
    if len(content) > LARGEST:
        raise TooLarge("it is too large for a table")
    try:
        # Editors on Windows may put a byte order mark there.
        document = json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply for a table") from None
    if not isinstance(document, dict) or type(document.get("format")) is not int:
        raise ValueError("it is no table")
    if document["format"] > FORMAT:
        raise NewerFormat(f"its format is {document['format']}, here {FORMAT}")
    environment, items = document.get("environment"), document.get("entries")
    if (
        document["format"] != FORMAT
        or not isinstance(environment, dict)
        or not isinstance(items, dict)
    ):
        raise ValueError("it is no table")
    entries = {}
    for key, item in items.items():
        with contextlib.suppress(ValueError, TypeError, LookupError):
            entries[key] = Entry(item["choice"], item["m"], item["us"], item["source"])
    return environment, entries


def read_bytes(path: Path) -> bytes:
    """The file, or as much of it as `parse` needs to refuse it."""
    with path.open("rb") as file:
        return file.read(LARGEST + 1)


def read(path: Path, environment: Environment) -> Content:
    """What the file holds for that environment; never raises: a broken file holds nothing."""
    try:
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            return Content({}, "is not a regular file")
        theirs, entries = parse(read_bytes(path))
    except FileNotFoundError:
        return Content({})
    except OSError as error:
        return Content({}, f"cannot be read ({files.reason(error)})")
    except NewerFormat:
        return Content({}, "was written by a newer ck_patch")
    except TooLarge:
        return Content({}, "is too large for a table")
    except ValueError as error:
        return Content({}, fault=f"holds no table that can be read: {error}")
    if theirs != environment:
        return Content({}, "is of another environment")
    return Content(entries)
