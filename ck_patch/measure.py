"""Timing on a GPU: graph replays of several functions, interleaved, and their medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

T = TypeVar("T")
Function = Callable[[], object]


def graph_times(
    functions: Mapping[str, Function], *, rounds: int = 7, span: float = 2e-3
) -> dict[str, float]:
    """Milliseconds per call of each function, on the current device.

    Each function is captured into a CUDA graph that repeats it for about `span` seconds, so that
    neither the host nor a launch gap counts. The graphs take turns, `rounds` times, so that clocks
    and temperature are the same for all; the median counts. The functions run on the same tensors
    every time: inputs below the size of the L2 are read from it.
    """
    graphs = {name: _capture(function, span) for name, function in functions.items()}
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (graph, calls) in graphs.items():
            start, end = _events()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}


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


def replayed(function: Callable[[], T]) -> T:
    """What `function` returns, holding what a replay of the CUDA graph it was captured in wrote."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function()  # As in _capture.
        with torch.cuda.graph(graph, stream=stream):
            result = function()
    graph.replay()
    torch.cuda.synchronize()
    return result


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _capture(function: Function, span: float) -> tuple[torch.cuda.CUDAGraph, int]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function()  # Compiles, loads modules and makes handles, all forbidden under capture.
        start, end = _events()
        start.record()
        function()
        end.record()
        end.synchronize()
        calls = max(1, min(50, int(span * 1e3 / max(start.elapsed_time(end), 1e-3))))
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                function()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, calls
