"""Writes docs/settings.md from the table of environment variables."""

from __future__ import annotations

import argparse
from pathlib import Path

from ck_patch import settings

TARGET = Path(__file__).resolve().parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

Environment variables, read when `comfy_kitchen` is imported and at each `ck_patch.enable()`;
`CK_PATCH` is read when Python starts as well. A value that is not understood warns once and means
the default; `python -m ck_patch info` shows what is set.

| variable | values | default | what it does |
|---|---|---|---|
"""
FOOT = """
This page is written by `python scripts/document_settings.py` from `ck_patch/settings.py`.
"""


def text() -> str:
    """The whole page."""
    rows = [
        f"| `{variable.name}` | {_values(variable)} | {_default(variable)} | {variable.help} |\n"
        for variable in settings.VARIABLES
    ]
    return HEAD + "".join(rows) + FOOT


def _values(variable: settings.Variable) -> str:
    return ", ".join(f"`{choice}`" for choice in variable.choices) or variable.kind


def _default(variable: settings.Variable) -> str:
    return f"`{variable.default}`" if variable.default else "empty"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(text(), encoding="utf-8")
    print(f"wrote {TARGET}")
