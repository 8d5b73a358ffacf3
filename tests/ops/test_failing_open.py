"""Whatever breaks in our path, the caller gets stock's result, unless stock cannot help either."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.kernels.launch import Operands
from tests.ops.slot import RecordingStock, make_call

pytestmark = pytest.mark.interpreter

MakeOp = Callable[..., Any]


def out_of_resources() -> Exception:
    from triton.runtime.errors import OutOfResources

    error: Exception = OutOfResources(131072, 101376, "shared memory")
    return error


def compilation_error() -> Exception:
    from triton.compiler.errors import CompilationError

    error: Exception = CompilationError(None, None, "sm_121a is not defined")
    return error


FAILURES = {
    "import": lambda: ImportError("DLL load failed while importing cuda_utils"),
    "file": lambda: PermissionError(13, "Permission denied", "/.triton"),
    "launcher": lambda: SystemError("PY_SSIZE_T_CLEAN macro must be defined"),
    "compiler": lambda: RuntimeError("Failed to find C compiler. Please specify via CC"),
    "resources": out_of_resources,
    "compilation": compilation_error,
    "drift": lambda: AttributeError("module 'triton' has no attribute 'x'"),
    "no text": lambda: ValueError(),
    "assertion": lambda: AssertionError("two\nlines"),
}

STICKY = {
    "torch": "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
    "triton": "Triton Error [CUDA]: an illegal memory access was encountered",
    "launch": "CUDA error: unspecified launch failure",
    "assert": "CUDA error: device-side assert triggered",
}


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """`fail(error)` makes each launch write half of d and raise; `fail(None)` mends it."""
    from ck_patch.kernels.int8_gemm import PointerGemm

    good = PointerGemm.run

    def set_error(error: BaseException | None) -> None:
        def run(self: PointerGemm, call: Operands) -> None:
            call.d[: call.m // 2] = 17
            raise error if error is not None else AssertionError

        monkeypatch.setattr(PointerGemm, "run", good if error is None else run)

    return set_error


@pytest.mark.parametrize("make_error", FAILURES.values(), ids=FAILURES.keys())
def test_any_exception_gives_stocks_result_for_that_call_and_all_later_ones(
    make_op: MakeOp,
    fail: Callable[[BaseException | None], None],
    caplog: pytest.LogCaptureFixture,
    make_error: Callable[[], Exception],
    breaker: Breaker,
) -> None:
    error = make_error()
    fail(error)
    stock = RecordingStock()
    op = make_op(stock)
    with caplog.at_level(logging.INFO, "ck_patch"):
        for count, m in enumerate((5, 5, 6), start=1):
            call = make_call(m)
            assert op.function(*call.arguments()) is True
            assert call.is_exact()
            assert len(stock.calls) == count
    (opened,) = breaker.snapshot()
    assert (opened.operation, opened.device) == ("cutlass_int8_dequant", "-1")
    assert type(error).__name__ in opened.reason
    (line,) = [record.getMessage() for record in caplog.records]
    assert opened.reason in line
    assert "CK_PATCH=0" in line
    assert "\n" not in line


def test_a_failure_after_success_opens_the_breaker_too(
    make_op: MakeOp, fail: Callable[[BaseException | None], None]
) -> None:
    stock = RecordingStock()
    op = make_op(stock)
    assert op.function(*make_call().arguments()) is True
    assert not stock.calls
    fail(RuntimeError("late"))
    call = make_call()
    assert op.function(*call.arguments()) is True
    assert call.is_exact()
    fail(None)
    assert op.function(*make_call().arguments()) is True
    assert len(stock.calls) == 2


def test_kernels_that_cannot_be_imported_leave_the_call_to_stock(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch, breaker: Breaker
) -> None:
    monkeypatch.setitem(sys.modules, "ck_patch.kernels.registry", None)
    stock, call = RecordingStock(), make_call()
    op = make_op(stock)
    assert op.function(*call.arguments()) is True
    assert call.is_exact()
    assert "ck_patch.kernels.registry" in breaker.snapshot()[0].reason


@pytest.mark.parametrize("what", ["ops.gemm_planner.profile", "candidates.chosen"])
def test_a_device_that_cannot_be_asked_leaves_the_call_to_stock(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(f"ck_patch.{what}", broken)
    stock = RecordingStock()
    op = make_op(stock)
    for _ in range(2):
        call = make_call()
        assert op.function(*call.arguments()) is True
        assert call.is_exact()
    assert len(stock.calls) == 2


def test_gpus_that_cannot_be_asked_leave_the_call_to_stock(
    make_op: MakeOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.ops import gemm_planner

    def broken(index: int) -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old")

    monkeypatch.setattr(gemm_planner, "profile", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    stock, call = RecordingStock(), make_call()
    assert make_op(stock).function(*call.arguments()) is True
    assert call.is_exact()


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_goes_to_stock_and_ours_is_tried_again(
    make_op: MakeOp,
    fail: Callable[[BaseException | None], None],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    breaker: Breaker,
) -> None:
    stock = RecordingStock()
    op = make_op(stock)
    fail(error)
    with caplog.at_level(logging.INFO, "ck_patch"):
        for _ in range(2):
            call = make_call()
            assert op.function(*call.arguments()) is True
            assert call.is_exact()
    assert len(stock.calls) == 2
    assert breaker.snapshot() == ()
    assert len(caplog.records) == 1
    fail(None)
    assert op.function(*make_call().arguments()) is True
    assert len(stock.calls) == 2


def test_out_of_memory_in_stock_reaches_the_caller(
    make_op: MakeOp, fail: Callable[[BaseException | None], None], breaker: Breaker
) -> None:
    theirs = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def stock(*args: Any) -> bool:
        raise theirs

    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"))
    op = make_op(stock)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        op.function(*make_call().arguments())
    assert caught.value is theirs
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("text", STICKY.values(), ids=STICKY.keys())
def test_a_dead_context_passes_untouched_and_stock_is_not_called(
    make_op: MakeOp,
    fail: Callable[[BaseException | None], None],
    caplog: pytest.LogCaptureFixture,
    text: str,
    breaker: Breaker,
) -> None:
    error = RuntimeError(text)
    fail(error)
    stock = RecordingStock()
    op = make_op(stock)
    with caplog.at_level(logging.INFO, "ck_patch"), pytest.raises(RuntimeError) as caught:
        op.function(*make_call().arguments())
    assert caught.value is error
    assert not stock.calls
    assert breaker.snapshot() == ()
    assert not caplog.records


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_what_is_no_failure_passes_untouched(
    make_op: MakeOp, fail: Callable[[BaseException | None], None], error: BaseException
) -> None:
    fail(error)
    stock = RecordingStock()
    op = make_op(stock)
    with pytest.raises(type(error)) as caught:
        op.function(*make_call().arguments())
    assert caught.value is error
    assert not stock.calls
    fail(None)
    assert op.function(*make_call().arguments()) is True
    assert not stock.calls


def test_stocks_own_exception_passes_and_opens_nothing(make_op: MakeOp, breaker: Breaker) -> None:
    theirs = RuntimeError("xs must have M elements")

    def stock(*args: Any) -> bool:
        raise theirs

    op = make_op(stock)
    with pytest.raises(RuntimeError) as caught:
        op.function(*make_call(k=24).arguments())
    assert caught.value is theirs
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("changes", [{"int8": "stock"}, {"assume": ((None, (7, 0)),)}], ids=str)
def test_where_no_device_can_use_ours_stock_gets_the_callers_own_capsules(
    make_op: MakeOp, changes: dict[str, Any]
) -> None:
    stock = RecordingStock()
    op = make_op(stock, **changes)
    assert op.function(*make_call().arguments()) is True
    values = make_call().arguments()
    assert op.function(*values) is True
    assert all(a is b for a, b in zip(stock.calls[1], values, strict=True))


def test_a_deactivated_op_hands_everything_to_stock_as_it_is(make_op: MakeOp) -> None:
    stock = RecordingStock()
    op = make_op(stock)
    assert op.function(*make_call().arguments()) is True
    op.deactivate()
    call = make_call()
    values = call.arguments()
    assert op.function(*values) is True
    assert call.is_exact()
    assert all(a is b for a, b in zip(stock.calls[0], values, strict=True))


class TestComparison:
    """What decides whether the first result of a kernel is used: `d` against stock's rows."""

    @staticmethod
    def operands(m: int, bias: torch.Tensor | None = None) -> Operands:
        call = make_call(m)
        return Operands(call.a, call.b, call.xs, call.ws, bias, call.expected())

    @pytest.mark.parametrize("m", [1, 5, 127, 128, 129, 144, 300])
    def test_a_right_result_is_accepted(self, make_op: MakeOp, m: int) -> None:
        stock = RecordingStock()
        assert make_op(stock)._gemm._compare(self.operands(m), 0) is None
        assert 1 <= len(stock.calls) <= 2

    @pytest.mark.parametrize(
        ("m", "row"), [(1, 0), (128, 127), (129, 128), (300, 0), (300, 127), (300, 172), (300, 299)]
    )
    @pytest.mark.parametrize("column", [0, 15])
    def test_one_wrong_bit_in_the_first_or_last_rows_is_found(
        self, make_op: MakeOp, m: int, row: int, column: int
    ) -> None:
        operands = self.operands(m)
        operands.d.view(torch.int32)[row, column] ^= 1
        fault = make_op(RecordingStock())._gemm._compare(operands, 0)
        assert fault == "differs from stock"

    def test_output_that_was_never_written_is_found(self, make_op: MakeOp) -> None:
        operands = self.operands(300)
        operands.d[200:].fill_(torch.nan)
        assert make_op(RecordingStock())._gemm._compare(operands, 0) == "differs from stock"

    def test_nan_equals_nan(self, make_op: MakeOp) -> None:
        operands = self.operands(5)
        operands.x_scale[2] = torch.nan
        operands.d[2] = torch.nan
        assert make_op(RecordingStock())._gemm._compare(operands, 0) is None

    def test_a_call_that_stock_declines_cannot_be_trusted(self, make_op: MakeOp) -> None:
        fault = make_op(RecordingStock(result=False))._gemm._compare(self.operands(5), 0)
        assert "declines" in (fault or "")

    def test_comparing_changes_none_of_the_tensors(self, make_op: MakeOp) -> None:
        operands = self.operands(300)
        tensors = (operands.a, operands.b, operands.x_scale, operands.w_scale, operands.d)
        before = [tensor.clone() for tensor in tensors]
        make_op(RecordingStock())._gemm._compare(operands, 0)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
