"""The timer by events that a test lets come to pass: no sample is lost, whatever is raised."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ck_patch.ops.timer import EventTimer


class FakeEvent:
    """An event that is over at once, ten microseconds after the one before it."""

    now = 0.0
    over = True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self, stream: object) -> None:
        FakeEvent.now += 0.010
        self.at = FakeEvent.now

    def query(self) -> bool:
        return FakeEvent.over

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> EventTimer:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "over", True)
    # The host takes no time, so that none of it is a gap.
    monkeypatch.setattr("ck_patch.ops.timer.time.perf_counter", lambda: 0.0)
    return EventTimer()


def measure(
    timer: EventTimer, work: Callable[[], bool], report: Callable[[float | None], None]
) -> bool:
    return timer.measure(None, work, report)  # type: ignore[arg-type]


def test_a_time_is_reported_once_it_is_over(
    timer: EventTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float | None] = []
    monkeypatch.setattr(FakeEvent, "over", False)
    assert measure(timer, lambda: True, times.append)
    timer.collect()
    assert times == []
    monkeypatch.setattr(FakeEvent, "over", True)
    timer.collect()
    timer.collect()
    assert times == [pytest.approx(10.0)]


@pytest.mark.parametrize("what", [RuntimeError, KeyboardInterrupt])
def test_work_that_raises_reports_that_nothing_was_timed(
    timer: EventTimer, what: type[BaseException]
) -> None:
    def work() -> bool:
        raise what

    times: list[float | None] = []
    with pytest.raises(what):
        measure(timer, work, times.append)
    assert not measure(timer, lambda: False, times.append)
    timer.collect()
    assert times == [None, None]


def test_an_interrupt_after_the_work_reports_that_nothing_was_timed(
    timer: EventTimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(event: FakeEvent) -> bool:
        raise KeyboardInterrupt

    times: list[float | None] = []
    monkeypatch.setattr(FakeEvent, "query", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(timer, lambda: True, times.append)
    assert times == [None]


def test_a_report_that_raises_loses_no_other(timer: EventTimer) -> None:
    times: list[float | None] = []

    def fail(microseconds: float | None) -> None:
        raise OSError("planted")

    for report in (fail, times.append, times.append):
        assert measure(timer, lambda: True, report)
    with pytest.raises(OSError, match="planted"):
        timer.collect()
    timer.collect()
    assert times == [pytest.approx(10.0)] * 2
