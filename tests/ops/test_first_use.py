"""The first use of a kernel on a device: compared with stock, never under capture, by one thread.

On the CPU, with the interpreter as the device: a stream that is none, and a capture that is said.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.candidates import Candidate
from ck_patch.kernels.int8_gemm import PointerGemm
from ck_patch.kernels.launch import Operands
from ck_patch.ops import first_use
from ck_patch.ops.gemm_plan import Kernel
from ck_patch.tiles import INTERPRETER
from tests.ops.slot import RecordingStock, make_call

pytestmark = pytest.mark.interpreter

MakeOp = Callable[..., Any]
DEVICE = 0


@dataclass
class Gpu:
    """What the first use asks of CUDA."""

    capturing: bool = False
    launched: list[Operands] = field(default_factory=list)
    fault: Callable[[Operands], None] | None = None
    """Done to the operands after each launch."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    state = Gpu()
    real = PointerGemm.run

    def run(self: PointerGemm, call: Operands) -> None:
        state.launched.append(call)
        real(self, call)
        if state.fault is not None:
            state.fault(call)

    monkeypatch.setattr(PointerGemm, "run", run)
    # torch.cuda.stream(None) changes nothing.
    monkeypatch.setattr(first_use, "stream_of", lambda pointer, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


def operands(m: int = 300) -> Operands:
    call = make_call(m)
    return Operands(call.a, call.b, call.xs, call.ws, None, call.d)


def new_kernel() -> Kernel:
    return Kernel(Candidate(INTERPRETER), PointerGemm(INTERPRETER))


def test_a_kernel_that_equals_stock_is_proven(make_op: MakeOp, gpu: Gpu, breaker: Breaker) -> None:
    stock, kernel = RecordingStock(), new_kernel()
    engine = make_op(stock)._gemm
    assert engine._prove(kernel, DEVICE, operands(), 0) is True
    assert kernel.proven
    assert len(gpu.launched) == 1
    assert breaker.snapshot() == ()


def _last_element(call: Operands) -> None:
    call.d[-1, -1] += call.d[-1, -1] * 2.0**-20


def _first_row_late(call: Operands) -> None:
    call.d[0] = torch.nan


def _rows_shifted(call: Operands) -> None:
    call.d.copy_(call.d.roll(1, 0))


@pytest.mark.parametrize(
    "fault",
    [_last_element, _first_row_late, _rows_shifted],
    ids=["last element", "first row not written", "rows shifted"],
)
def test_a_kernel_that_differs_from_stock_is_never_used_again(
    make_op: MakeOp,
    gpu: Gpu,
    breaker: Breaker,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Operands], None],
) -> None:
    kernel = new_kernel()
    engine = make_op(RecordingStock())._gemm
    gpu.fault = fault
    with caplog.at_level(logging.INFO, "ck_patch"):
        assert engine._prove(kernel, DEVICE, operands(), 0) is False
    assert not kernel.proven
    (opened,) = breaker.snapshot()
    assert opened.device == str(DEVICE)
    assert (opened.operation, opened.reason) == (
        f"cutlass_int8_dequant by {Candidate(INTERPRETER).name}",
        "differs from stock",
    )
    (line,) = [record.getMessage() for record in caplog.records]
    assert opened.reason in line
    assert "CK_PATCH=0" in line


def test_a_call_that_stock_declines_proves_nothing(make_op: MakeOp, gpu: Gpu) -> None:
    kernel = new_kernel()
    assert (
        make_op(RecordingStock(result=False))._gemm._prove(kernel, DEVICE, operands(), 0) is False
    )
    assert not kernel.proven


def test_nothing_is_launched_or_compared_under_capture(
    make_op: MakeOp, gpu: Gpu, breaker: Breaker
) -> None:
    stock, kernel = RecordingStock(), new_kernel()
    engine = make_op(stock)._gemm
    gpu.capturing = True
    assert engine._prove(kernel, DEVICE, operands(), 0) is False
    assert not gpu.launched
    assert not stock.calls
    assert breaker.snapshot() == ()
    gpu.capturing = False
    assert engine._prove(kernel, DEVICE, operands(), 0) is True


@pytest.mark.parametrize("error", [RuntimeError("no compiler"), KeyboardInterrupt()], ids=repr)
def test_a_first_use_that_fails_lets_the_next_one_try(
    make_op: MakeOp, gpu: Gpu, error: BaseException
) -> None:
    engine, kernel = make_op(RecordingStock())._gemm, new_kernel()

    def fail(call: Operands) -> None:
        raise error

    gpu.fault = fail
    with pytest.raises(type(error)):
        engine._prove(kernel, DEVICE, operands(), 0)
    assert not kernel.proven
    gpu.fault = None
    assert engine._prove(kernel, DEVICE, operands(), 0) is True


def test_a_thread_that_comes_while_another_compiles_goes_to_stock_at_once(
    make_op: MakeOp, gpu: Gpu
) -> None:
    engine, kernel = make_op(RecordingStock())._gemm, new_kernel()
    compiling, go_on = threading.Event(), threading.Event()
    results: list[bool] = []

    def wait(call: Operands) -> None:
        compiling.set()
        assert go_on.wait(60)

    gpu.fault = wait
    call = operands()
    first = threading.Thread(target=lambda: results.append(engine._prove(kernel, DEVICE, call, 0)))
    first.start()
    assert compiling.wait(60)
    assert engine._prove(kernel, DEVICE, operands(), 0) is False
    assert len(gpu.launched) == 1
    go_on.set()
    first.join()
    assert results == [True]
    assert kernel.proven
