"""Times of work on a GPU's streams, by events that are read when they are over: nobody waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ck_patch.forks import ForkSafe

# Where the GPU had nothing to do before, the time between the events holds the host's time to
# launch. So much of the whole is taken for none.
_TOLERATED = 0.01


Report = Callable[[float | None], None]
"""Called once with microseconds, or with None if the time tells nothing."""


@dataclass
class _Span:
    start: torch.cuda.Event
    end: torch.cuda.Event
    report: Report
    gap: float
    """Microseconds by which the time may be too long."""


class EventTimer(ForkSafe):
    """Times by CUDA events, on one device.

    Event objects are used again: there are as many as spans under way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._spans: list[_Span] = []
        self._free: list[torch.cuda.Event] = []

    def measure(self, stream: torch.cuda.Stream, work: Callable[[], bool], report: Report) -> bool:
        """Do the work, which launches something on that stream and says whether it did; `report`
        gets its time from a later `collect`, or None at once if there was nothing to time."""
        start, end = self._event(), self._event()
        done = False
        try:
            start.record(stream)
            begin = time.perf_counter()
            done = work()
            # If the GPU has not come to the start by now, its work follows without a gap.
            gap = (time.perf_counter() - begin) * 1e6 if start.query() else 0.0
            end.record(stream)
        finally:
            if not done:
                self._free += start, end
                report(None)
        if done:
            with self._lock:
                self._spans.append(_Span(start, end, report, gap))
        return done

    def collect(self) -> None:
        """Report what is over by now."""
        if not self._spans:
            return
        over: list[_Span] = []
        running: list[_Span] = []
        with self._lock:
            for span in self._spans:
                (over if span.end.query() else running).append(span)
            self._spans = running
        for span in over:
            microseconds = span.start.elapsed_time(span.end) * 1e3
            self._free += span.start, span.end
            span.report(microseconds if span.gap <= _TOLERATED * microseconds else None)

    def _event(self) -> torch.cuda.Event:
        try:
            return self._free.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)
