"""Tests on two GPUs of one kind: skipped by name on fewer; `--record FILE` keeps what they saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.gpu.conftest import gpu, no_breaker_opens

if TYPE_CHECKING:
    from tests.gpu2.devices import Started

__all__ = ["gpu", "no_breaker_opens"]


@pytest.fixture(autouse=True)
def current_device_unchanged(gpu: None) -> Iterator[None]:
    """Every test starts with cuda:0 as the current device, and leaves it so."""
    import torch

    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0


@pytest.fixture(scope="session", autouse=True)
def programs(gpu: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """The programs of these tests, by the modules that they are.

    All are started with the first test and run beside the others: each takes long to start.
    """
    from tests.gpu2 import test_assumed_pair, test_failures, test_spread, test_tuning
    from tests.gpu2.devices import Started

    started = {
        "assumed_pair": Started("assumed_pair", test_assumed_pair.RUNS),
        "failing": Started("failing", test_failures.RUNS),
        "spread": Started("spread", test_spread.RUNS),
        "tuned": Started("tuned", test_tuning.runs(tmp_path_factory.mktemp("tables"))),
    }
    yield started
    for program in started.values():
        program.stop()
