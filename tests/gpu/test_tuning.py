"""Choosing by measurement on a GPU: what it costs meanwhile, and how good the choices are."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ck_patch import candidates, shapes, tiles, tune
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.device import profile
from ck_patch.environment import environment
from ck_patch.ops import cutlass_int8_dequant
from ck_patch.ops.timer import EventTimer
from ck_patch.releases import RELEASES
from ck_patch.route import GemmCall
from ck_patch.settings import Settings
from ck_patch.shapes import Shape
from ck_patch.table import Entry, Table
from ck_patch.tuner import Tuner
from tests.gpu.conftest import Record
from tests.gpu.slot import Call, random_call, stock

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
BLOCKS = 40
# The largest would need minutes of replays; they are in the passes all the same.
SWEPT = [shape for shape in shapes.unique() if shape[0] * shape[1] * shape[2] < 2**43]
SWEEP_SECONDS = 50.0
# Where one bucket of M ends and the next begins.
EDGES = [256, 512, 1024, 2048, 4096]


@dataclass
class Tuned:
    """An op around the real stock function, and what it learns."""

    op: Any
    tuner: Tuner
    table: Table
    breaker: Breaker

    def entry(self, shape: Shape) -> Entry:
        """What was kept for a shape that has a choice."""
        return self.table.entries()[candidates.key(gemm(shape))]

    def choice(self, shape: Shape) -> str | None:
        entry = self.table.get(candidates.key(gemm(shape)))
        return None if entry is None else entry.choice

    @property
    def undecided(self) -> int:
        return sum(trial.winner is None for trial in self.tuner._trials.values())


def gemm(shape: Shape) -> GemmCall:
    return GemmCall(*shape, "bfloat16")


def tuned(path: Path, mode: str = "auto") -> Tuned:
    table, breaker = Table(path, environment(profile(0))), Breaker()
    tuner = Tuner(mode, lambda gpu: table)
    context = OpContext(Settings(tune=mode), breaker, RELEASES[-1], False, tuner)
    return Tuned(cutlass_int8_dequant.build(stock(), context), tuner, table, breaker)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each call that was timed: the thread it came from."""
    calls: list[int] = []
    real = EventTimer.measure

    def measure(self: EventTimer, stream: Any, work: Any, report: Any) -> bool:
        calls.append(threading.get_ident())
        return real(self, stream, work, report)

    monkeypatch.setattr(EventTimer, "measure", measure)
    return calls


def operands(model: list[Shape]) -> list[tuple[Call, torch.Tensor]]:
    found = []
    for m, n, k in model:
        call = random_call(m, n, k, BF16)
        found.append((call, torch.empty(m, n, dtype=BF16, device="cuda")))
    return found


def seconds_of_a_pass(function: Any, model: list[tuple[Call, torch.Tensor]]) -> float:
    """Forty blocks of a model's linears, one after the other, as its first step runs them."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BLOCKS):
        for call, d in model:
            call.into(function, d)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def test_a_first_pass_is_no_slower_than_stock_and_ends_with_good_choices(
    record: Record, tmp_path: Path
) -> None:
    compiling = tuned(tmp_path / "compiling.json")
    learning = tuned(tmp_path / "learned.json")
    totals = dict.fromkeys(("stock", "compiling", "learning", "stock again", "learned"), 0.0)
    for name, model in shapes.load().items():
        calls = operands(model)
        for call, d in calls:
            call.into(stock(), d)  # Loads stock's modules.
        row: dict[str, float] = {}
        for pass_ in totals:
            if pass_ == "learned":
                for call, d in calls:
                    call.into(learning.op.function, d)  # Reads the last times.
                assert learning.table.save()
                function = tuned(tmp_path / "learned.json").op.function
            elif pass_.startswith("stock"):
                function = stock()
            else:
                function = (learning if pass_ == "learning" else compiling).op.function
            row[pass_] = seconds_of_a_pass(function, calls)
            totals[pass_] += row[pass_]
        record.add("passes", model=name, linears=len(model), **_milliseconds(row))
        del calls
        torch.cuda.empty_cache()
    record.add("passes", model="all", linears=0, **_milliseconds(totals))
    assert compiling.breaker.snapshot() == learning.breaker.snapshot() == ()
    assert totals["learning"] <= 1.03 * totals["stock"]
    assert totals["learned"] <= 1.01 * totals["stock again"]

    found = tune.sweep([gemm(shape) for shape in SWEPT], SWEEP_SECONDS)
    assert found.problems == []
    regrets: dict[str, float] = {}
    behind: dict[str, float] = {}
    for swept in found.rows:
        shape = (swept.call.m, swept.call.n, swept.call.k)
        chosen = learning.choice(shape)
        ran = chosen or swept.prior
        regret = swept.us[ran] / swept.us[swept.best] - 1
        regrets[swept.name], behind[swept.name] = regret, swept.us[ran] / swept.us["stock"] - 1
        record.add(
            "choices",
            m=shape[0],
            n=shape[1],
            k=shape[2],
            prior=swept.prior,
            chosen=chosen,
            measured=None if chosen is None else dict(learning.entry(shape).us),
            best=swept.best,
            regret=round(regret, 4),
            prior_regret=round(swept.us[swept.prior] / swept.us[swept.best] - 1, 4),
            times_stock=round(swept.us["stock"] / swept.us[ran], 4),
            us={name: round(us, 2) for name, us in swept.us.items() if name not in swept.slow},
        )
    worst = max(regrets, key=lambda name: regrets[name])
    record.add(
        "regret",
        shapes=len(regrets),
        decided=sum(learning.choice(shape) is not None for shape in SWEPT),
        mean=round(statistics.mean(regrets.values()), 4),
        worst=round(regrets[worst], 4),
        worst_at=worst,
    )
    assert max(behind.values()) <= 0.02, behind
    # The goals are 1% and 5%; graphs of one GEMM and calls among others differ by some percent.
    assert statistics.mean(regrets.values()) <= 0.02
    assert regrets[worst] <= 0.12, (worst, regrets[worst])


def _milliseconds(row: dict[str, float]) -> dict[str, float]:
    return {f"{name.replace(' ', '_')}_ms": round(time * 1e3, 2) for name, time in row.items()}


def test_no_edge_of_a_bucket_is_a_cliff(record: Record) -> None:
    calls = [
        gemm((m, n, k))
        for n, k in ((4096, 4096), (3072, 12288), (12288, 3072))
        for edge in EDGES
        for m in (edge, edge + 1)
    ]
    rows = {(row.call.m, row.call.n, row.call.k): row for row in tune.sweep(calls).rows}
    for (m, n, k), below in rows.items():
        above = rows.get((m + 1, n, k))
        if above is None:
            continue
        assert candidates.key(below.call) != candidates.key(above.call)
        ratio = above.us[above.choice] / below.us[below.choice]
        best = above.us[above.best] / below.us[below.best]
        of_stock = above.us["stock"] / below.us["stock"]
        shown = {"ratio": ratio, "ratio_of_best": best, "ratio_of_stock": of_stock}
        record.add("edges", m=m, n=n, k=k, **{name: round(x, 4) for name, x in shown.items()})
        # A row more can cost a wave of tiles, whatever is chosen.
        assert ratio <= max(1.1, 1.02 * best), (m, n, k)


def test_a_trial_asks_the_gpu_for_no_more_waiting_than_stock(tmp_path: Path) -> None:
    shape = (4608, 3072, 3072)
    call = random_call(*shape, BF16)
    d = torch.empty(*shape[:2], dtype=BF16, device="cuda")
    one = tuned(tmp_path / "table.json")
    busy = torch.empty(2**27, device="cuda")

    def waits(function: Any) -> list[str]:
        """Calls that wait for the GPU, in forty calls."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities, acc_events=True) as trace:
            for _ in range(BLOCKS):
                busy.zero_()
                call.into(function, d)
        return sorted(
            event.name
            for event in trace.events()
            if event.name.startswith(("cudaStreamSync", "cudaEventSync", "cudaMemcpy"))
        )

    trial = _trial_of(one, call, d)
    while not all(kernel.proven for kernel in one.op._gemm._planner._kernels.values()):
        call.into(one.op.function, d)  # Each first use is compared, which waits.
    assert trial.winner is None
    assert waits(one.op.function) == waits(stock())
    busy.zero_()
    call.into(one.op.function, d)
    assert trial.microseconds


def _trial_of(one: Tuned, call: Call, d: torch.Tensor) -> Any:
    call.into(one.op.function, d)
    (trial,) = one.tuner._trials.values()
    return trial


def results(one: Tuned, call: Call, count: int) -> list[torch.Tensor]:
    """What so many calls wrote, none of them waiting for the one before."""
    found = [torch.full((call.a.shape[0], call.b.shape[0]), torch.nan, dtype=BF16, device="cuda")]
    found += [found[0].clone() for _ in range(count - 1)]
    for d in found:
        assert call.into(one.op.function, d)
    return found


def test_a_planted_slow_candidate_never_wins_and_a_wrong_one_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.kernels.int8_gemm_tma import TmaGemm

    shape = (4608, 4096, 5120)
    slow, wrong = tiles.HOPPER, tiles.HOPPER_DEEP
    names = [one.config for one in candidates.candidates(gemm(shape), profile(0)).ordered]
    assert {slow, wrong} < set(names)
    call = random_call(*shape, BF16)
    _, expected = call.run(stock())
    real_run, real_bind = TmaGemm.run, TmaGemm.bind
    ran: list[Any] = []

    def run(self: Any, operands: Any) -> None:
        real_run(self, operands)
        ran.append(self.config)
        if self.config == wrong:
            operands.d[0, 0] += 1

    def bind(self: Any, operands: Any) -> Any:
        launch = real_bind(self, operands)

        def late(*args: Any) -> None:
            launch(*args)
            torch.cuda._sleep(1_000_000)

        return late if self.config == slow else launch

    monkeypatch.setattr(TmaGemm, "run", run)
    monkeypatch.setattr(TmaGemm, "bind", bind)
    one = tuned(tmp_path / "table.json")
    for _ in range(3):
        assert all(torch.equal(d, expected) for d in results(one, call, 40))
    assert one.choice(shape) not in (None, f"triton:{slow.name}", f"triton:{wrong.name}")
    assert ran.count(wrong) == 1
    (opened,) = one.breaker.snapshot()
    assert opened.operation == f"cutlass_int8_dequant by triton:{wrong.name}"
    assert opened.reason == "differs from stock"


def test_a_planted_crash_leaves_every_call_to_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.kernels.int8_gemm import PointerGemm

    def crash(self: Any, operands: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(PointerGemm, "run", crash)
    call = random_call(4608, 4096, 4608, BF16)
    _, expected = call.run(stock())
    one = tuned(tmp_path / "table.json")
    assert all(torch.equal(d, expected) for d in results(one, call, 40))
    assert [opened.reason for opened in one.breaker.snapshot()] == ["RuntimeError: planted"]


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("known", ["unseen", "half measured"])
def test_a_capture_records_a_right_result_and_times_nothing(
    tmp_path: Path, timed: list[int], known: str, mode: Any
) -> None:
    call = random_call(2304, 4096, 4096, BF16)
    _, expected = call.run(stock())
    d = torch.empty_like(expected)
    one = tuned(tmp_path / "table.json")
    if known == "half measured":
        for _ in range(12):
            call.into(one.op.function, d)
        assert one.undecided == 1
    count = len(timed)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side, capture_error_mode=mode):
        assert call.into(one.op.function, d)
    assert len(timed) == count
    d.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(d, expected)
    for _ in range(60):
        call.into(one.op.function, d)
    assert one.breaker.snapshot() == ()


def test_one_thread_measures_while_another_one_captures_in_global_mode(
    tmp_path: Path, timed: list[int]
) -> None:
    one = tuned(tmp_path / "table.json")
    measured = random_call(4608, 4096, 4096, BF16)
    _, expected = measured.run(stock())
    captured = random_call(1024, 4096, 4096, BF16)
    d, side_d = captured.run(stock())[1], torch.empty_like(expected)
    over = threading.Event()
    errors: list[BaseException] = []

    def measure() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not over.is_set():
                    measured.into(one.op.function, side_d)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    deadline = time.monotonic() + 20
    graphs = 0
    while graphs < 20 or (one.undecided != 0 and time.monotonic() < deadline):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.into(stock(), d)
            time.sleep(0.01)
        graph.replay()
        graphs += 1
    over.set()
    thread.join()
    assert errors == []
    assert set(timed) <= {thread.ident}
    assert one.choice((4608, 4096, 4096)) is not None
    assert torch.equal(side_d, expected)


RENDER = """
import json, sys, torch, comfy_kitchen
from ck_patch.ops.timer import EventTimer

timed = 0
measure = EventTimer.measure
def counted(self, *args):
    global timed
    timed += 1
    return measure(self, *args)
EventTimer.measure = counted

sizes = ((9216, 3072), (3072, 3072), (12288, 3072), (3072, 12288))
def random(*shape): return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
weights = [
    (torch.randint(-127, 128, s, dtype=torch.int8, device="cuda"),
     torch.rand(s[0], device="cuda") * 0.01, random(s[0])) for s in sizes
]
def block(inputs):
    return [comfy_kitchen.int8_linear(inputs[w.shape[1]], w, s, b, torch.bfloat16)
            for w, s, b in weights]
found = []
for tokens in (4096, 9216):
    inputs = {k: random(tokens, k) for k in (3072, 12288)}
    for _ in range(40):
        out = block(inputs)
    explored = timed
    graphs = []
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = block(inputs)
        graphs.append((graph, captured))
    assert timed == explored
    for graph, captured in graphs:
        for tensor in captured: tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, out))
    found.append(timed)
import ck_patch
assert ck_patch.status().breakers == ()
print(json.dumps(found))
"""


@pytest.fixture
def render(tmp_path: Path) -> Callable[[], list[int]]:
    """A process that renders twice; how many calls were timed up to the end of each."""

    def run() -> list[int]:
        env = {**os.environ, "CK_PATCH_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", RENDER], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[int] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def test_a_render_measures_in_its_first_passes_and_the_next_process_nothing(
    render: Callable[[], list[int]], record: Record
) -> None:
    first, second = render(), render()
    record.add("render", blocks=40, linears=4, resolutions=2, timed=first, timed_second=second)
    assert 0 < first[0] <= 4 * 7 * 7
    assert first[1] <= 2 * 4 * 7 * 7
    assert second == [0, 0]
