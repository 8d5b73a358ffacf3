"""`tune` on a GPU: every candidate equals stock, the table has the choices, and it can be moved."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ck_patch import candidates, tune
from ck_patch.route import BACKENDS, GemmCall
from tests.commands import running

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SMALL, MIDDLE = (77, 3072, 3072), (1024, 4096, 4096)


def command(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    import comfy_kitchen

    # Wherever this process has it from.
    host = Path(comfy_kitchen.__file__).parents[1]
    done = running.ck_patch("tune", *arguments, first=[host], CK_PATCH_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def entries(cache: Path) -> dict[str, Any]:
    (file,) = cache.glob("tuned-*.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["entries"]
    return found


def test_the_command_fills_the_table_and_a_machine_of_the_same_kind_takes_it_over(
    tmp_path: Path,
) -> None:
    one, two, file, exported = (tmp_path / name for name in ("one", "two", "rows", "table"))
    command(one, "--shapes", "77x3072x3072,1024x4096x4096", "--json", str(file))
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["problems"] == document["left"] == []
    assert [(row["m"], row["n"], row["k"]) for row in document["rows"]] == [SMALL, MIDDLE]
    kept = entries(one)
    for row in document["rows"]:
        assert row["old_from"] == "prior"
        assert row["regret_choice"] <= row["regret_old"] + 0.03
        assert row["speed_up_choice"] >= 1.0
        call = GemmCall(row["m"], row["n"], row["k"], "bfloat16")
        entry = kept[candidates.key(call)]
        assert (entry["choice"], entry["source"]) == (row["choice"], "sweep")
    command(one, "--export", str(exported))
    command(two, "--import", str(exported))
    assert entries(two) == kept
    command(two, "--recorded", "--json", str(file))
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert {row["old_from"] for row in rows} == {"sweep"}
    # The same candidates on the same machine: what was chosen is about the best again.
    assert all(row["regret_old"] < 0.1 for row in rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_candidate_of_every_kind_of_call_equals_stock(backend: Any, bias: bool) -> None:
    from ck_patch.tune.contest import bias_dtype

    dtypes = ("bfloat16", "float16", "float32")
    calls = [
        GemmCall(*SMALL, out, (bias_dtype() if backend == "cuda" else out) if bias else None)
        for out in (("bfloat16",) if bias and backend == "cuda" else dtypes)
    ]
    calls = [
        GemmCall(call.m, call.n, call.k, call.out_dtype, call.bias_dtype, backend=backend)
        for call in calls
    ]
    if backend == "cuda" and _has_residual():
        calls.append(GemmCall(*SMALL, "bfloat16", calls[0].bias_dtype, residual=True))
    found = tune.sweep(calls)
    assert found.problems == []
    assert found.skipped == {}
    assert len(found.rows) == len(calls)
    for row in found.rows:
        assert all(us > 0 for us in row.us.values())
        assert ("stock" in row.us) == (backend == "cuda")
        by_number = backend == "cuda" and not bias and not row.call.residual
        assert by_number or not any(name.startswith("cfg") for name in row.us)
        # Stock declines other dtypes.
        assert "cfg0" in row.us or not by_number or row.call.out_dtype != "bfloat16"
        assert row.regret(row.best) == 0
        assert any(name.startswith("triton:") for name in row.us)


def test_a_candidate_that_writes_something_else_is_caught_and_what_is_patched_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from comfy_kitchen.backends.cuda import _C

    from ck_patch.kernels.registry import GEMMS
    from ck_patch.tune import contest

    pointer = GEMMS["pointer"]()

    class Wrong(pointer):  # type: ignore[misc, valid-type]
        def bind(self, call: Any) -> Any:
            bound = super().bind(call)

            def launch(addresses: Any, stream: int) -> None:
                bound(addresses, stream)
                if self.config.block_m == 16:
                    call.d[-1, -1] += 1

            return launch

    monkeypatch.setattr(contest, "GEMMS", {**GEMMS, "pointer": lambda: Wrong})
    entry = _C.cutlass_int8_dequant
    found = tune.sweep([GemmCall(*SMALL, "bfloat16")])
    (row,) = found.rows
    assert row.failed
    assert all("pointer-16x" in name for name in row.failed)
    assert set(row.failed.values()) == {"differs from stock"}
    assert len(found.problems) == len(row.failed)
    assert row.choice not in row.failed
    assert _C.cutlass_int8_dequant is entry


def test_a_budget_that_is_over_leaves_everything_out() -> None:
    found = tune.sweep([GemmCall(*SMALL, "bfloat16")], 1e-9)
    assert (found.rows, found.left) == ([], ["77x3072x3072"])


def _has_residual() -> bool:
    from comfy_kitchen.backends import cuda

    return hasattr(cuda._C, "cutlass_int8_dequant_residual")
