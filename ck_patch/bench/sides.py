"""Stock and ours by the same calls, the patcher putting ours in place and out again in between."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import ck_patch
from ck_patch import measure
from ck_patch.measure import Captured, Function, Recorder

Key = TypeVar("Key", bound=Hashable)
Times = dict[tuple[str, Key], float]
"""By side, `ours`, `stock` or none for what the patcher does not touch, and by name."""

# Seconds that the calls of one graph take, and as many eager ones.
_SPAN = 2e-3
_GRAPH_ROUNDS = 5
# Each enables anew, after which every kernel is proven anew.
_EAGER_ROUNDS = 3
# The host stumbles now and then for as long as a burst of calls takes.
_EAGER_BURSTS = 3
_HOST_ROUNDS = 5

SIDES = (("ours", ck_patch.enable), ("stock", ck_patch.disable))


def by_graph(switched: Mapping[Key, Function], others: Mapping[Key, Function]) -> Times[Key]:
    """Milliseconds per call by CUDA graph replay: a graph keeps what was in place at capture."""
    recorder = Recorder(_SPAN)
    graphs: dict[tuple[str, Key], Captured] = {}
    for side, switch in SIDES:
        switch()
        for key, function in switched.items():
            graphs[side, key] = recorder.capture(function)
    for key, function in others.items():
        graphs["", key] = recorder.capture(function)
    return measure.replay_times(graphs, _GRAPH_ROUNDS)


def eagerly(
    switched: Mapping[Key, Function], others: Mapping[Key, Function], about: Mapping[Key, float]
) -> Times[Key]:
    """Milliseconds per call of calls in a row, which take `about` so many on the GPU."""

    def time_of(key: Key, function: Function) -> float:
        for _ in range(2):  # Ours proves its kernel, then makes its launch.
            function()
        # No host makes a call of these in less than 20 us.
        calls = int(_SPAN * 1e3 / max(about[key], 0.02))
        bursts = (measure.eager_time(function, max(1, calls)) for _ in range(_EAGER_BURSTS))
        return statistics.median(bursts)

    return _in_turn(switched, others, time_of, _EAGER_ROUNDS)


def on_host(switched: Mapping[Key, Function], others: Mapping[Key, Function]) -> Times[Key]:
    """Microseconds of host time per call, of functions that keep no GPU busy."""

    def time_of(key: Key, function: Function) -> float:
        return measure.host_times({"": function}, rounds=3)[""]

    return _in_turn(switched, others, time_of, _HOST_ROUNDS)


def _in_turn(
    switched: Mapping[Key, Function],
    others: Mapping[Key, Function],
    time_of: Callable[[Key, Function], float],
    rounds: int,
) -> Times[Key]:
    samples: dict[tuple[str, Key], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for side, switch in SIDES:
            switch()
            for key, function in switched.items():
                samples[side, key].append(time_of(key, function))
        for key, function in others.items():
            samples["", key].append(time_of(key, function))
    return {name: statistics.median(values) for name, values in samples.items()}
