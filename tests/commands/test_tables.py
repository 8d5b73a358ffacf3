"""Tables: aligned text where rich is missing, broken, or nobody is looking."""

from __future__ import annotations

import io
import sys

import pytest

from ck_patch import tables

COLUMNS = ("name", "value")
ROWS = [("a", "1"), ("a long name", "[red]2[/red]")]
PLAIN = "title\nname         value\n----         -----\na            1\na long name  [red]2[/red]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_text_is_aligned() -> None:
    assert tables.plain("title", COLUMNS, ROWS) == PLAIN


def test_no_rows_are_no_error() -> None:
    assert tables.plain("title", COLUMNS, []) == "title\nname  value\n----  -----"


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show("title", COLUMNS, ROWS)
    assert capsys.readouterr().out == f"\n{PLAIN}\n"


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    tables.show("title", COLUMNS, ROWS)
    assert terminal.getvalue() == f"\n{PLAIN}\n"


def test_rich_shows_every_cell_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    tables.show("title", COLUMNS, ROWS)
    printed = terminal.getvalue()
    assert printed != f"\n{PLAIN}\n"
    assert all(cell in printed for row in ROWS for cell in row)
