"""`tune` without a GPU: what it accepts, how a sweep goes on made-up times, and what it keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ck_patch import candidates, cli, notices, prerequisites, shapes, table, tune
from ck_patch.candidates import Candidate
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.environment import environment, table_name
from ck_patch.route import GemmCall
from ck_patch.table import Entry
from ck_patch.trial import MARGIN
from ck_patch.tune import calls, plot, progress, show
from ck_patch.tune.rows import Row, means
from ck_patch.tune.sweeping import Declined, Found, Sweep, Wrong, choice
from tests.commands import running

H200 = next(gpu for gpu in KNOWN if gpu.name == "H200")
V100 = next(gpu for gpu in KNOWN if gpu.name == "Tesla V100")

SMALL = GemmCall(77, 3072, 3072, "bfloat16")
LARGE = GemmCall(37296, 21504, 5376, "bfloat16")
WITH_BIAS = GemmCall(4096, 3072, 3072, "bfloat16", "float32")

Times = Mapping[str, float]


def prior(call: GemmCall) -> str:
    return candidates.candidates(call, H200).ordered[0].name


def everything(call: GemmCall) -> list[str]:
    return [candidate.name for candidate in candidates.every(call, H200)]


class FakeContest:
    """Times by name, `usual` for the rest; `troubles` are raised by those candidates."""

    def __init__(
        self, times: Times, usual: float = 100.0, troubles: Mapping[str, Exception] | None = None
    ) -> None:
        self._times = times
        self._usual = usual
        self._troubles = troubles or {}
        self.attempted: list[str] = []
        self.timed: list[tuple[set[str], int]] = []

    def attempt(self, candidate: Candidate) -> float:
        self.attempted.append(candidate.name)
        if candidate.name in self._troubles:
            raise self._troubles[candidate.name]
        return 30.0 + self._time(candidate.name)

    def times(self, names: Collection[str], rounds: int) -> dict[str, float]:
        assert set(names) <= set(self.attempted)
        self.timed.append((set(names), rounds))
        return {name: self._time(name) for name in names}

    def _time(self, name: str) -> float:
        return self._times.get(name, self._usual)


def swept(
    contests: Callable[[GemmCall], FakeContest],
    wanted: Iterable[GemmCall] = (SMALL,),
    budget: float | None = None,
    known: Mapping[str, Entry] | None = None,
    gpu: DeviceProfile = H200,
    **given: Any,
) -> Found:
    return Sweep(gpu, contests, known or {}, **given).run(
        list(wanted), budget, lambda call, row: None
    )


def one(contest: FakeContest, call: GemmCall = SMALL, **given: Any) -> Row:
    found = swept(lambda _: contest, [call], **given)
    (row,) = found.rows
    return row


class TestSweep:
    def test_every_candidate_is_tried_and_the_fastest_is_the_choice(self) -> None:
        fastest = everything(SMALL)[-1]
        contest = FakeContest({fastest: 80.0})
        row = one(contest)
        assert contest.attempted == everything(SMALL)
        assert (row.choice, row.best, row.prior, row.old) == (
            fastest,
            fastest,
            prior(SMALL),
            prior(SMALL),
        )
        assert set(row.us) == set(everything(SMALL))
        assert row.speed_up(row.choice) == pytest.approx(100 / 80)
        assert row.regret(row.old) == pytest.approx(100 / 80 - 1)

    def test_what_is_slow_in_a_quick_look_is_not_timed_to_the_end(self) -> None:
        names = everything(SMALL)
        contest = FakeContest({names[3]: 151.0, names[4]: 149.0}, usual=100.0)
        row = one(contest)
        (quick, few), (final, many) = contest.timed
        assert few < many
        assert quick == set(names)
        assert quick - final == {names[3]} == set(row.slow)
        assert row.us[names[3]] == 151.0

    def test_a_slow_call_is_not_even_replayed(self) -> None:
        names = everything(LARGE)
        tiny = [name for name in names if "pointer-16x" in name]
        assert tiny
        contest = FakeContest(dict.fromkeys(tiny, 90_000.0), usual=9_000.0)
        row = one(contest, LARGE)
        assert contest.timed[0][0] == set(names) - set(tiny)
        assert set(tiny) == set(row.slow)
        assert row.regret(tiny[0]) == pytest.approx(9.0, rel=0.01)

    def test_stock_the_prior_and_the_old_choice_are_timed_to_the_end_however_slow(self) -> None:
        old = everything(LARGE)[-1]
        kept = {"stock", prior(LARGE), old}
        contest = FakeContest(dict.fromkeys(kept, 90_000.0), usual=9_000.0)
        known = {candidates.key(LARGE): Entry(old, 37296, {old: 1.0}, "run")}
        row = one(contest, LARGE, known=known)
        assert all(kept <= names for names, _ in contest.timed)
        assert (row.old, row.old_from, row.slow) == (old, "run", ())

    def test_an_old_choice_that_is_no_candidate_any_more_is_the_prior_s(self) -> None:
        for gone in ("triton:no-such", "cfg99", "cfg3"):
            known = {candidates.key(WITH_BIAS): Entry(gone, 4096, {}, "sweep")}
            row = one(FakeContest({}), WITH_BIAS, known=known)
            assert (row.old, row.old_from) == (prior(WITH_BIAS), "prior")

    def test_a_wrong_one_and_a_crashing_one_are_reported_once_and_never_chosen(self) -> None:
        wrong, crashing = everything(SMALL)[-2:]
        troubles = {wrong: Wrong("differs from stock"), crashing: ValueError("no such PTX")}
        times = {wrong: 1.0, crashing: 1.0}
        found = swept(lambda _: FakeContest(times, troubles=troubles), [SMALL, WITH_BIAS, SMALL])
        for row in found.rows:
            assert row.choice == "stock"
            assert not {wrong, crashing} & set(row.us)
            assert row.failed == {
                wrong: "differs from stock",
                crashing: "ValueError: no such PTX",
            }
        first = calls.named(SMALL)
        assert found.problems == [
            f"{wrong} differs from stock at {first} and 2 more",
            f"{crashing} ValueError: no such PTX at {first} and 2 more",
        ]

    def test_what_stock_declines_in_one_configuration_is_no_failure(self) -> None:
        row = one(FakeContest({"cfg3": 1.0}, troubles={"cfg3": Declined("no")}))
        assert "cfg3" not in row.us
        assert row.failed == {}

    def test_a_release_without_numbered_configurations_has_none_tried(self) -> None:
        contest = FakeContest({})
        one(contest, stock_configs=0)
        assert not any(name.startswith("cfg") for name in contest.attempted)
        assert "stock" in contest.attempted

    def test_a_call_that_does_not_fit_or_is_not_for_us_is_skipped_by_name(self) -> None:
        def contest(call: GemmCall) -> FakeContest:
            if call == LARGE:
                raise MemoryError
            if call == WITH_BIAS:
                raise Declined("stock leaves it to cuBLAS")
            return FakeContest({})

        odd = GemmCall(77, 3071, 3072, "bfloat16")
        found = swept(contest, [LARGE, SMALL, odd, WITH_BIAS])
        assert [row.call for row in found.rows] == [SMALL]
        assert found.skipped[calls.named(LARGE)] == "does not fit in this GPU's memory"
        assert found.skipped[calls.named(WITH_BIAS)] == "stock leaves it to cuBLAS"
        assert "not a multiple of 8" in found.skipped[calls.named(odd)]
        assert found.problems == found.left == []
        assert "no int8 tensor-core" in next(
            iter(swept(contest, [SMALL], gpu=_at(H200, (7, 5))).skipped.values())
        )

    def test_a_call_where_nothing_works_is_a_problem_and_the_next_one_is_measured(self) -> None:
        def contest(call: GemmCall) -> FakeContest:
            troubles = {name: OSError("no") for name in everything(call)} if call == SMALL else {}
            return FakeContest({}, troubles=troubles)

        found = swept(contest, [SMALL, LARGE])
        assert [row.call for row in found.rows] == [LARGE]
        (problem,) = found.problems
        assert problem.startswith(f"{calls.named(SMALL)} failed: ")

    def test_after_a_sticky_error_nothing_more_is_tried(self) -> None:
        dead = RuntimeError("CUDA error: an illegal memory access was encountered")
        without_bias = GemmCall(4096, 3072, 3072, "bfloat16")
        found = swept(
            lambda call: FakeContest({}, troubles={"cfg1": dead} if call == without_bias else {}),
            [LARGE, SMALL, without_bias],
        )
        assert [row.call for row in found.rows] == [SMALL]
        assert found.left == [calls.named(LARGE)]
        assert "illegal memory access" in found.problems[0]

    def test_the_cheapest_come_first_and_what_the_budget_leaves_out_is_said(self) -> None:
        now = 1000.0

        class Slow(FakeContest):
            def attempt(self, candidate: Candidate) -> float:
                nonlocal now
                now += 1.0
                return super().attempt(candidate)

        def seconds(call: GemmCall) -> int:
            return len(everything(call))

        budget = seconds(SMALL) + seconds(WITH_BIAS) // 2
        found = swept(
            lambda _: Slow({}), [LARGE, WITH_BIAS, SMALL], budget=budget, clock=lambda: now
        )
        assert [row.call for row in found.rows] == [SMALL]
        assert found.left == [calls.named(WITH_BIAS), calls.named(LARGE)]
        assert now == 1000.0 + budget
        assert found.problems == []

    def test_a_budget_that_is_enough_leaves_nothing_out(self) -> None:
        found = swept(lambda _: FakeContest({}), [SMALL, LARGE], budget=3600.0)
        assert [row.call for row in found.rows] == [SMALL, LARGE]
        assert found.left == []


def _at(gpu: DeviceProfile, capability: tuple[int, int]) -> DeviceProfile:
    return dataclasses.replace(gpu, capability=capability)


@given(
    st.dictionaries(
        st.sampled_from(["stock", "cfg0", "cfg1", "a", "b"]), st.floats(1.0, 1e6), min_size=1
    )
)
def test_the_choice_is_the_fastest_unless_stock_is_within_the_margin(us: dict[str, float]) -> None:
    fastest = min(us.values())
    chosen = choice(us)
    if "stock" in us and fastest >= (1 - MARGIN) * us["stock"]:
        assert chosen == "stock"
    else:
        assert us[chosen] == fastest


class TestCalls:
    @pytest.mark.parametrize(
        "call",
        [
            SMALL,
            LARGE,
            WITH_BIAS,
            GemmCall(1, 8, 16, "float16", "float16", residual=True),
            GemmCall(5000, 4096, 4096, "float32", "bfloat16", backend="eager"),
            GemmCall(5000, 4096, 4096, "float32", backend="triton"),
        ],
    )
    def test_what_a_table_has_met_is_called_again_as_it_was(self, call: GemmCall) -> None:
        entry = Entry("stock", call.m, {}, "run")
        assert calls.recorded({candidates.key(call): entry}) == [call]

    @pytest.mark.parametrize(
        "key",
        [
            "",
            "cuda",
            "cuda 80x3072x3072 bfloat16 no bias and more",
            "cuda 80x3072x3072 int8 no bias",
            # Of other buckets than M = 77 has here.
            "cuda 96x3072x3072 bfloat16 no bias",
            "hip 128x3072x3072 bfloat16 no bias",
            # Python converts no number of so many digits.
            f"cuda 80x{'9' * 5000}x3072 bfloat16 no bias",
        ],
    )
    def test_a_key_of_another_version_is_no_call(self, key: str) -> None:
        assert calls.recorded({key: Entry("stock", 77, {}, "run")}) == []

    def test_the_name_says_what_is_not_the_usual(self) -> None:
        assert calls.named(SMALL) == "77x3072x3072"
        assert calls.named(WITH_BIAS) == "4096x3072x3072 float32 bias"
        call = GemmCall(1, 8, 16, "float16", residual=True, backend="eager")
        assert calls.named(call) == "1x8x16 float16 residual (eager backend)"


ROWS = [
    Row(SMALL, {"stock": 30.0, "cfg1": 20.0, "cfg2": 25.0}, "stock", "cfg2", "run", "cfg1"),
    Row(
        LARGE,
        {"stock": 40.0, "triton:a": 20.0},
        "triton:a",
        "triton:a",
        "prior",
        "triton:a",
        ("cfg7",),
        {"cfg9": "differs from stock"},
    ),
    Row(
        GemmCall(5, 8, 16, "float16", backend="eager"),
        {"triton:a": 8.0, "triton:b": 10.0},
        "triton:b",
        "triton:b",
        "prior",
        "triton:a",
    ),
]


def test_the_means_are_geometric_and_name_the_worst_call() -> None:
    found = {mean.what: mean for mean in means(ROWS)}
    new = found["speed-up over stock, new choice"]
    assert new.rows == 2
    assert new.geometric_mean == pytest.approx(3**0.5)
    assert (new.worst, new.worst_at) == (1.5, calls.named(SMALL))
    old = found["time over the best's, old choice"]
    assert old.rows == 3
    assert old.geometric_mean == pytest.approx((1.25 * 1.25) ** (1 / 3))
    assert found["time over the best's, prior"].worst == 1.5
    assert found["time over the best's, new choice"].worst == 1.0
    assert means([]) == []


def test_the_table_shows_old_and_new_beside_one_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show.show(ROWS)
    printed = capsys.readouterr().out.splitlines()
    (line,) = (line for line in printed if line.startswith("77x3072x3072"))
    assert line.split()[1:] == ["cfg2", "run", "25.0", "cfg1", "20.0", "30.0", "1.50", "25.0%"]
    (line,) = (line for line in printed if line.startswith("5x8x16 float16 (eager backend)"))
    assert line.split()[-3:] == ["-", "-", "25.0%"]
    show.show([])
    assert capsys.readouterr().out == ""


def test_the_document_has_all_times_of_every_row() -> None:
    found = Found(ROWS, {"1x2x3": "does not fit"}, ["9x8x16"])
    written = json.loads(json.dumps(tune.document({"gpu": "some"}, found), allow_nan=False))
    assert written["stamp"] == {"gpu": "some"}
    assert (written["skipped"], written["left"]) == (found.skipped, found.left)
    first, second, third = written["rows"]
    assert (first["m"], first["n"], first["k"], first["backend"]) == (77, 3072, 3072, "cuda")
    assert list(first["us"]) == ["cfg1", "cfg2", "stock"]
    assert (first["speed_up_choice"], first["regret_old"]) == (1.5, 0.25)
    assert (second["slow"], second["failed"]) == (["cfg7"], {"cfg9": "differs from stock"})
    assert third["speed_up_choice"] is None
    assert len(written["means"]) == 6


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_the_rows_become_a_picture(tmp_path: Path, suffix: str, magic: bytes) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ck_patch.tune import plot\n"
        "from tests.commands.test_tune import ROWS\n"
        "for name, rows in {'all': ROWS, 'none': []}.items():\n"
        "    Path(sys.argv[2], name).write_bytes(plot.draw(rows, 'some GPU', sys.argv[1]))"
    )
    # Its own warnings are nobody's failure.
    done = running.python("-c", script, suffix, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name).read_bytes().startswith(magic) for name in ("all", "none"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["surplus"],
        ["--shapes", "no_such_set"],
        ["--shapes", "flux_2", "--recorded"],
        ["--export"],
        ["--export", "no-such-folder/table.json"],
        ["--export", "a.json", "--import", "b.json"],
        ["--export", "a.json", "--budget", "3"],
        ["--import", "a.json", "--json", "b.json"],
        ["--import", "a.json", "--plot", "b.png"],
        ["--import", "a.json", "--bias"],
        ["--recorded", "--bias"],
        ["--recorded", "--shapes", "1x8x16"],
        *(["--budget", text] for text in ("0", "-1", "nan", "inf", "soon", "")),
    ],
)
def test_a_usage_error_ends_with_2_and_prints_nothing_on_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["tune", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: ck-patch" in printed.err


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["--budget", "60"], ["--recorded"], ["--export", "{}"]])
def test_without_a_gpu_it_says_so_and_leaves_no_file(tmp_path: Path, arguments: list[str]) -> None:
    pytest.importorskip("torch")
    file = str(tmp_path / "file.json")
    filled = [argument.format(file) for argument in arguments]
    if "--export" not in arguments:
        filled += ["--json", file]
    done = running.ck_patch("tune", *filled, CK_PATCH_CACHE_DIR=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "ck_patch tune cannot run: torch finds no NVIDIA GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_plot_without_matplotlib_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    for name in ("matplotlib", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('gone')", encoding="utf-8")
    done = running.ck_patch("tune", "--plot", str(tmp_path / "tune.png"), first=[tmp_path])
    assert (done.returncode, done.stdout) == (1, "")
    assert "--plot needs matplotlib (ImportError: gone)" in done.stderr


def test_neither_the_help_nor_the_logic_of_a_sweep_needs_torch() -> None:
    script = (
        "import sys\n"
        "from ck_patch import cli\n"
        "try: cli.main(['tune', '--help'])\n"
        "except SystemExit: pass\n"
        "import ck_patch.tune.sweeping, ck_patch.tune.show\n"
        "print(sorted({'torch', 'triton', 'matplotlib', 'comfy_kitchen'} & set(sys.modules)))"
    )
    assert running.python("-c", script).stdout.endswith("\n[]\n")


def test_each_step_is_a_line_where_nobody_would_see_a_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.shown("tuning", 2) as advance:
        advance("77x3072x3072, stock, 0.1 s")
    assert capsys.readouterr().out == "1 of 2: 77x3072x3072, stock, 0.1 s\n"


class Machine:
    """A machine with a GPU that does not exist, and a cache folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self.swept: list[GemmCall] = []
        self.use(H200)

    def use(self, gpu: DeviceProfile) -> None:
        """Change the GPU, and start a new process."""
        self.gpu = gpu
        self._monkeypatch.setattr(tune, "_gpu", lambda: gpu)

    def move(self, folder: Path) -> None:
        """Go to another machine."""
        self.folder = folder
        self._monkeypatch.setenv("CK_PATCH_CACHE_DIR", str(folder))

    @property
    def path(self) -> Path:
        return self.folder / table_name(environment(self.gpu))

    def entries(self) -> dict[str, Entry]:
        return table.for_device(self.gpu, str(self.folder)).entries()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in ("CK_PATCH_FORCE", "CK_PATCH_TUNE", "CK_PATCH_INT8"):
        monkeypatch.delenv(name, raising=False)
    made = Machine(tmp_path / "one", monkeypatch)
    made.move(tmp_path / "one")

    def sweep(
        wanted: list[GemmCall], budget: float | None, known: Mapping[str, Entry], done: Any
    ) -> Found:
        made.swept = wanted

        def contest(call: GemmCall) -> FakeContest:
            # No candidate of ours is as fast as this one, and stock's are not to be had.
            fastest = everything(call)[-1]
            troubles = {"cfg1": Wrong("differs from stock")} if call == LARGE else {}
            return FakeContest({fastest: 50.0}, troubles=troubles)

        return Sweep(H200, contest, known).run(wanted, budget, done)

    monkeypatch.setattr(table, "_DELAY", 3600.0)
    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(prerequisites, "has_gpu", lambda: True)
    monkeypatch.setattr(prerequisites, "patch", lambda: None)
    monkeypatch.setattr(prerequisites, "stamped", lambda command: {"gpu": "H200"})
    yield made
    for left in list(table._tables):
        if left._timer is not None:
            left._timer.cancel()
        left._start()


def test_a_sweep_keeps_its_choices_and_the_next_one_knows_them(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tune.json"
    arguments = ["tune", "--shapes", "77x3072x3072", "--json", str(file)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "1 of 1: 77x3072x3072, triton:" in printed
    assert "All candidates of 1 call are equal to stock" in printed
    fastest = everything(SMALL)[-1]
    entry = machine.entries()[candidates.key(SMALL)]
    assert (entry.choice, entry.m, entry.source) == (fastest, 77, "sweep")
    assert (entry.us[fastest], entry.us["stock"]) == (50.0, 100.0)
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (row["old_from"], row["old"], row["choice"]) == ("prior", prior(SMALL), fastest)
    assert cli.main(arguments) == 0
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert (row["old_from"], row["old"], row["regret_old"]) == ("sweep", fastest, 0.0)


def test_without_shapes_all_sets_are_swept_and_with_recorded_what_was_met(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--recorded"]) == 1
    assert "has met no shapes yet" in capsys.readouterr().err
    met = [GemmCall(70, 3072, 3072, "float16", backend="eager"), WITH_BIAS]
    known = table.for_device(H200, str(machine.folder))
    for call in met:
        known.put(candidates.key(call), Entry("stock", call.m, {}, "run"))
    known.save()
    assert cli.main(["tune", "--recorded"]) == 0
    assert set(machine.swept) == set(met)
    assert {entry.source for entry in machine.entries().values()} == {"sweep"}
    cli.main(["tune"])
    assert machine.swept == calls.of_shapes(shapes.unique(), None)


def test_a_wrong_candidate_ends_it_with_1_and_the_choice_is_kept_all_the_same(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", "--shapes", shapes.named((LARGE.m, LARGE.n, LARGE.k))]) == 1
    printed = capsys.readouterr()
    assert "cfg1 differs from stock" in printed.err
    assert "NOT every result" in printed.out
    assert machine.entries()[candidates.key(LARGE)].choice == everything(LARGE)[-1]


def test_what_is_not_reached_is_said_and_no_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tune.sweep

    def cut(*given: Any, **more: Any) -> Found:
        found = whole(*given, **more)
        found.left.append("9x8x16")
        return found

    monkeypatch.setattr(tune, "sweep", cut)
    assert cli.main(["tune", "--shapes", "77x3072x3072", "--budget", "60"]) == 0
    assert "Not reached within 60 s: 9x8x16" in capsys.readouterr().out


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_choices_that_cannot_be_saved_end_it_with_1(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tune.sweep

    def sweep(*given: Any, **more: Any) -> Found:
        monkeypatch.setattr(os, "fsync", full)
        return whole(*given, **more)

    monkeypatch.setattr(tune, "sweep", sweep)
    assert cli.main(["tune", "--shapes", "77x3072x3072"]) == 1
    printed = capsys.readouterr()
    assert "the choices could not be saved" in printed.err
    assert "All candidates of 1 call are equal to stock.\n" in printed.out
    assert "NOT every result" not in printed.out


def test_what_was_chosen_is_in_the_file_when_the_process_is_killed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    @contextlib.contextmanager
    def shown(what: str, total: int) -> Iterator[Callable[[str], None]]:
        def kill(line: str) -> None:
            raise Killed

        yield kill

    monkeypatch.setattr(progress, "shown", shown)
    with pytest.raises(Killed):
        cli.main(["tune", "--shapes", "77x3072x3072,4096x3072x3072"])
    assert machine.entries().keys() == {candidates.key(SMALL)}


def test_results_that_cannot_be_written_end_it_with_1_and_cost_nothing_else(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    whole = tune.sweep

    def sweep(*given: Any, **more: Any) -> Found:
        folder.rmdir()
        return whole(*given, **more)

    monkeypatch.setattr(tune, "sweep", sweep)
    monkeypatch.setattr(prerequisites, "need_matplotlib", lambda: None)
    monkeypatch.setattr(plot, "draw", lambda rows, title, suffix: b"a picture")
    file = folder / "it.json"
    arguments = ["--json", str(file), "--plot", str(tmp_path / "it.png")]
    assert cli.main(["tune", "--shapes", "77x3072x3072", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"ck_patch tune: {file} cannot be written (No such file or directory)\n"
    assert "77x3072x3072" in printed.out
    assert "NOT every result" not in printed.out
    assert (tmp_path / "it.png").read_bytes() == b"a picture"
    assert machine.entries().keys() == {candidates.key(SMALL)}


def test_a_folder_where_no_choice_could_be_kept_is_known_before_the_sweep(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file"
    file.touch()
    machine.move(file / "folder")
    assert cli.main(["tune", "--shapes", "77x3072x3072"]) == 1
    assert machine.swept == []
    said = capsys.readouterr().err
    assert f"tune cannot run: no choice could be kept: {machine.path} cannot be read (Not a" in said


@pytest.mark.parametrize("options", [["--recorded"], ["--export", "{}"]])
def test_a_table_that_cannot_be_read_is_not_called_empty(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    machine.path.parent.mkdir()
    machine.path.write_text("{", encoding="utf-8")
    assert cli.main(["tune", *(option.format(tmp_path / "it.json") for option in options)]) == 1
    said = capsys.readouterr().err
    assert f"cannot run: {machine.path} holds no table that can be read: " in said


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CK_PATCH_TUNE", "off"), ("CK_PATCH_FORCE", "cfg3"), ("CK_PATCH_INT8", "triton")],
)
def test_a_setting_that_keeps_the_table_from_use_is_named(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
) -> None:
    monkeypatch.setenv(variable, value)
    assert cli.main(["tune", "--shapes", "77x3072x3072"]) == 0
    assert f"not used as long as {variable}={value} is set" in capsys.readouterr().out


def test_a_torch_with_which_comfyui_leaves_the_cuda_backend_alone_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "--shapes", "77x3072x3072"]
    for obstacle in ("torch was built for CUDA 12.8", None):
        monkeypatch.setattr(notices, "cuda_backend_obstacle", lambda text=obstacle: text)
        assert cli.main(arguments) == 0
        said = f"ComfyUI has no use for choices of the CUDA backend: {obstacle}."
        assert (said in capsys.readouterr().out) == (obstacle is not None)


def test_a_table_goes_to_a_machine_of_the_same_kind(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.json"
    assert cli.main(["tune", "--export", str(file)]) == 1
    assert "there is nothing to export" in capsys.readouterr().err
    assert not file.exists()
    cli.main(["tune", "--shapes", "77x3072x3072,4096x3072x3072"])
    learned = machine.entries()
    assert cli.main(["tune", "--export", str(file)]) == 0
    assert f"2 choices of H200 written to {file}" in capsys.readouterr().out

    machine.move(tmp_path / "two")
    assert machine.entries() == {}
    assert cli.main(["tune", "--import", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"2 choices for H200 taken over from {file}" in printed
    assert "left out" not in printed
    assert machine.entries() == learned
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"choice": "', '"choice": "no ', 1), encoding="utf-8")
    assert cli.main(["tune", "--import", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "1 choice for H200 taken over" in printed
    assert "1 other left out: a sweep has chosen here, or there is no such candidate" in printed
    assert machine.entries() == learned


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file"),
        ("", "holds no table"),
        ("{", "holds no table"),
        ('{"format": 99}', "its format is 99"),
        ("other", "is of another kind of machine: "),
    ],
)
def test_a_file_that_is_refused_is_named_and_changes_nothing(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    said: str,
) -> None:
    file = tmp_path / "table.json"
    cli.main(["tune", "--shapes", "77x3072x3072"])
    if content == "other":
        assert cli.main(["tune", "--export", str(file)]) == 0
        machine.use(V100)
    elif content is not None:
        file.write_text(content, encoding="utf-8")
    before = {path: path.read_bytes() for path in machine.folder.iterdir()}
    capsys.readouterr()
    assert cli.main(["tune", "--import", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert str(file) in printed.err
    assert {path: path.read_bytes() for path in machine.folder.iterdir()} == before


def test_an_export_that_cannot_be_written_leaves_the_old_file(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "table.json"
    file.write_text("old", encoding="utf-8")
    cli.main(["tune", "--shapes", "77x3072x3072"])
    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["tune", "--export", str(file)]) == 1
    assert "cannot be written (No space left on device)" in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "old"
