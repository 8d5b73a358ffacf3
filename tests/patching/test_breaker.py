"""What each kind of failure means, on the texts that torch and Triton really produce."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest

from ck_patch.breaker import Breaker, OpenBreaker, classify, describe

TORCH_TAIL = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
# cudaGetErrorString of CUDA 13.0.
STICKY = [
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "an illegal memory access was encountered",
    "the launch timed out and was terminated",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "tensor memory not completely freed",
    "the MPS client has been terminated by the server",
    "an async error has occured in external entity outside of CUDA",
]
NOT_STICKY = [
    "invalid argument",
    "invalid configuration argument",
    "no kernel image is available for execution on the device",
    "too many resources requested for launch",
    "device kernel image is invalid",
    "invalid device function",
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`",
    "unknown error",
]


@pytest.mark.parametrize("cause", STICKY)
@pytest.mark.parametrize(
    "text",
    ["CUDA error: {}" + TORCH_TAIL, "CUDA driver error: {}", "Triton Error [CUDA]: {}"],
)
def test_an_error_that_kills_the_context_is_sticky(text: str, cause: str) -> None:
    assert classify(RuntimeError(text.format(cause))) == "sticky"


@pytest.mark.parametrize("cause", NOT_STICKY)
@pytest.mark.parametrize("text", ["CUDA error: {}" + TORCH_TAIL, "Triton Error [CUDA]: {}"])
def test_another_cuda_error_is_not_sticky(text: str, cause: str) -> None:
    assert classify(RuntimeError(text.format(cause))) == "other"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA error: out of memory" + TORCH_TAIL),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_out_of_memory_is_told_from_a_broken_path(error: Exception) -> None:
    assert classify(error) == "memory"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("expected a to have no misaligned address"),
        RuntimeError(
            "out of resource: shared memory, Required: 131072, Hardware limit: 101376. "
            "Reducing block sizes or `num_stages` may help."
        ),
        RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable or set "
            "triton.knobs.build.impl."
        ),
        RuntimeError("Triton Error [HIP]: an illegal memory access was encountered"),
        RuntimeError("PassManager::run failed"),
        PermissionError(13, "Permission denied", "/.triton"),
        SystemError("PY_SSIZE_T_CLEAN macro must be defined for '#' formats"),
        ImportError("DLL load failed while importing cuda_utils"),
        AssertionError("mismatch"),
        RuntimeError(),
    ],
)
def test_anything_else_is_a_broken_path(error: Exception) -> None:
    assert classify(error) == "other"


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("maximum recursion depth exceeded"),
        DeprecationWarning("ast.Num is deprecated"),
        RuntimeError("called a synchronizing CUDA operation"),
        SystemError("AST constructor recursion depth mismatch (before=30, after=75)"),
        RuntimeError(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms"
            "(True)` or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not"
        ),
    ],
)
def test_what_the_caller_set_or_did_is_told_from_a_broken_path(error: Exception) -> None:
    assert classify(error) == "caller"


class Mute(Exception):
    """One of a caller's that cannot even be read."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("cause", "meaning"),
    [
        (RecursionError("maximum recursion depth exceeded"), "caller"),
        (DeprecationWarning("ast.Num is deprecated"), "caller"),
        (MemoryError(), "memory"),
        (RuntimeError("CUDA error: misaligned address"), "sticky"),
        (ValueError("no"), "other"),
    ],
)
@pytest.mark.parametrize("stated", [True, False])
def test_what_stopped_a_compiler_counts_and_not_the_error_that_it_makes_of_that(
    cause: Exception, meaning: str, stated: bool
) -> None:
    outer = RuntimeError("at 12:4: cannot compile")
    middle = RuntimeError("at 3:8: in a function that is called there")
    outer.__cause__ = middle
    if stated:
        middle.__cause__ = cause
    else:
        middle.__context__ = cause
    assert classify(outer) == meaning


def test_an_error_that_is_its_own_cause_is_classified() -> None:
    error = ValueError("no")
    error.__cause__ = error
    assert classify(error) == "other"


def test_an_error_is_described_by_its_class_and_first_line() -> None:
    assert describe(OSError("one\ntwo")) == "OSError: one"
    assert describe(RuntimeError()) == "RuntimeError"


def test_an_error_that_cannot_be_read_is_classified_and_described_all_the_same() -> None:
    assert classify(Mute()) == "other"
    assert describe(Mute()) == "Mute"


@pytest.fixture
def torch_errors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A torch with the exception classes of 2.8 and later."""
    torch: Any = ModuleType("torch")
    torch.AcceleratorError = type("AcceleratorError", (RuntimeError,), {"error_code": None})
    torch.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(700, "sticky"), (719, "sticky"), (911, "sticky"), (2, "memory"), (209, "other")],
)
def test_the_code_of_an_accelerator_error_decides(
    torch_errors: Any, code: int, meaning: str
) -> None:
    error = torch_errors.AcceleratorError("a text in another language")
    error.error_code = code
    assert classify(error) == meaning


def test_an_accelerator_error_without_a_code_is_read_by_its_text(torch_errors: Any) -> None:
    error = torch_errors.AcceleratorError("CUDA error: device-side assert triggered" + TORCH_TAIL)
    assert classify(error) == "sticky"


def test_a_code_means_nothing_on_an_error_of_another_library(torch_errors: Any) -> None:
    error = RuntimeError("HTTP")
    error.error_code = 700  # type: ignore[attr-defined]
    assert classify(error) == "other"


def test_the_out_of_memory_error_of_torch_is_memory(torch_errors: Any) -> None:
    error = torch_errors.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.01 GiB.")
    assert classify(error) == "memory"


def test_errors_are_classified_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert classify(RuntimeError("CUDA error: misaligned address")) == "sticky"
    assert classify(ValueError("no")) == "other"


def test_the_real_classes_of_torch_are_recognised() -> None:
    torch = pytest.importorskip("torch")
    assert classify(torch.OutOfMemoryError("CUDA out of memory.")) == "memory"
    if hasattr(torch, "AcceleratorError"):
        error = torch.AcceleratorError("CUDA error: unspecified launch failure" + TORCH_TAIL)
        assert classify(error) == "sticky"


def test_a_breaker_is_per_operation_and_device_and_keeps_the_first_reason() -> None:
    breaker = Breaker()
    assert breaker.reason("gemm", 0) is None
    assert breaker.open("gemm", 0, "first")
    assert not breaker.open("gemm", 0, "second")
    assert breaker.reason("gemm", 0) == "first"
    assert breaker.reason("gemm", 1) is None
    assert breaker.reason("quantize", 0) is None
    assert breaker.snapshot() == (OpenBreaker("gemm", "0", "first"),)


def test_of_many_threads_one_opens_a_breaker() -> None:
    breaker = Breaker()
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda i: breaker.open("gemm", i % 4, str(i)), range(400)))
    assert sum(opened) == 4
    assert len(breaker.snapshot()) == 4
    for entry in breaker.snapshot():
        assert opened[int(entry.reason)]
