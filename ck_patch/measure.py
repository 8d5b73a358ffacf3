"""Timing on a GPU: graph replays or calls of several functions, interleaved, and their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)
Function = Callable[[], object]


class Captured(NamedTuple):
    """A CUDA graph that repeats a function `calls` times."""

    graph: torch.cuda.CUDAGraph
    calls: int


def graph_times(
    functions: Mapping[Name, Function], *, rounds: int = 7, span: float = 2e-3
) -> dict[Name, float]:
    """Milliseconds per call of each function, on the current device.

    Each function is captured into a CUDA graph that repeats it for about `span` seconds, so that
    neither the host nor a launch gap counts. The graphs take turns, `rounds` times, so that clocks
    and temperature are the same for all; the median counts. The functions run on the same tensors
    every time: inputs below the size of the L2 are read from it.
    """
    recorder = Recorder(span)
    graphs = {name: recorder.capture(function) for name, function in functions.items()}
    return replay_times(graphs, rounds)


class Recorder:
    """Captures functions one after the other, each as often as it takes about `span` seconds.

    The graphs share their memory, on the current device: each writes over the results of others.
    """

    def __init__(self, span: float) -> None:
        self._span = span
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Function) -> Captured:
        """A graph that repeats the function, at least once and at most 50 times."""
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            function()  # Compiles, loads modules and makes handles, all forbidden under capture.
            once = _milliseconds(function)
            calls = max(1, min(50, int(self._span * 1e3 / max(once, 1e-3))))
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                for _ in range(calls):
                    function()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph, calls)


def replay_times(graphs: Mapping[Name, Captured], rounds: int) -> dict[Name, float]:
    """Milliseconds per call of what each graph repeats: they take turns, the median counts."""
    samples: dict[Name, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            samples[name].append(_milliseconds(graph.replay) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


def eager_time(function: Function, calls: int) -> float:
    """Milliseconds per call of `calls` in a row: of the host or of the GPU, whichever is slower."""

    def repeat() -> None:
        for _ in range(calls):
            function()

    torch.cuda.synchronize()
    return _milliseconds(repeat) / calls


def host_times(
    functions: Mapping[str, Function], *, rounds: int = 9, calls: int = 100
) -> dict[str, float]:
    """Microseconds of host time per call of each function, interleaved; the median counts.

    For functions whose GPU work is shorter than their host work; a full launch queue would be
    timed otherwise.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for round_number in range(rounds + 1):
        for name, function in functions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            elapsed = time.perf_counter() - begin
            if round_number > 0:  # The first round warms up.
                samples[name].append(elapsed / calls * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def replayed(function: Callable[[], T], spoil: Callable[[T], object] | None = None) -> T:
    """What `function` returns, holding what a replay of the CUDA graph it was captured in wrote.

    `spoil` gets the result before the replay, to poison what is to be written.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function()  # As in Recorder.
        with torch.cuda.graph(graph, stream=stream):
            result = function()
    torch.cuda.current_stream().wait_stream(stream)
    if spoil is not None:
        spoil(result)
    graph.replay()
    torch.cuda.synchronize()
    return result


def _milliseconds(function: Function) -> float:
    """What the current stream takes for it, from end to end."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    elapsed: float = start.elapsed_time(end)
    return elapsed
