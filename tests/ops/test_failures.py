"""What keeps an operation on stock for good, and what is of one call."""

from __future__ import annotations

import logging

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.ops.failures import Failures, hand_over
from tests.patching.test_breaker import Mute

DEVICE = 0
FOR_GOOD = [
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    TypeError("run() got an unexpected keyword argument"),
    OSError(28, "No space left on device"),
    Mute(),
]
OF_ONE_CALL = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory."),
    RecursionError("maximum recursion depth exceeded"),
    UserWarning("a warning that is an error"),
    RuntimeError("called a synchronizing CUDA operation"),
]


@pytest.fixture
def breaker() -> Breaker:
    return Breaker()


@pytest.mark.parametrize("error", FOR_GOOD, ids=lambda error: type(error).__name__)
def test_a_fault_of_ours_keeps_the_operation_on_stock(breaker: Breaker, error: Exception) -> None:
    failures = Failures("op", breaker)
    assert failures.account(error, DEVICE)
    reason = failures.reason(DEVICE)
    assert reason is not None
    assert reason.startswith(type(error).__name__)
    assert failures.reason(1) is None


@pytest.mark.parametrize("error", OF_ONE_CALL, ids=lambda error: type(error).__name__)
def test_what_the_next_call_may_be_spared_is_said_once_and_forgotten(
    breaker: Breaker, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    caplog.set_level(logging.INFO, "ck_patch")
    failures = Failures("op", breaker)
    for _ in range(2):
        assert not failures.account(error, DEVICE)
    assert breaker.snapshot() == ()
    (line,) = caplog.messages
    assert line.startswith("op: ")
    assert line.endswith("this call goes to stock")


def test_what_the_caller_set_for_good_is_tried_sixteen_times(breaker: Breaker) -> None:
    failures = Failures("op", breaker)
    error = DeprecationWarning("ast.Num is deprecated")
    assert not any(failures.account(error, DEVICE) for _ in range(15))
    assert not failures.account(error, 1)
    assert failures.account(error, DEVICE)
    assert failures.reason(DEVICE) == "DeprecationWarning: ast.Num is deprecated, 16 times"
    assert failures.reason(1) is None


def test_memory_may_be_short_any_number_of_times(breaker: Breaker) -> None:
    failures = Failures("op", breaker)
    assert not any(failures.account(MemoryError(), DEVICE) for _ in range(100))


def test_an_error_of_the_callers_that_cannot_be_read_is_handed_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ck_patch")
    hand_over("op", Mute())
    assert caplog.messages == ["op: Mute, such calls go to stock ()"]
