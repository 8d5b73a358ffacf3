"""Candidates that take turns: every call gets the right result while the fastest is being found.

On the CPU, with kernels that compute exactly, a clock that says what each of them takes, and a
capture that is said.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.candidates import key
from ck_patch.context import OpContext
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.kernels import registry
from ck_patch.kernels.launch import Operands
from ck_patch.ops import capture_mode, exploring, first_use, gemm, gemm_planner, references
from ck_patch.releases import RELEASES
from ck_patch.route import GemmCall
from ck_patch.settings import Settings
from ck_patch.table import Entry, Table
from ck_patch.tuner import Tuner
from tests import reference
from tests.ops.memory import operands_at
from tests.ops.slot import Call, RecordingStock, make_call

H200 = next(gpu for gpu in KNOWN if gpu.name == "H200")
RTX_4090 = next(gpu for gpu in KNOWN if gpu.capability == (8, 9))
"""Where stock's configurations are candidates too."""
M, N, K = 77, 64, 256
ENVIRONMENT: dict[str, str | int] = {"format": 1, "device": "H200", "capability": "sm_90"}
CALL = GemmCall(M, N, K, "float32")


@dataclass
class Gpu:
    """A device whose kernels take as long as they are said to, in microseconds."""

    times: dict[str, float] = field(default_factory=dict)
    profile: DeviceProfile = H200
    capturing: bool = False
    relaxed: bool = True
    ran: list[str] = field(default_factory=list)
    """By which candidate each call was computed; what was compared with stock is "first:" that."""
    timed: int = 0
    wrong: set[str] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    error: Exception = field(default_factory=lambda: RuntimeError("planted"))
    """What those that crash raise."""
    late: bool = False
    """Times come with the next call but thirty, as from a queue that is full."""

    def compute(self, name: str, call: Operands) -> None:
        if name in self.crashing:
            raise self.error
        call.d.copy_(reference.gemm(call.a, call.b, call.x_scale, call.w_scale, None, call.d.dtype))
        if name in self.wrong:
            call.d[0, 0] += 1


class FakeTimer:
    """Instead of CUDA events."""

    gpu: Gpu

    def __init__(self) -> None:
        self._over: list[tuple[int, Callable[[float | None], None], float]] = []
        self._calls = 0

    def measure(
        self, stream: object, work: Callable[[], bool], report: Callable[[float | None], None]
    ) -> bool:
        assert not self.gpu.capturing
        done = False
        try:
            done = work()
        finally:
            if not done:
                report(None)
        if done:
            self.gpu.timed += 1
            name = self.gpu.ran[-1]
            when = self._calls + (30 if self.gpu.late else 1)
            self._over.append((when, report, self.gpu.times.get(name, 100.0)))
        return done

    def collect(self) -> None:
        self._calls += 1
        over = [span for span in self._over if span[0] <= self._calls]
        self._over = [span for span in self._over if span[0] > self._calls]
        for _, report, time in over:
            report(time)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    state = Gpu()

    class FakeGemm:
        def __init__(self, config: Any, rounding: str) -> None:
            self._name = "triton:" + config.name

        @classmethod
        def variant(cls, config: Any, k: int) -> None:
            return None

        def run(self, call: Operands) -> None:
            state.ran.append("first:" + self._name)
            state.compute(self._name, call)

        def bind(self, call: Operands) -> Callable[..., None]:
            def launch(pointers: Sequence[int], stream: int) -> None:
                state.ran.append(self._name)
                state.compute(self._name, operands_at(pointers, call))

            return launch

    def config(number: int) -> Callable[[Operands, int], bool]:
        def run(call: Operands, stream: int) -> bool:
            state.ran.append(f"cfg{number}")
            state.compute(f"cfg{number}", call)
            return True

        return run

    families = dict.fromkeys(registry.GEMMS, lambda: FakeGemm)
    monkeypatch.setattr(registry, "GEMMS", families)
    monkeypatch.setattr(gemm_planner, "cutlass_config", config)
    monkeypatch.setattr(gemm_planner, "profile", lambda device, assumed: state.profile)
    monkeypatch.setattr(FakeTimer, "gpu", state, raising=False)
    monkeypatch.setattr(exploring, "EventTimer", FakeTimer)
    monkeypatch.setattr(capture_mode, "relaxed", lambda: contextlib.nullcontext(state.relaxed))
    # torch.cuda.stream(None) changes nothing.
    monkeypatch.setattr(exploring, "stream_of", lambda pointer, device: None)
    monkeypatch.setattr(first_use, "stream_of", lambda pointer, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return state


@dataclass
class Process:
    """One process: an engine, a tuner, and what they know of the table in one folder."""

    gpu: Gpu
    path: Path
    mode: str = "auto"
    force: str | None = None
    breaker: Breaker = field(default_factory=Breaker)

    def __post_init__(self) -> None:
        self.stock = RecordingStock()
        self.table = Table(self.path, ENVIRONMENT)
        self.tuner = Tuner(self.mode, lambda gpu: self.table)
        self.engine = self.op()

    def op(self, name: str = "op") -> gemm.Int8Gemm:
        settings = Settings(tune=self.mode, force=self.force)
        context = OpContext(settings, self.breaker, RELEASES[-1], False, self.tuner)
        plain = references.cutlass(self.stock, context)

        def stock(call: Operands, stream: int) -> bool:
            # A comparison is of some rows.
            self.gpu.ran.append("stock")
            return plain(call, stream)

        return gemm.Int8Gemm(name, "cuda", stock, context)

    def call(self, m: int = M, device: int = 0, engine: gemm.Int8Gemm | None = None) -> str:
        """Compute one call, check it to the bit, and say by what it was computed."""
        engine = engine or self.engine
        call = make_call(m, N, K)
        plan = engine.plan(device, m, N, K, torch.float32, None)
        done = plan is not None and engine.launch(plan, call.tensors, 0)
        if not done:
            call.d.copy_(call.expected())
            return "stock"
        assert call.is_exact()
        return [name for name in self.gpu.ran if name != "stock" or not _compares(self.gpu)][-1]


def _compares(gpu: Gpu) -> bool:
    return any(name.startswith("first:") for name in gpu.ran[-3:-1])


@pytest.fixture
def process(gpu: Gpu, tmp_path: Path) -> Callable[..., Process]:
    return lambda **options: Process(gpu, tmp_path / "tuned-sm_90-0.json", **options)


NAMES = ("triton:pointer-64x32x256-w4-s4-g8", "stock", "triton:pointer-64x64x256-w4-s3-g8")
OURS = NAMES[0]
NAMES_4090 = (
    "stock",
    "triton:pointer-64x64x128-w4-s4-g8",
    "triton:pointer-128x128x64-w4-s4-g16",
    "triton:pointer-64x128x128-w4-s3-g8",
    "cfg7",
    "cfg8",
)


@pytest.mark.parametrize(
    ("profile", "names", "fastest"),
    [
        *((H200, NAMES, name) for name in NAMES),
        *((RTX_4090, NAMES_4090, name) for name in NAMES_4090),
    ],
    ids=lambda value: getattr(value, "name", value if isinstance(value, str) else ""),
)
def test_each_call_gets_its_result_and_the_fastest_is_found_in_one_pass(
    process: Callable[..., Process],
    gpu: Gpu,
    profile: DeviceProfile,
    names: tuple[str, ...],
    fastest: str,
) -> None:
    gpu.profile = profile
    one = process()
    gpu.times[fastest] = 80.0
    for _ in range(50):
        one.call()
    assert gpu.timed <= 40
    gpu.ran.clear()
    timed = gpu.timed
    assert {one.call() for _ in range(10)} == {fastest}
    assert gpu.timed == timed
    entry = one.table.get(key(CALL))
    assert entry is not None
    assert (entry.choice, entry.m, entry.source) == (fastest, M, "run")
    assert set(entry.us) == set(names)


def test_the_next_process_starts_with_what_was_learned(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    first = process()
    gpu.times[NAMES[2]] = 80.0
    for _ in range(50):
        first.call()
    assert first.table.save()
    gpu.timed = 0
    second = process()
    gpu.ran.clear()
    assert second.call() == "first:" + NAMES[2]
    assert [second.call() for _ in range(20)] == [NAMES[2]] * 20
    assert gpu.timed == 0


@pytest.mark.parametrize("mode", ["off", "frozen"])
def test_nothing_is_timed_or_kept_where_that_is_not_wanted(
    process: Callable[..., Process], gpu: Gpu, mode: str
) -> None:
    one = process(mode=mode)
    gpu.times[NAMES[2]] = 10.0
    for _ in range(20):
        one.call()
    assert gpu.timed == 0
    assert one.table.entries() == {}
    assert set(gpu.ran) == {"first:" + OURS, "stock", OURS}


def test_frozen_uses_what_was_measured_before_and_off_does_not(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    gpu.profile = RTX_4090
    gpu.times["cfg7"] = 10.0
    first = process()
    for _ in range(60):
        first.call()
    first.table.save()
    assert process(mode="frozen").call() == "cfg7"
    assert process(mode="off").call() == "stock"


def test_a_slow_candidate_never_wins(process: Callable[..., Process], gpu: Gpu) -> None:
    gpu.times |= {OURS: 1000.0, NAMES[2]: 90.0}
    one = process()
    for _ in range(60):
        one.call()
    assert one.call() == NAMES[2]
    assert gpu.ran.count(OURS) <= 2


def test_a_wrong_candidate_is_caught_at_its_first_use_and_the_caller_gets_the_right_result(
    process: Callable[..., Process], gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.wrong.add(NAMES[2])
    gpu.times[NAMES[2]] = 1.0
    one = process()
    with caplog.at_level(logging.INFO, "ck_patch"):
        for _ in range(60):
            one.call()  # Checks every result.
        for _ in range(60):
            one.call(m=200)
    assert gpu.ran.count("first:" + NAMES[2]) == 1
    assert NAMES[2] not in gpu.ran
    (opened,) = one.breaker.snapshot()
    assert opened.operation == f"op by {NAMES[2]}"
    assert "differs from stock" in opened.reason
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"op by {NAMES[2]} is not used on device 0 (differs from stock)" in line
    assert one.call() in NAMES


@pytest.mark.parametrize("mode", ["auto", "frozen"])
def test_a_choice_of_the_table_that_turns_out_wrong_is_never_used_again(
    process: Callable[..., Process], gpu: Gpu, mode: str
) -> None:
    one = process(mode=mode)
    one.table.put(key(CALL), Entry(NAMES[2], M, {NAMES[2]: 1.0}, "run"))
    gpu.wrong.add(NAMES[2])
    assert one.call() == "stock"
    # Not when it is right by chance, either.
    gpu.wrong.clear()
    gpu.ran.clear()
    for _ in range(60):
        one.call()
    assert not {NAMES[2], "first:" + NAMES[2]} & set(gpu.ran)
    assert one.call() in NAMES


def test_a_winner_that_another_op_finds_wrong_is_not_used_there(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    gpu.times[NAMES[2]] = 10.0
    for _ in range(60):
        one.call()
    assert one.call() == NAMES[2]
    other = one.op("other")
    gpu.wrong.add(NAMES[2])
    assert one.call(engine=other) == "stock"
    gpu.wrong.clear()
    gpu.ran.clear()
    assert one.call(engine=other) == "first:" + OURS
    assert one.call(engine=other) == OURS


def test_a_trial_of_another_op_that_does_without_our_first_candidate_is_joined(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    gpu.wrong.add(OURS)
    one.call(m=70)
    gpu.wrong.clear()
    one.call(m=200)
    other = one.op("other")
    gpu.times[NAMES[2]] = 10.0
    for _ in range(60):
        one.call(m=200, engine=other)
    assert one.call(m=200, engine=other) != "stock"
    (opened,) = one.breaker.snapshot()
    assert opened.operation == f"op by {OURS}"


def test_a_configuration_by_number_needs_a_release_that_runs_it(
    process: Callable[..., Process], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.profile = RTX_4090
    one = process(mode="frozen")
    one.table.put(key(CALL), Entry("cfg7", M, {"cfg7": 1.0}, "run"))
    monkeypatch.setattr(gemm_planner, "cutlass_config", lambda number: None)
    assert one.call() == "stock"
    assert one.breaker.snapshot() == ()


def test_a_sample_of_an_op_that_makes_no_further_call_does_not_hold_up_the_choice(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    for calls in range(9, 14):
        one = process()
        gpu.times[NAMES[2]] = 90.0
        other = one.op()
        for _ in range(calls):
            one.call(m=M)
        for _ in range(1200):
            one.call(engine=other)
        plan = other.plan(0, M, N, K, torch.float32, None)
        assert plan is not None
        assert plan.trial is None
        assert plan.kernel.candidate.name == NAMES[2]


@pytest.mark.parametrize("when", ["compile", "later"])
def test_a_crashing_candidate_leaves_the_op_on_stock(
    process: Callable[..., Process], gpu: Gpu, when: str
) -> None:
    one = process()
    if when == "later":
        for _ in range(10):
            one.call()
    gpu.crashing.add(NAMES[2])
    for _ in range(60):
        one.call()
    assert one.call() == "stock"
    (opened,) = one.breaker.snapshot()
    assert (opened.operation, opened.reason) == ("op", "RuntimeError: planted")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), RecursionError("planted")])
@pytest.mark.parametrize("when", ["compile", "later"])
def test_a_failure_that_passes_takes_no_candidate_out(
    process: Callable[..., Process], gpu: Gpu, when: str, error: Exception
) -> None:
    one = process()
    gpu.times[NAMES[2]] = 90.0  # Too close to the others to be chosen before it fails.
    if when == "later":
        while gpu.ran.count(NAMES[2]) < 2:
            one.call()
    gpu.crashing.add(NAMES[2])
    gpu.error = error
    assert [one.call() for _ in range(20)].count("stock") > 3
    gpu.crashing.clear()
    for _ in range(60):
        one.call()
    assert one.call() == NAMES[2]
    assert one.breaker.snapshot() == ()


def test_a_candidate_that_never_fits_leaves_most_calls_to_the_others(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    gpu.crashing.add(NAMES[2])
    gpu.error = torch.OutOfMemoryError("planted")
    one = process()
    results = [one.call() for _ in range(300)]
    assert set(results[-100:]) <= {"stock", OURS}
    assert results[-100:].count(OURS) >= 98


def test_a_crash_on_one_device_leaves_the_other_alone(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    gpu.times[NAMES[2]] = 10.0
    gpu.crashing.add(OURS)
    one.call(device=1)
    gpu.crashing.clear()
    for _ in range(60):
        one.call(device=0)
    assert one.call(device=0) == NAMES[2]
    assert one.call(device=1) == "stock"


def test_two_devices_are_measured_apart_and_share_a_table(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    gpu.times[NAMES[2]] = 80.0
    one = process()
    for _ in range(60):
        one.call(device=0)
    # Its trial is over before it begins: the table knows. Its first use is its own.
    gpu.ran.clear()
    assert one.call(device=1) == "first:" + NAMES[2]
    assert one.call(device=1) == NAMES[2]


def test_an_unseen_shape_is_stocks_under_capture(process: Callable[..., Process], gpu: Gpu) -> None:
    one = process()
    gpu.capturing = True
    assert one.call() == "stock"
    assert gpu.timed == 0
    assert not any(name.startswith(("first:", "triton:")) for name in gpu.ran)


def test_a_shape_that_is_half_measured_gets_the_best_known_under_capture(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    gpu.times[NAMES[2]] = 50.0
    while gpu.ran.count(NAMES[2]) < 2:
        one.call()
    one.call()
    timed = gpu.timed
    gpu.capturing = True
    gpu.ran.clear()
    assert {one.call() for _ in range(5)} == {NAMES[2]}
    assert gpu.timed == timed
    gpu.capturing = False
    for _ in range(40):
        one.call()
    assert one.call() == NAMES[2]


def test_what_came_in_late_decides_under_capture(process: Callable[..., Process], gpu: Gpu) -> None:
    # One pass whose times are known only when it is over.
    gpu.late = True
    gpu.times[NAMES[2]] = 50.0
    one = process()
    for _ in range(45):
        one.call()
    timed = gpu.timed
    gpu.capturing = True
    for _ in range(40):
        one.call()
    assert one.call() == NAMES[2]
    assert gpu.timed == timed


def test_nothing_is_timed_where_that_could_spoil_the_capture_of_another_thread(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    gpu.relaxed = False
    gpu.times[NAMES[2]] = 10.0
    one = process()
    for _ in range(20):
        one.call()
    assert gpu.timed == 0
    assert one.call() == OURS


def test_times_that_come_late_ask_for_no_more_than_is_needed(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    gpu.late = True
    gpu.times[NAMES[2]] = 50.0
    one = process()
    for _ in range(150):
        one.call()
    assert gpu.timed <= 7 * len(NAMES)
    assert one.call() == NAMES[2]


def test_a_render_is_measured_in_its_first_pass_and_never_again(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    # Forty blocks of four linears, two resolutions, with captures after one pass through each.
    one = process()
    gpu.times[NAMES[2]] = 80.0
    explored = []
    for m in (300, 500):
        for _ in range(40):
            for columns in range(4):
                one.call(m=m + 64 * columns)
        explored.append(gpu.timed)
        gpu.capturing = True
        for _ in range(40):
            one.call(m=m)
        gpu.capturing = False
    for _ in range(40):
        one.call(m=300)
    assert gpu.timed == explored[-1]
    assert explored[-1] <= 2 * 4 * 7 * len(NAMES)
    one.table.save()
    gpu.timed = 0
    second = process()
    for m in (300, 500):
        for columns in range(4):
            for _ in range(10):
                second.call(m=m + 64 * columns)
    assert gpu.timed == 0


def test_another_op_of_the_same_gemm_shares_the_trial(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    other = one.op()
    gpu.times[NAMES[2]] = 80.0
    for _ in range(30):
        one.call()
        one.call(engine=other)
    assert gpu.timed <= 7 * len(NAMES)
    assert one.call() == one.call(engine=other) == NAMES[2]


def test_many_threads_get_right_results_and_one_choice(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    gpu.times[NAMES[2]] = 50.0
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(40):
                call = make_call(M, N, K)
                plan = one.engine.plan(0, M, N, K, torch.float32, None)
                if plan is not None and one.engine.launch(plan, call.tensors, 0):
                    assert call.is_exact()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert one.breaker.snapshot() == ()


@pytest.mark.parametrize("force", ["stock", "cfg3", *NAMES[::2]])
def test_a_forced_candidate_runs_every_call(
    process: Callable[..., Process], gpu: Gpu, force: str
) -> None:
    one = process(force=force)
    one.call()
    assert {one.call() for _ in range(10)} == {force}
    assert gpu.timed == 0
    assert one.table.entries() == {}


def test_a_forced_candidate_that_cannot_run_says_so_and_the_call_is_stocks(
    process: Callable[..., Process], gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    one = process(force="cfg3")
    with caplog.at_level(logging.INFO, "ck_patch"):
        assert one.engine.plan(0, M, N, K, torch.float32, torch.float32) is None
        assert one.engine.plan(0, M, N, K, torch.float32, torch.float32) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "CK_PATCH_FORCE=cfg3 cannot run 77x64x256 with float32 output, a bias" in line


def test_a_choice_that_this_version_does_not_have_is_measured_anew(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    from ck_patch.table import Entry

    one = process()
    one.table.put(key(CALL), Entry("triton:gone", M, {"triton:gone": 1.0}, "run"))
    one.call()
    one.call()
    assert gpu.timed > 0 or "first:" + OURS in gpu.ran


def test_candidates_that_stock_has_no_entry_for_are_not_offered(
    process: Callable[..., Process], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_planner, "cutlass_config", lambda number: None)
    gpu.profile = RTX_4090
    one = process()
    for _ in range(60):
        one.call()
    assert {name.removeprefix("first:") for name in gpu.ran} == {*NAMES_4090[:-2]}


@pytest.fixture(autouse=True)
def no_stray_threads() -> Iterator[None]:
    """A table's timer of one test must not write in another one's folder."""
    yield
    for thread in threading.enumerate():
        if thread.name == "ck_patch table":
            thread.cancel()  # type: ignore[attr-defined]


def test_a_call_that_is_not_aligned_is_stocks_while_measuring(
    process: Callable[..., Process], gpu: Gpu
) -> None:
    one = process()
    call: Call = make_call(M, N, K)
    d = torch.empty(M * N + 1)[1:].view(M, N)
    plan = one.engine.plan(0, M, N, K, torch.float32, None)
    assert plan is not None
    assert one.engine.launch(plan, (*call.tensors[:5], d), 0) is False
    assert gpu.ran == []
