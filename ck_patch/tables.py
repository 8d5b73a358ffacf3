"""Tables on standard output: rich's on a terminal that has it, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def show(title: str, columns: Sequence[str], rows: Rows) -> None:
    """Print a table, set off by an empty line."""
    print()
    # Into a file or a pipe nothing may be folded to the width of a terminal.
    if not (sys.stdout.isatty() and _rich(title, columns, rows)):
        print(plain(title, columns, rows))


def number(value: float | None, digits: int) -> str:
    """A cell; what is not known is a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def plain(title: str, columns: Sequence[str], rows: Rows) -> str:
    """The table as text, its columns aligned by spaces."""
    lines = [columns, ["-" * len(column) for column in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([title, *text])


def _rich(title: str, columns: Sequence[str], rows: Rows) -> bool:
    """Whether rich could be imported, and has printed the table."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:  # Not installed, or broken: it is but an ornament.
        return False
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    return True
