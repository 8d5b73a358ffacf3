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
        timed = False
        try:
            start.record(stream)
            begin = time.perf_counter()
            done = work()
            if done:
                # If the GPU has not come to the start by now, its work follows without a gap.
                gap = (time.perf_counter() - begin) * 1e6 if start.query() else 0.0
                end.record(stream)
                with self._lock:
                    self._spans.append(_Span(start, end, report, gap))
                timed = True
        finally:
            # Whatever was raised, by Ctrl-C too.
            if not timed:
                self._free += start, end
                report(None)
        return done

    def collect(self) -> None:
        """Report what is over by now."""
        while (span := self._take_over()) is not None:
            microseconds = span.start.elapsed_time(span.end) * 1e3
            self._free += span.start, span.end
            span.report(microseconds if span.gap <= _TOLERATED * microseconds else None)

    def _take_over(self) -> _Span | None:
        """One that is over, and no more: what reporting it may raise must not lose another."""
        if not self._spans:
            return None
        with self._lock:
            for index, span in enumerate(self._spans):
                if span.end.query():
                    return self._spans.pop(index)
        return None

    def _event(self) -> torch.cuda.Event:
        try:
            return self._free.pop()
        except IndexError:
            return torch.cuda.Event(enable_timing=True)
