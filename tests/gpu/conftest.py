"""GPU tests: skipped by name without one; `--record FILE` keeps what they saw as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    pytest.importorskip("comfy_kitchen")


@pytest.fixture(autouse=True)
def no_breaker_opens(gpu: None) -> Iterator[None]:
    """A test of the installed slots that silently ran on stock would show nothing."""
    yield
    import ck_patch

    assert ck_patch.status().breakers == ()


class Record:
    """Rows that the tests of this run measured or compared, by the name of the table."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest, gpu: None) -> Iterator[Record]:
    record = Record()
    yield record
    target: Path | None = request.config.getoption("--record")
    if target is None:
        return
    from ck_patch.stamp import stamp

    session = request.session
    document = {
        "stamp": stamp(),
        "command": "./scripts/test.sh -m gpu --record " + target.name,
        "tests": {"collected": session.testscollected, "failed": session.testsfailed},
        **record.tables,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
