"""How far a command is: a line for each step, and rich's bar below on a terminal that has it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Advance = Callable[[str], None]


@contextlib.contextmanager
def shown(what: str, total: int) -> Iterator[Advance]:
    """Yields what is called with the line of each step."""
    with _bar(what, total) as bar:
        number = 0

        def advance(line: str) -> None:
            nonlocal number
            number += 1
            text = f"{number} of {total}: {line}"
            if bar is None:
                print(text, flush=True)
            else:
                bar(text)

        yield advance


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Advance | None]:
    made = _progress()
    if made is None:
        yield None
        return
    with made as progress:
        task = progress.add_task(what, total=total)

        def advance(text: str) -> None:
            progress.console.print(text, markup=False, highlight=False)
            progress.advance(task)

        yield advance


def _progress() -> Any:
    """rich's bar; None where it would not be seen."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import Progress

        return Progress()
    except Exception:  # Not installed, or broken: it is but an ornament.
        return None
