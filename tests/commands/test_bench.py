"""`bench` without a GPU: what it accepts, how it ends, and what it makes of rows that are given."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ck_patch import cli, prerequisites, shapes
from ck_patch.bench import document
from ck_patch.bench.rows import Row, means
from tests.commands import running
from tests.conftest import REPOSITORY

needs_host = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def gemm(m: int, n: int, k: int, **ms: float) -> Row:
    return Row("gemm", m, n, k, "graph", ms, equal=True, path="triton")


ROWS = [
    gemm(512, 1024, 1024, stock=3.0, ours=1.0, bf16=1.5),
    gemm(1024, 4096, 4096, stock=2.0, ours=1.0, bf16=1.5, fp8=0.9),
    gemm(4096, 4096, 4096, stock=0.5, ours=1.0, bf16=1.5, fp8=0.4),
    Row("gemm", 4096, 4096, 4096, "eager", {"stock": 9.0, "ours": 1.0}, equal=True),
    Row("int8_linear", 1024, 4096, 4096, "graph", {"stock": 2.0, "ours": 1.0}, equal=True),
    Row("quantize", 8, None, 16, "graph", {"stock": 9.0, "ours": 1.0, "copy": 0.1}, equal=True),
    Row("quantize", 4096, None, 4096, "graph", {"stock": 4.0, "ours": 1.0, "copy": 0.8}, True),
    Row("host_us", 64, 256, 256, "eager", {"stock": 0.1, "ours": 0.05}, True, call="int8_linear"),
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["surplus"],
        ["--json"],
        ["--json", "."],
        ["--plot", "no-such-folder/out.png"],
        ["--plot", "picture.jpeg.txt"],
        ["--shapes", ""],
        ["--shapes", "no_such_set"],
        ["--shapes", "no-such-file.json"],
        ["--shapes", "flux_2,1x2"],
        ["--shapes", "0x8x16"],
        ["--shapes", "9" * 5000 + "x8x16"],
    ],
)
def test_a_usage_error_ends_with_2_and_prints_nothing_on_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", *arguments])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: ck-patch" in printed.err


def test_a_set_that_does_not_exist_is_answered_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--shapes", "flux"])
    printed = capsys.readouterr().err
    assert "'flux' is neither a file nor MxNxK nor a set of shapes" in printed
    assert all(name in printed for name in shapes.load())


def test_sets_shapes_and_files_are_told_apart_and_add_up(tmp_path: Path) -> None:
    file = tmp_path / "own, with a comma.json"
    file.write_text('{"sets": {"mine": {"shapes": [[1, 8, 16]]}}}', encoding="utf-8")
    assert shapes.select(str(file)) == {"mine": [(1, 8, 16)]}
    file = file.rename(tmp_path / "own.json")
    assert shapes.select(f"flux_2,3x16x48,{file},70x56X96") == {
        "flux_2": shapes.load()["flux_2"],
        "--shapes": [(3, 16, 48), (70, 56, 96)],
        "mine": [(1, 8, 16)],
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"sets": 3}',
        '{"sets": {}}',
        '{"sets": {"mine": {"shapes": []}}}',
        '{"sets": {"mine": {"shapes": [[1, 2]]}}}',
        '{"sets": {"mine": {"shapes": [[1, 2, 0]]}}}',
        '{"sets": {"mine": {"shapes": [[1, 2, "3"]]}}}',
        '{"sets": {"mine": {"shapes": [[1, 2, 1.5]]}}}',
    ],
)
def test_a_file_without_shapes_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "shapes.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"shapes\.json holds no"):
        shapes.select(str(file))


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = running.ck_patch("bench", "--quick", "--json", str(tmp_path / "bench.json"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "ck_patch bench cannot run: torch finds no NVIDIA GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["torch", "comfy_kitchen"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('no such thing')", encoding="utf-8")
    script = (
        "import sys\n"
        "from ck_patch import cli, prerequisites\n"
        f"if {name!r} != 'torch': prerequisites.has_gpu = lambda: True\n"
        "sys.exit(cli.main(['bench']))"
    )
    done = running.python("-c", script, first=[tmp_path])
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{name} cannot be imported (ImportError: no such thing)" in done.stderr


def test_a_plot_without_matplotlib_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    for name in ("matplotlib", "torch"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('gone')", encoding="utf-8")
    done = running.ck_patch("bench", "--plot", str(tmp_path / "bench.png"), first=[tmp_path])
    assert (done.returncode, done.stdout) == (1, "")
    assert "--plot needs matplotlib (ImportError: gone)" in done.stderr
    assert "-m pip install matplotlib`" in done.stderr
    assert not (tmp_path / "bench.png").exists()


FOUND = SimpleNamespace(rows=ROWS, skipped={"1x2x3": "does not fit"}, problems=[])


@pytest.mark.parametrize("is_full", [False, True])
def test_results_that_cannot_be_written_end_it_with_1(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_full: bool,
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    measuring = SimpleNamespace(measure=lambda shapes: FOUND)
    monkeypatch.setitem(sys.modules, "ck_patch.bench.measuring", measuring)
    monkeypatch.setattr("ck_patch.bench.measuring", measuring, raising=False)
    monkeypatch.setattr(prerequisites, "has_gpu", lambda: True)
    monkeypatch.setattr(prerequisites, "patch", lambda: None)
    monkeypatch.setattr(prerequisites, "stamped", lambda command: {"gpu": "some"})
    monkeypatch.setenv("CK_PATCH_TUNE", "frozen")
    if is_full:
        monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "bench.json"
    assert cli.main(["bench", "--json", str(file)]) == is_full
    printed = capsys.readouterr()
    assert f"All {len(ROWS)} rows are equal to stock." in printed.out
    line = f"ck_patch bench: {file} cannot be written (No space left on device)\n"
    assert printed.err == (line if is_full else "")
    assert file.exists() == (not is_full)


def test_the_document_has_a_stamp_and_every_column_in_every_row() -> None:
    written = json.loads(json.dumps(document({"gpu": "some"}, FOUND), allow_nan=False))
    assert written["stamp"] == {"gpu": "some"}
    columns = {"op", "m", "n", "k", "timing", "stock_ms", "ours_ms", "bf16_ms", "fp8_ms", "equal"}
    assert all(columns <= set(row) for row in written["rows"])
    assert len({frozenset(row) for row in written["rows"]}) == 1
    row = written["rows"][1]
    assert (row["op"], row["m"], row["n"], row["k"]) == ("gemm", 1024, 4096, 4096)
    assert (row["stock_ms"], row["ours_ms"], row["fp8_ms"]) == (2.0, 1.0, 0.9)
    assert (row["times_stock"], row["share_of_limit"]) == (2.0, 0.9)
    assert row["tops"] == pytest.approx(2 * 1024 * 4096 * 4096 * 1e-9, abs=0.1)
    assert row["equal"] is True
    quantized = written["rows"][6]
    assert (quantized["n"], quantized["fp8_ms"], quantized["tops"]) == (None, None, None)
    assert quantized["share_of_limit"] == 0.8
    assert written["skipped"] == FOUND.skipped


def test_the_means_are_geometric_and_name_the_worst_shape() -> None:
    found = {(mean.op, mean.what): mean for mean in means(ROWS)}
    everything = found["gemm", "over stock, all"]
    assert everything.geometric_mean == pytest.approx(3 ** (1 / 3))
    assert (everything.rows, everything.worst) == (3, 0.5)
    assert everything.worst_shape == "4096x4096x4096"
    assert found["gemm", "over stock, M >= 1024"].geometric_mean == pytest.approx(1.0)
    assert found["gemm", "over FP8, M >= 1024"].geometric_mean == pytest.approx(0.6)
    assert found["gemm", "over stock, all, eager"].geometric_mean == pytest.approx(9.0)
    copied = found["quantize", "share of the speed of a copy, x from 8 MB"]
    assert (copied.rows, copied.worst) == (1, 0.8)
    assert found["host_us", "over stock, int8_linear"].geometric_mean == pytest.approx(2.0)
    assert ("gemm", "over stock, all, L2 cold") not in found


def test_the_tables_show_every_operation_and_its_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ck_patch.bench import show

    show.show(ROWS)
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("4096x4096x4096  triton"))
    assert line.split()[2:8] == ["0.5000", "1.0000", "0.50", "-", "9.00", "1.5000"]
    assert line.split()[-3:] == ["40%", "137", "yes"]
    assert "host_us" in printed
    assert printed.rstrip().splitlines()[-1].split()[0] == "host_us"


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".SVG", b"<?xml")])
def test_the_rows_become_a_picture(tmp_path: Path, suffix: str, magic: bytes) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ck_patch.bench import plot\n"
        "from tests.commands.test_bench import ROWS\n"
        "rows = ROWS if sys.argv[2] == 'all' else [r for r in ROWS if r.op == sys.argv[2]]\n"
        "picture = plot.draw(rows, 'some GPU', sys.argv[1])\n"
        "Path(sys.argv[3]).write_bytes(picture)"
    )
    # Its own warnings are nobody's failure.
    for op in ("all", "gemm", "quantize", "host_us"):
        file = tmp_path / op
        done = running.python("-c", script, suffix, op, str(file))
        assert done.returncode == 0, done.stderr
        assert file.read_bytes().startswith(magic)


def test_help_imports_neither_torch_nor_matplotlib() -> None:
    script = (
        "import sys\n"
        "from ck_patch import cli\n"
        "try: cli.main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'matplotlib', 'comfy_kitchen'} & set(sys.modules)))"
    )
    assert running.python("-c", script).stdout.endswith("\n[]\n")
    assert (REPOSITORY / "ck_patch" / "bench" / "__init__.py").exists()


class TestMeasuring:
    """What needs torch, though no GPU."""

    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    def test_copies_are_as_many_as_push_the_operands_out_of_the_l2(self) -> None:
        from ck_patch.bench import cases

        l2 = 60 * 2**20
        assert cases.copies("gemm", (37296, 21504, 5376), l2) == 1
        for contender in ("gemm", "bf16", "quantize", "int8_linear_convrot"):
            count = cases.copies(contender, (1024, 4096, 4096), l2)
            one = cases.operand_bytes(contender, (1024, 4096, 4096))
            assert (count - 1) * one < 2 * l2 <= count * one
        assert cases.copies("quantize", (2, 16384, 4096), l2) == 0

    def test_the_stock_side_runs_while_ours_is_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ck_patch import measure
        from ck_patch.bench import sides

        place = "nowhere"
        seen = []

        def switch_to(name: str) -> None:
            nonlocal place
            place = name

        def host_times(functions: dict[str, Any], rounds: int) -> dict[str, float]:
            return {name: function() for name, function in functions.items()}

        def call(us: float) -> float:
            seen.append(place)
            return us if place == "in" else 2 * us

        switches = (("ours", lambda: switch_to("in")), ("stock", lambda: switch_to("out")))
        monkeypatch.setattr(sides, "SIDES", switches)
        monkeypatch.setattr(measure, "host_times", host_times)
        times = sides.on_host({"linear": lambda: call(5.0)}, {"bf16": lambda: 1.0})
        assert times == {("ours", "linear"): 5.0, ("stock", "linear"): 10.0, ("", "bf16"): 1.0}
        assert seen == ["in", "out"] * (len(seen) // 2)

    @needs_host
    def test_each_row_has_the_times_of_its_own_operation(self) -> None:
        from ck_patch.bench import measuring

        times: dict[tuple[str, tuple[str, bool]], float] = {
            ("stock", ("gemm", False)): 2.0,
            ("ours", ("gemm", False)): 1.0,
            ("stock", ("gemm", True)): 2.5,
            ("ours", ("gemm", True)): 1.5,
            ("stock", ("quantize", False)): 0.2,
            ("ours", ("quantize", False)): 0.1,
            ("", ("bf16", False)): 1.8,
            ("", ("copy", False)): 0.05,
            ("", ("class_sm80", False)): 2.1,
        }
        equal = {"gemm": True, "quantize": True, "class_sm80": False}
        rows = list(measuring._rows((1024, 4096, 4096), "graph", times, equal, "triton"))
        by_op = {row.op: row for row in rows}
        assert by_op["gemm"].ms == {"stock": 2.0, "ours": 1.0, "bf16": 1.8}
        assert by_op["gemm"].cold_ms == {"stock": 2.5, "ours": 1.5}
        assert by_op["quantize"].ms == {"stock": 0.2, "ours": 0.1, "copy": 0.05}
        assert (by_op["quantize"].n, by_op["quantize"].shape) == (None, "1024x4096")
        assert by_op["class_sm80"].ms == {"stock": 2.0, "ours": 2.1, "bf16": 1.8}
        assert [row.equal for row in rows] == [True, True, False]
        assert "class_sm80" not in {
            row.op for row in measuring._rows((1024, 4096, 4096), "eager", times, equal, "triton")
        }
