"""The order of a sweep: every candidate of every call is tried, the slow ones are given up early,
and the rest compete. No GPU here: the contest of a call is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ck_patch import candidates, route
from ck_patch.breaker import classify, describe
from ck_patch.candidates import STOCK, STOCK_CONFIGS, Candidate
from ck_patch.device import DeviceProfile
from ck_patch.route import GemmCall
from ck_patch.table_file import Entry
from ck_patch.trial import Trial
from ck_patch.tune.calls import named
from ck_patch.tune.rows import Row, Source

SLOW = 1.5
"""A candidate that takes so many times as long as the best is given up at first sight."""

# Of one call. Below that, the host's time for a launch may be most of it, and replays cost nothing.
_CHEAP_US = 1000.0
_FIRST_ROUNDS = 2
_ROUNDS = 7


class Declined(Exception):
    """Stock does not run this call, or not in that configuration; the text says why."""


class Wrong(Exception):
    """A candidate computes something else than stock."""


class Contest(Protocol):
    """The candidates of one call at work."""

    def attempt(self, candidate: Candidate) -> float:
        """Compare a candidate's result with stock's; microseconds of a second call, host included.

        Raises Declined, Wrong, and whatever the candidate raises.
        """

    def times(self, names: Collection[str], rounds: int) -> dict[str, float]:
        """Microseconds of candidates that passed `attempt`: they take turns, so many rounds."""


@dataclass
class Found:
    """The rows, the cheapest call first; why a call has none; what the budget or a dead GPU left
    out; and what was not as promised."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Done = Callable[[GemmCall, "Row | None"], None]
"""Called when a call is through, with its row if there is one."""


class _OutOfTime(Exception):
    pass


class Sweep:
    """A sweep on one device. `contest` makes the operands of a call there; `known` has the table's
    entries, for the choices before; `stock_configs` is as in `candidates.every`."""

    def __init__(
        self,
        gpu: DeviceProfile,
        contest: Callable[[GemmCall], Contest],
        known: Mapping[str, Entry],
        stock_configs: int = STOCK_CONFIGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._contest = contest
        self._known = known
        self._stock_configs = stock_configs
        self._clock = clock

    def run(self, calls: Sequence[GemmCall], budget: float | None, done: Done) -> Found:
        """Measure the calls, the cheapest first; none is begun, nor measured with some candidates
        only, after so many seconds."""
        ordered = sorted(calls, key=lambda call: (call.m * call.n * call.k, named(call)))
        until = math.inf if budget is None else self._clock() + budget
        found = Found()
        for number, call in enumerate(ordered):
            try:
                row = self._row(call, until, found)
            except _OutOfTime:
                found.left = list(map(named, ordered[number:]))
                break
            except Exception as error:
                # A CUDA context that is dead helps nobody further.
                found.problems.append(f"{named(call)} failed: {describe(error)}")
                found.left = list(map(named, ordered[number + 1 :]))
                break
            if row is not None:
                found.rows.append(row)
            done(call, row)
        found.problems += _failures(found.rows)
        return found

    def _row(self, call: GemmCall, until: float, found: Found) -> Row | None:
        name = named(call)
        contenders = candidates.every(call, self._gpu, self._stock_configs)
        if not contenders:
            found.skipped[name] = route.decide(call, self._gpu).reason
            return None
        self._in_time(until)
        try:
            return self._measured(call, contenders, until)
        except Declined as reason:
            found.skipped[name] = str(reason)
        except _OutOfTime:
            raise
        except Exception as error:
            failure = classify(error)
            if failure == "sticky":
                raise
            if failure == "memory":
                found.skipped[name] = "does not fit in this GPU's memory"
            else:
                found.problems.append(f"{name} failed: {describe(error)}")
        return None

    def _measured(self, call: GemmCall, contenders: Sequence[Candidate], until: float) -> Row:
        contest = self._contest(call)
        looks: dict[str, float] = {}
        failed: dict[str, str] = {}
        for candidate in contenders:
            self._in_time(until)
            try:
                looks[candidate.name] = contest.attempt(candidate)
            except Declined:
                continue
            except Wrong as fault:
                failed[candidate.name] = str(fault)
            except Exception as error:
                if classify(error) != "other":
                    raise
                failed[candidate.name] = describe(error)
        if not looks:
            raise RuntimeError(f"no candidate works: {'; '.join(failed.values())}")
        prior = candidates.candidates(call, self._gpu, stock_configs=self._stock_configs)
        first = prior.ordered[0].name
        old, old_from = self._old(call, first, looks)
        # What others are compared with is measured well, however slow it is.
        kept = {STOCK.name, first, old}
        quick = contest.times(_near(looks, kept, _CHEAP_US), _FIRST_ROUNDS)
        final = contest.times(_near(quick, kept), _ROUNDS)
        us = {name: final.get(name, quick.get(name, look)) for name, look in looks.items()}
        slow = tuple(name for name in us if name not in final)
        return Row(call, us, first, old, old_from, choice(us), slow, failed)

    def _old(self, call: GemmCall, prior: str, looks: Mapping[str, float]) -> tuple[str, Source]:
        entry = self._known.get(candidates.key(call))
        if entry is None or entry.choice not in looks:
            return prior, "prior"
        return entry.choice, entry.source

    def _in_time(self, until: float) -> None:
        if self._clock() >= until:
            raise _OutOfTime


def choice(us: Mapping[str, float]) -> str:
    """What a trial chooses that measures these times every time."""
    trial = Trial(tuple(us))
    while (name := trial.next()) is not None:
        trial.add(name, us[name])
    return trial.best


def _near(us: Mapping[str, float], kept: Collection[str], cheap: float = 0.0) -> list[str]:
    limit = max(cheap, SLOW * min(us.values()))
    return [name for name, time in us.items() if time <= limit or name in kept]


def _failures(rows: Sequence[Row]) -> list[str]:
    """A line for each candidate and reason, however many calls it is true of."""
    at: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.failed.items():
            at.setdefault((name, reason), []).append(row.name)
    return [
        f"{name} {reason} at {calls[0]}" + (f" and {len(calls) - 1} more" if calls[1:] else "")
        for (name, reason), calls in at.items()
    ]
