"""The measurement of one GEMM's candidates in the calls that a program makes anyway. No GPU here:
times come in, a choice goes out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ck_patch.forks import ForkSafe

SAMPLES = 7
"""Times that a candidate gets before it is chosen: the median of so many stands three outliers."""

MARGIN = 0.02
"""By how much a candidate has to beat stock; less is noise, and a tie is stock's."""

# A candidate whose good samples are this many times slower than the bad ones of the best is given
# up, after one sample, two, and more. Stock is not before it has three: a wrong first sample must
# not take away what all have to beat.
_LIMITS = (10.0, 1.3, 1.15)

# So many calls that could not be timed are taken as they come: a comparison of first results lets
# the GPU run dry. After more of them, as where it idles anyway, calls pass between attempts, each
# time twice as many, up to a limit.
_PATIENCE = 8
_LONGEST_PAUSE = 1024

# A sample that is not back after so many further calls is lost: its call was interrupted, or was
# that of an op which has made no other since. A launch queue holds fewer.
_LOST_AFTER = 1024


class Trial(ForkSafe):
    """The candidates of one key, by name, each given a few of the calls.

    `names` has the one to start with first; "stock" may be among them and wins ties. Calls take
    turns, so that clocks and temperature change for all alike. Any number of threads may ask.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        self.winner: str | None = None
        """The choice, once it is made."""
        self._times: dict[str, list[float]] = {name: [] for name in names}
        self._running = dict.fromkeys(names, 0)
        self._alive = list(names)
        self._pause = 0
        self._failed_attempts = 0
        self._waited = 0

    def rests(self) -> bool:
        """Whether this call should not even ask: attempts before it told nothing. No lock is taken:
        a count that two threads miss costs nothing."""
        if self._pause > 0:
            self._pause -= 1
            return True
        return False

    def next(self) -> str | None:
        """The candidate that this call should time; None if it should run the best one untimed.

        Each name handed out comes back by `add`, `void` or `drop`.
        """
        with self._lock:
            if self.winner is not None:
                return None
            open_ = [name for name in self._alive if self._given(name) < SAMPLES]
            if not open_:
                self._waited += 1
                if self._waited > _LOST_AFTER:
                    self._running = dict.fromkeys(self.names, 0)
                    self._waited = 0
                return None
            name = min(open_, key=self._given)
            self._running[name] += 1
            return name

    def add(self, name: str, microseconds: float) -> None:
        """Count what a call took; a time that cannot be, after a clock went backwards, does not
        count."""
        if not (math.isfinite(microseconds) and microseconds > 0):
            self.void(name)
            return
        with self._lock:
            self._came_back(name)
            self._failed_attempts = 0
            self._times[name].append(microseconds)
            self._give_up_losers()
            self._decide()

    def void(self, name: str, pause: bool = True) -> None:
        """A call that was not timed after all; the next attempts wait longer each time, unless it
        is known that nothing stands in their way."""
        with self._lock:
            self._came_back(name)
            if pause:
                self._failed_attempts += 1
                beyond = self._failed_attempts - _PATIENCE
                self._pause = min(1 << beyond, _LONGEST_PAUSE) if beyond > 0 else 0

    def drop(self, name: str) -> None:
        """Take out a candidate that cannot be used."""
        with self._lock:
            if name in self._alive:
                self._alive.remove(name)
            self._times[name].clear()
            self._decide()

    @property
    def best(self) -> str:
        """What is known to be the best so far; the first candidate as long as nothing is."""
        with self._lock:
            return self.winner or self._best()

    @property
    def is_sound(self) -> bool:
        """Whether `best` rests on three samples of each candidate that is still in the running."""
        with self._lock:
            return all(len(self._times[name]) >= 3 for name in self._alive)

    @property
    def microseconds(self) -> dict[str, float]:
        """The median time of each candidate that has one, the fastest first."""
        with self._lock:
            known = {name: _median(times) for name, times in self._times.items() if times}
        return dict(sorted(known.items(), key=lambda item: item[1]))

    def _came_back(self, name: str) -> None:
        # One that was taken for lost is not under way any more.
        self._running[name] = max(0, self._running[name] - 1)
        self._waited = 0

    def _given(self, name: str) -> int:
        return len(self._times[name]) + self._running[name]

    def _give_up_losers(self) -> None:
        known = {name: _median(self._times[name]) for name in self._alive if self._times[name]}
        best = min(_upper_median(self._times[name]) for name in known)
        for name, time in known.items():
            count = min(len(self._times[name]), len(_LIMITS))
            if time > _LIMITS[count - 1] * best and (name != "stock" or count == len(_LIMITS)):
                self._alive.remove(name)

    def _decide(self) -> None:
        if all(len(self._times[name]) >= SAMPLES for name in self._alive) or len(self._alive) <= 1:
            self.winner = self._best()

    def _best(self) -> str:
        if not self._alive:
            return "stock"
        known = {name: _median(times) for name, times in self._times.items() if len(times) > 1}
        # One sample is not enough to leave the one to start with.
        rivals = {name: known[name] for name in self._alive if name in known}
        if not rivals:
            return self._alive[0]
        limit = (1 - MARGIN) * known.get("stock", math.inf)
        faster = {name: time for name, time in rivals.items() if time < limit}
        return min(faster, key=faster.__getitem__) if faster else "stock"


def _median(times: Sequence[float]) -> float:
    """The lower one where there are two."""
    return sorted(times)[(len(times) - 1) // 2]


def _upper_median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]
