"""`bench` on a GPU: every operation is there, every row is equal to stock's, the file is whole."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from pathlib import Path

import pytest

from ck_patch import shapes
from ck_patch.bench.rows import CONTENDERS, OPS
from tests.commands import running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    import comfy_kitchen

    # Wherever this process has it from.
    host = Path(comfy_kitchen.__file__).parents[1]
    return running.ck_patch("bench", *arguments, first=[host])


def test_a_quick_run_measures_every_operation_and_everything_is_equal(tmp_path: Path) -> None:
    import torch

    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    arguments = ["--quick", "--json", str(file)]
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--plot", str(picture)]
    begin = time.perf_counter()
    done = bench(*arguments)
    seconds = time.perf_counter() - begin
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["stamp"]["gpu"] == torch.cuda.get_device_name()
    assert document["problems"] == []
    rows = document["rows"]
    assert all(row["equal"] for row in rows)
    major, _ = torch.cuda.get_device_capability()
    expected = set(OPS) - (set() if major in (9, 10, 11) else {"class_sm80"})
    assert {row["op"] for row in rows} == expected
    firsts = {tuple(found[0]) for found in shapes.load().values()}
    gemms = [row for row in rows if row["op"] == "gemm"]
    for timing in ("graph", "eager"):
        measured = {(row["m"], row["n"], row["k"]) for row in gemms if row["timing"] == timing}
        assert measured == firsts - {tuple(map(int, s.split("x"))) for s in document["skipped"]}
    for row in rows:
        assert row["stock_ms"] > 0
        assert row["ours_ms"] > 0
    if major >= 9:
        assert all(row[f"{name}_ms"] for row in gemms for name in CONTENDERS if name != "copy")
    assert {mean["op"] for mean in document["means"]} == expected
    if "--plot" in arguments:
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob("*.tmp")) == []
    # Far more than it takes where every kernel is in Triton's cache.
    assert seconds < 300


def test_a_small_shape_has_times_with_the_l2_cold(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = bench("--shapes", "300x2048x2048", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    (row,) = (row for row in rows if row["op"] == "gemm" and row["timing"] == "graph")
    for name in ("stock", "ours", "bf16"):
        assert row[f"{name}_cold_ms"] > 0.9 * row[f"{name}_ms"]
