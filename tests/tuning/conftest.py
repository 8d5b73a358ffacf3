"""What the tests of tables share: no thread saves by itself, and every line can be logged anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ck_patch import log, table


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "_seen", {})
    monkeypatch.setattr(table, "_DELAY", 3600.0)
    log.configure("info")
    yield
    for left in list(table._tables):
        if left._timer is not None:
            left._timer.cancel()
        left._start()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a table is kept: the folder is not there yet."""
    return tmp_path / "Ünï cödé" / "ck_patch" / "tuned-sm_90-0123456789ab.json"
