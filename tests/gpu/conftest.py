"""GPU tests: skipped by name without one; `--record FILE` keeps what they saw as JSON."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import Record

__all__ = ["Record"]


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
