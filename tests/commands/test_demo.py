"""`demo`: it runs, it would notice a wrong result, and it says so with its exit code."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ck_patch import device, preview
from tests.commands import running
from tests.conftest import WarmInterpreter

pytest.importorskip("torch")
import torch

from ck_patch.demo import gpu
from ck_patch.demo.slot import PROMISED_UNITS, Inputs

needs_host = pytest.mark.skipif(
    importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed"
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes another branch")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def correct(inputs: Inputs) -> torch.Tensor:
    """What stock computes, up to the last bit of float32."""
    acc = (inputs.a.long() @ inputs.b.long().T).float()
    bias = 0.0 if inputs.bias is None else inputs.bias.float()
    return (acc * inputs.x_scale * inputs.w_scale + bias).to(inputs.out_dtype)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_right_result_is_within_the_promise(out: torch.dtype, has_bias: bool) -> None:
    inputs = Inputs.random((37, 24, 2064), out, out if has_bias else None, "cpu")
    assert inputs.units_off(correct(inputs), rows=37) <= PROMISED_UNITS


@pytest.mark.parametrize("out", DTYPES)
def test_one_wrong_element_is_noticed(out: torch.dtype) -> None:
    inputs = Inputs.random((37, 24, 48), out, None, "cpu")
    for row, column in ((0, 0), (36, 23), (5, 11)):
        d = correct(inputs)
        d[row, column] *= 1 + 4 * torch.finfo(out).eps
        assert inputs.units_off(d, rows=37) > PROMISED_UNITS


def test_an_accumulator_that_is_off_by_one_is_noticed_in_float32() -> None:
    inputs = Inputs.random((4, 8, 64), torch.float32, None, "cpu")
    d = correct(inputs)
    d[2, 3] += inputs.x_scale[2, 0] * inputs.w_scale[3]
    assert inputs.units_off(d, rows=4) > PROMISED_UNITS


def test_an_element_that_was_not_written_is_not_a_number() -> None:
    inputs = Inputs.random((4, 8, 16), torch.bfloat16, None, "cpu")
    d = correct(inputs)
    d[3, 7] = inputs.output()[3, 7]
    assert not inputs.units_off(d, rows=4) <= PROMISED_UNITS


def test_only_the_first_and_the_last_rows_are_compared_where_asked() -> None:
    inputs = Inputs.random((9, 2056, 16), torch.float32, None, "cpu")
    d = correct(inputs)
    d[4, :] = 0
    assert inputs.units_off(d, rows=4) <= PROMISED_UNITS < inputs.units_off(d, rows=5)
    d[8, 2055] = 0
    assert inputs.units_off(d, rows=4) > PROMISED_UNITS


@needs_host
@needs_no_gpu
def test_without_a_gpu_the_kernel_is_right_in_the_interpreter(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = running.ck_patch("demo", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every result was as promised." in done.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["stamp"]["comfy_kitchen"]
    rows = document["rows"]
    assert {(row["out"], row["bias"]) for row in rows} == {
        (name, bias) for name in ("float32", "float16", "bfloat16") for bias in ("none", name)
    }
    assert all(row["units"] <= PROMISED_UNITS and row["path"] != "stock" for row in rows)
    assert len(document["routes"]) == len(device.KNOWN) * len(preview.SHAPES)
    assert all(route["reason"] for route in document["routes"])
    assert {gpu.name for gpu in device.KNOWN} == {route["gpu"] for route in document["routes"]}


DEMO = running.IN_CHILD.format(arguments=["demo", "--shape", "2x8x16"])


@needs_host
@needs_no_gpu
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("slot.Inputs.units_off = lambda *_, **__: 2.5", "WRONG: more than 2.0 off"),
        ("slot.Inputs.units_off = lambda *_, **__: float('nan')", "WRONG: is not a number"),
        ("slot.Inputs.call = lambda *_: False", "WRONG: was not written"),
        ("slot.Inputs.call = lambda *_: 1 / 0", "failed: ZeroDivisionError"),
        (
            "from ck_patch.kernels import registry; registry.GEMMS = {}",
            "failed: KeyError: 'pointer'",
        ),
    ],
)
def test_a_result_that_was_not_promised_ends_with_1(
    warm_interpreter: WarmInterpreter, fault: str, said: str
) -> None:
    script = f"from ck_patch.demo import slot\n{fault}\n{DEMO}"
    code, printed = warm_interpreter.run(script, env={"TRITON_INTERPRET": "1"})
    assert code == 1
    assert said in printed
    assert "NOT every result was as promised." in printed


@needs_host
@needs_no_gpu
def test_results_that_cannot_be_written_end_it_with_1(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    arguments = ["demo", "--shape", "2x8x16", "--json", str(tmp_path / "gone" / "it.json")]
    (tmp_path / "gone").mkdir()
    script = (
        "import os\n"
        "from ck_patch import prerequisites\n"
        f"prerequisites.stamped = lambda command: os.rmdir({str(tmp_path / 'gone')!r})\n"
        + running.IN_CHILD.format(arguments=arguments)
    )
    code, printed = warm_interpreter.run(script, env={"TRITON_INTERPRET": "1"})
    assert code == 1
    assert "Every result was as promised." in printed


@needs_host
@needs_no_gpu
@pytest.mark.parametrize("int8", ["stock", "fp16"])
def test_a_demo_that_ran_nothing_of_ours_says_so_and_fails_nothing(
    warm_interpreter: WarmInterpreter, int8: str
) -> None:
    code, printed = warm_interpreter.run(DEMO, env={"CK_PATCH_INT8": int8})
    assert code == 0
    assert f"stock: CK_PATCH_INT8={int8}" in printed
    assert "nothing of ours ran" in printed
    assert "as promised" not in printed


@needs_host
@needs_no_gpu
@pytest.mark.parametrize("shape", ["2x7x16", "2x8x24", "2x8x131088"])
def test_a_shape_that_is_stocks_is_no_failure(
    warm_interpreter: WarmInterpreter, shape: str
) -> None:
    code, printed = warm_interpreter.run(
        running.IN_CHILD.format(arguments=["demo", "--shape", shape, "--shape", "2x8x16"])
    )
    assert code == 0
    assert " stock: " in printed
    assert "Every result was as promised." in printed
    assert "(bfloat16 output; as asked for)" in printed


@needs_no_gpu
@pytest.mark.parametrize("shape", ["4096x3072x3072", "2048x2048x16", "65536x65536x65536"])
def test_a_shape_too_large_for_the_interpreter_is_refused_before_anything_runs(
    warm_interpreter: WarmInterpreter, shape: str
) -> None:
    script = running.IN_CHILD.format(arguments=["demo", "--shape", shape])
    assert warm_interpreter.run(script) == [2, ""]


@needs_no_gpu
def test_without_numpy_the_demo_says_that_it_cannot_run(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('no numpy')", encoding="utf-8")
    done = running.ck_patch("demo", first=[tmp_path])
    assert (done.returncode, done.stdout) == (1, "")
    assert "Triton's interpreter needs numpy" in done.stderr
    assert "-m pip install numpy`" in done.stderr
    assert "WRONG" not in done.stderr


@needs_host
@needs_no_gpu
def test_the_lines_of_the_log_are_shown() -> None:
    done = running.ck_patch("demo", "--shape", "2x8x16", CK_PATCH_LOG="path")
    assert done.returncode == 0
    assert "ck_patch: patched: cutlass_int8_dequant, " in done.stderr


@needs_host
@needs_no_gpu
def test_a_triton_that_was_loaded_for_compiling_is_no_hindrance(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    script = (
        "import sys, triton; from ck_patch import cli; "
        f"sys.exit(cli.main(['demo', '--shape', '2x8x16', '--json', {str(file)!r}]))"
    )
    done = running.python("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["shape"] for row in json.loads(file.read_text())["rows"]} == {"2x8x16"}


@needs_host
def test_a_slot_that_is_not_patched_is_named_with_the_reason() -> None:
    done = running.ck_patch("demo", CK_PATCH="0")
    assert done.returncode == 1
    assert "cutlass_int8_dequant is not patched: CK_PATCH=0" in done.stderr


@pytest.mark.parametrize("name", ["torch", "comfy_kitchen"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("raise ImportError('no such thing')", encoding="utf-8")
    done = running.ck_patch("demo", first=[tmp_path])
    assert done.returncode == 1
    assert f"{name} cannot be imported (ImportError: no such thing)" in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_that_did_not_fit_fail_nothing_and_count_nowhere() -> None:
    fast = gpu.Row("m", 1, 2, 3, "p", "r", equal=True, gemm_stock=2.0, gemm_ours=1.0)
    slow = gpu.Row("m", 1, 2, 3, "p", "r", equal=True, gemm_stock=2.0, gemm_ours=4.0)
    large = gpu.Row("m", 1, 2, 3, "p", "r", problem="does not fit")
    wrong = gpu.Row("m", 1, 2, 3, "p", "r", problem="differs", equal=False)
    assert [row.ok for row in (fast, slow, large, wrong)] == [True, True, True, False]
    assert gpu._means([fast, slow, large]) == {"GEMM, ours against stock": pytest.approx(1.0)}
    assert all(len(gpu._cells(row)) == 12 for row in (fast, large, wrong))


@needs_host
@pytest.mark.gpu
def test_on_a_gpu_ours_is_bit_equal_to_stock(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = running.ck_patch("demo", "--shape", "1024x4096x4096", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert row["equal"] is True
    assert row["layer_ours"] > 0
