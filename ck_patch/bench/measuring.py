"""Measures every operation on every shape, and compares ours with stock bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import ck_patch
from ck_patch import device, guard, route, settings, tiles
from ck_patch.bench import cases, sides
from ck_patch.bench.cases import Call, Layer
from ck_patch.bench.rows import QUANTIZERS, Row, Timing
from ck_patch.breaker import describe
from ck_patch.kernels.launch import Operands
from ck_patch.measure import Function, replayed
from ck_patch.prerequisites import breakers
from ck_patch.shapes import Shape, named

# The GPU is done before the host has made the next call.
_HOST_SHAPE: Shape = (77, 3072, 3072)

Key = tuple[str, bool]
"""An operation or another contender, and whether its operands are not in the L2."""


@dataclass
class Found:
    """The rows, why a shape has none, and what was not as promised."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def measure(wanted: Sequence[Shape]) -> Found:
    """Measure these shapes on the current GPU, with comfy_kitchen patched, and leave it patched."""
    bench = _Bench()
    torch.manual_seed(0)
    with torch.no_grad():
        bench.add("host time", bench.host)
        for number, shape in enumerate(wanted, 1):
            begin = time.perf_counter()
            bench.add(named(shape), partial(bench.shape, shape))
            seconds = time.perf_counter() - begin
            print(f"{number} of {len(wanted)}: {named(shape)}, {seconds:.1f} s", flush=True)
    bench.found.problems += [
        f"{row.op} differs from stock at {row.shape}" for row in bench.found.rows if not row.equal
    ]
    return bench.found


class _Bench:
    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties()
        release = guard.examine_host().release
        assert release is not None  # Or nothing would be patched.
        self.found = Found()
        self._bias_dtype = torch.float32 if release.bias_dtype == "float32" else cases.BF16
        self._l2: int = properties.L2_cache_size
        self._sm_count: int = properties.multi_processor_count
        # A GPU of the class has this in its gemm rows, and an older one cannot run it.
        self._beyond_class = properties.major >= 9 and properties.major != 12
        self._quantized: set[tuple[int, int]] = set()

    def add(self, name: str, rows: Callable[[], list[Row]]) -> None:
        """Keep the rows, or the reason why there are none."""
        try:
            torch.cuda.empty_cache()
            ck_patch.enable()
            self.found.rows += rows()
        except torch.OutOfMemoryError:
            self.found.skipped[name] = "does not fit in this GPU's memory"
        except Exception as error:
            self.found.problems.append(f"{name} failed: {describe(error)}")
        finally:
            ck_patch.enable()

    def host(self) -> list[Row]:
        """The rows of host time."""
        layer = Layer.random(_HOST_SHAPE, self._bias_dtype)
        calls = dict(cases.HOST)
        equal = self._compare(layer, calls, {})
        switched = {name: cases.on(calls[name], [layer]) for name in equal}
        times = sides.on_host(switched, {"bf16": cases.on(cases.bf16, [layer])})
        m, n, k = _HOST_SHAPE
        rows = []
        for name, is_equal in equal.items():
            ms = {side: times[side, name] / 1e3 for side in ("stock", "ours")}
            if name != "gemm":
                ms["bf16"] = times["", "bf16"] / 1e3
            rows.append(Row("host_us", m, n, k, "eager", ms, is_equal, call=name))
        return rows

    def shape(self, shape: Shape) -> list[Row]:
        """The rows of one shape, by CUDA graph and eagerly."""
        m, _, k = shape
        first = Layer.random(shape, self._bias_dtype)
        calls = {op: call for op, call in cases.OURS.items() if cases.applies(op, first)}
        if (m, k) in self._quantized:
            calls = {op: call for op, call in calls.items() if op not in QUANTIZERS}
        of_class = self._of_class(first)
        equal = self._compare(first, calls, of_class)
        calls = {op: call for op, call in calls.items() if op in equal}
        of_class = {op: call for op, call in of_class.items() if op in equal}
        others = {name: call for name, call in cases.OTHERS.items() if _works(call, first)}
        if not any(op in equal for op in QUANTIZERS):
            others.pop("copy", None)
        counts = {name: cases.copies(name, shape, self._l2) for name in (*calls, *others)}
        layers = [first]
        while len(layers) < max(counts.values()):
            layers.append(Layer.random(shape, self._bias_dtype, beside=first))

        def warm(of: Mapping[str, Call]) -> dict[Key, Function]:
            return {(name, False): cases.on(call, [first]) for name, call in of.items()}

        def cold(of: Mapping[str, Call]) -> dict[Key, Function]:
            return {
                (name, True): cases.on(call, layers[: counts[name]])
                for name, call in of.items()
                if counts[name] > 1
            }

        graph = sides.by_graph(
            warm(calls) | cold(calls), warm(others) | cold(others) | warm(of_class)
        )
        about = {key: ms for (_, key), ms in graph.items()}
        eager = sides.eagerly(warm(calls), warm(others), about)
        self._quantized.add((m, k))
        path = _path(shape)
        return [
            *_rows(shape, "graph", graph, equal, path),
            *_rows(shape, "eager", eager, equal, path),
        ]

    def _compare(
        self, layer: Layer, calls: Mapping[str, Call], others: Mapping[str, Call]
    ) -> dict[str, bool]:
        """Whether ours writes what stock writes, by operation; what stock declines is left out.
        `others` are compared with stock's GEMM."""
        ck_patch.disable()
        expected: dict[str, Any] = {}
        for op, call in calls.items():
            try:
                expected[op] = call(layer)
            except cases.Declined:
                continue
            if expected[op] is layer.d:
                expected[op] = layer.d.clone()
        ck_patch.enable()
        equal = {}
        for op, result in expected.items():
            # The first call proves the kernel against stock; a replay runs it alone.
            replay = replayed(partial(calls[op], layer), cases.spoil)
            equal[op] = cases.same(replay, result)
        if text := breakers():
            self.found.problems.append(f"{named(layer.shape)}: ours went back to stock: {text}")
        for name, call in others.items():
            if "gemm" in expected:
                cases.spoil(layer.d)
                equal[name] = cases.same(call(layer), expected["gemm"])
        return equal

    def _of_class(self, layer: Layer) -> dict[str, Call]:
        """The GEMM of the `mma.sync` class, with the configuration of its policy."""
        _, n, k = layer.shape
        if not self._beyond_class or n % 8 or k % 16 or k > route.MAX_K:
            return {}
        from ck_patch.bench.class_sm80 import ClassGemm

        gemm = ClassGemm(tiles.mma_sync(*layer.shape, self._sm_count))

        def run(layer: Layer) -> torch.Tensor:
            given = layer.inputs
            gemm.run(Operands(given.a, given.b, given.x_scale, given.w_scale, given.bias, layer.d))
            return layer.d

        return {"class_sm80": run}


def _works(call: Call, layer: Layer) -> bool:
    """Whether the contender does this shape here."""
    try:
        call(layer)
        torch.cuda.synchronize()
    except Exception:  # Each torch and device says no in words of its own.
        return False
    return True


def _path(shape: Shape) -> str:
    index = torch.cuda.current_device()
    call = route.GemmCall(*shape, "bfloat16")
    return route.decide(call, device.profile(index), settings.load().int8).path


def _rows(
    shape: Shape,
    timing: Timing,
    times: sides.Times[Key],
    equal: Mapping[str, bool],
    path: str,
) -> Iterator[Row]:
    m, n, k = shape
    for op, is_equal in equal.items():
        quantizes, of_class = op in QUANTIZERS, op == "class_sm80"
        if of_class and timing == "eager":
            continue
        # Where each contender's time is.
        keys = {
            "stock": ("stock", "gemm" if of_class else op),
            "ours": ("", op) if of_class else ("ours", op),
        }
        beside = ("copy",) if quantizes else ("bf16", "int_mm", "fp8")
        keys |= {name: ("", name) for name in beside}
        ms, cold_ms = (
            {
                contender: times[side, (name, cold)]
                for contender, (side, name) in keys.items()
                if (side, (name, cold)) in times
            }
            for cold in (False, True)
        )
        yield Row(
            op,
            m,
            None if quantizes else n,
            k,
            timing,
            ms,
            is_equal,
            {} if of_class else cold_ms,
            None if quantizes or of_class else path,
        )
