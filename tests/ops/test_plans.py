"""What the op remembers of the shapes it met, what it says of them, and threads that meet there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ck_patch import log
from ck_patch.kernels.launch import Operands
from ck_patch.route import GemmCall
from tests import reference
from tests.ops.slot import RecordingStock, make_call

pytestmark = pytest.mark.interpreter

MakeOp = Callable[..., Any]


def test_a_shape_is_decided_once(make_op: MakeOp, monkeypatch: pytest.MonkeyPatch) -> None:
    from ck_patch import candidates

    decided: list[GemmCall] = []
    real = candidates.chosen

    def chosen(call: GemmCall, *rest: Any) -> candidates.Candidates:
        decided.append(call)
        return real(call, *rest)

    monkeypatch.setattr(candidates, "chosen", chosen)
    op = make_op(RecordingStock())
    for m in (5, 5, 6, 5, 6):
        assert op.function(*make_call(m).arguments()) is True
    assert [call.m for call in decided] == [5, 6]


def test_more_shapes_than_the_limit_are_not_remembered(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.ops import gemm

    monkeypatch.setattr(gemm, "_MAX_PLANS", 4)
    op = make_op(RecordingStock())
    for m in range(1, 12):
        call = make_call(m, 8, 16)
        assert op.function(*call.arguments()) is True
        assert call.is_exact()
        assert len(op._gemm._plans) <= 4
    assert len(op._gemm._planner._kernels) <= 2


def test_the_same_shape_with_another_dtype_or_bias_is_another_plan(make_op: MakeOp) -> None:
    stock = RecordingStock()
    op = make_op(stock)
    for out_dtype in (torch.float32, torch.float16):
        for bias in (torch.empty(0), torch.arange(16).to(out_dtype)):
            call = make_call(d=torch.full((5, 16), torch.nan, dtype=out_dtype), bias=bias)
            assert op.function(*call.arguments()) is True
            assert call.is_exact()
    assert not stock.calls


def test_one_line_per_shape_says_which_path_ran(
    make_op: MakeOp, caplog: pytest.LogCaptureFixture
) -> None:
    log.configure("path")
    op = make_op(RecordingStock())
    for m, k in ((5, 32), (5, 32), (6, 32), (5, 24), (5, 24)):
        op.function(*make_call(m, k=k).arguments())
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "5x16x32" in lines[0]
    assert "triton pointer-" in lines[0]
    assert "6x16x32" in lines[1]
    assert "5x16x24" in lines[2]
    assert "stock (rows of K bytes" in lines[2]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_an_unaligned_call_is_said_to_be_stocks(
    make_op: MakeOp, caplog: pytest.LogCaptureFixture
) -> None:
    log.configure("path")
    stock = RecordingStock()
    call = make_call(xs=torch.ones(6)[1:].view(5, 1))
    assert make_op(stock).function(*call.arguments()) is True
    assert len(stock.calls) == 1
    assert any("16 bytes" in record.getMessage() for record in caplog.records)


def test_nothing_is_said_of_paths_unless_asked(
    make_op: MakeOp, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        make_op(RecordingStock()).function(*make_call().arguments())
    assert not caplog.records


def in_four_threads(work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(3)` at once."""
    barrier = threading.Barrier(4)

    def start(part: int) -> None:
        barrier.wait()
        work(part)

    threads = [threading.Thread(target=start, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_four_threads_that_meet_a_new_shape_at_once_share_one_kernel(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A launch that threads may share, for the interpreter is not one.
    from ck_patch.kernels.int8_gemm import PointerGemm

    used: list[PointerGemm] = []

    def run(self: PointerGemm, call: Operands) -> None:
        used.append(self)
        result = reference.gemm(call.a, call.b, call.x_scale, call.w_scale, call.bias, call.d.dtype)
        call.d.copy_(result)

    monkeypatch.setattr(PointerGemm, "run", run)
    log.configure("path")
    stock = RecordingStock()
    op = make_op(stock)
    calls = [make_call(17, 24, 48) for _ in range(40)]

    def work(part: int) -> None:
        for call in calls[part::4]:
            op.function(*call.arguments())

    in_four_threads(work)
    assert all(call.is_exact() for call in calls)
    assert not stock.calls
    assert len(used) == len(calls)
    assert len(set(map(id, used))) == 1
    assert len(caplog.records) == 1


def test_four_threads_get_right_results_even_where_the_kernel_cannot_bear_them(
    make_op: MakeOp,
) -> None:
    # Triton's interpreter keeps its state in globals, so that some of these calls fail.
    op = make_op(RecordingStock())
    calls = [make_call(17, 24, 48) for _ in range(12)]
    results: list[object] = []

    def work(part: int) -> None:
        with np.errstate(all="ignore"):
            results.extend(op.function(*call.arguments()) for call in calls[part::4])

    in_four_threads(work)
    assert results == [True] * len(calls)
    assert all(call.is_exact() for call in calls)
