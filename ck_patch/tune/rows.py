"""What a sweep found: a row for each call, what follows from it, and the means of all."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ck_patch.candidates import STOCK
from ck_patch.route import GemmCall
from ck_patch.tune import calls

Source = Literal["prior", "run", "sweep"]


@dataclass(frozen=True)
class Row:
    """One call: microseconds by candidate, the choice before and the one that follows.

    `prior` is the choice where nothing was measured, `old` the one of the table before this sweep,
    or the prior again; `old_from` says which. `slow` were so much slower than the best that theirs
    are the times of a quick look. `failed` has the reasons of those that can never be chosen: they
    have no time.
    """

    call: GemmCall
    us: Mapping[str, float]
    prior: str
    old: str
    old_from: Source
    choice: str
    slow: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The shape, and what is not the usual about the call."""
        return calls.named(self.call)

    @property
    def best(self) -> str:
        """The fastest candidate, by however little."""
        return min(self.us, key=self.us.__getitem__)

    def speed_up(self, candidate: str) -> float | None:
        """How many times as fast as stock a candidate is, where both times are known."""
        if STOCK.name not in self.us or candidate not in self.us:
            return None
        return self.us[STOCK.name] / self.us[candidate]

    def regret(self, candidate: str) -> float | None:
        """By how much of the time of the best a candidate takes longer: 0.05 is 5%; None where it
        has no time."""
        return self.us[candidate] / self.us[self.best] - 1 if candidate in self.us else None

    def as_json(self) -> dict[str, Any]:
        """All of it, the fastest candidates first."""
        by_time = sorted(self.us.items(), key=lambda item: item[1])
        return {
            **dataclasses.asdict(self.call),
            **{name: getattr(self, name) for name in ("prior", "old", "old_from", "choice")},
            "best": self.best,
            **{f"speed_up_{which}": _rounded(self.speed_up(self._of(which))) for which in _WHICH},
            **{f"regret_{which}": _rounded(self.regret(self._of(which))) for which in _WHICH},
            "us": {name: round(us, 3) for name, us in by_time},
            "slow": list(self.slow),
            "failed": dict(self.failed),
        }

    def _of(self, which: str) -> str:
        candidate: str = getattr(self, which)
        return candidate


_WHICH = ("prior", "old", "choice")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


@dataclass(frozen=True)
class Mean:
    """A geometric mean over the calls, and the worst of them."""

    what: str
    rows: int
    geometric_mean: float
    worst: float
    worst_at: str


def means(rows: Sequence[Row]) -> list[Mean]:
    """How many times as fast as stock the choices are, and how many times as long as the best they
    take, where there are rows for it."""
    found = []
    for which, what in zip(_WHICH, ("prior", "old choice", "new choice"), strict=True):
        ratios = {row.name: row.speed_up(row._of(which)) for row in rows}
        found.append(_mean(f"speed-up over stock, {what}", ratios, min))
    for which, what in zip(_WHICH, ("prior", "old choice", "new choice"), strict=True):
        regrets = {row.name: row.regret(row._of(which)) for row in rows}
        times = {name: None if one is None else 1 + one for name, one in regrets.items()}
        found.append(_mean(f"time over the best's, {what}", times, max))
    return [mean for mean in found if mean is not None]


def _mean(
    what: str, ratios: Mapping[str, float | None], worst: Callable[[Iterable[float]], float]
) -> Mean | None:
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return None
    value = worst(known.values())
    (at, *_) = (name for name, ratio in known.items() if ratio == value)
    return Mean(what, len(known), statistics.geometric_mean(known.values()), value, at)
