"""What a failure means, and the circuit breaker that keeps a failed operation on stock."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Failure = Literal["sticky", "memory", "caller", "other"]

# Code and text of the CUDA errors after which, says cuda.h, any further CUDA work in the process
# returns the same error, and of the two whose context is beyond use (214, 709). The driver and the
# runtime share both; the texts are those of cudaGetErrorString in CUDA 13.0, in lower case.
_STICKY = MappingProxyType(
    {
        214: "uncorrectable ecc error encountered",
        220: "uncorrectable nvlink error detected during the execution",
        226: "invalid access of peer gpu memory over nvlink or a hardware error",
        700: "an illegal memory access was encountered",
        702: "the launch timed out and was terminated",
        709: "context is destroyed",
        710: "device-side assert triggered",
        714: "hardware stack error",
        715: "an illegal instruction was encountered",
        716: "misaligned address",
        717: "operation not supported on global/shared address space",
        718: "invalid program counter",
        719: "unspecified launch failure",
        721: "tensor memory not completely freed",
        810: "the mps client has been terminated by the server",
        911: "an async error has occured in external entity outside of cuda",
    }
)
_STICKY_TEXTS = tuple(_STICKY.values())
_OUT_OF_MEMORY = 2
_OUT_OF_MEMORY_TEXTS = ("out of memory", "cublas_status_alloc_failed")

# What torch raises on behalf of a switch of the caller's: set_sync_debug_mode("error"), which the
# comparison of a first result meets, and use_deterministic_algorithms(True). And what Python 3.11
# does where another thread, which may well be Triton for the host, parses at the same time.
_PASSING = (
    "called a synchronizing cuda operation",
    "deterministic behavior was enabled",
    "ast constructor recursion depth mismatch",
)

# Causes that are followed; an error may be its own.
_LONGEST_CHAIN = 8

# How torch, torch around the driver API, and Triton introduce such a text. The same words without
# one of these may come from anywhere, an argument check for instance.
_MARKS = ("cuda error: ", "cuda driver error: ", "triton error [cuda]: ")


def classify(error: BaseException) -> Failure:
    """Say what a failure of ours means for the process.

    "sticky": the CUDA context is dead, so stock cannot help and the error belongs to the caller.
    "memory": this call did not fit; stock may, and so may our next call.
    "caller": what the caller set or did is in the way of this call and not of the next: a full
    stack, a switch of torch's, warnings that are errors, another thread that compiles.
    "other": our path is broken and stock is not.

    Triton raises an error of its own from what stopped its compiler: that counts.
    """
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if cause is None:
            break
        failure = _classify(cause)
        if failure != "other":
            return failure
        cause = cause.__cause__ or cause.__context__
    return "other"


def _classify(error: BaseException) -> Failure:
    if isinstance(error, (MemoryError, *_torch_errors("OutOfMemoryError"))):
        return "memory"
    if isinstance(error, _torch_errors("AcceleratorError")):
        code = getattr(error, "error_code", None)
        if code in _STICKY:
            return "sticky"
        if code == _OUT_OF_MEMORY:
            return "memory"
    if isinstance(error, (RecursionError, Warning)):
        return "caller"
    text = text_of(error).lower()
    if text.startswith(_PASSING):
        return "caller"
    for mark in _MARKS:
        _, found, cause = text.partition(mark)
        if found and cause.startswith(_STICKY_TEXTS):
            return "sticky"
        if found and cause.startswith(_OUT_OF_MEMORY_TEXTS):
            return "memory"
    return "other"


def text_of(error: BaseException) -> str:
    """What an error says; nothing where asking raises, as one of the caller's may."""
    try:
        return str(error)
    except Exception:
        return ""


def describe(error: BaseException) -> str:
    """The class and the first line of an error, for a reason or a log line."""
    lines = text_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _torch_errors(name: str) -> tuple[type[BaseException], ...]:
    """The exception class of that name, where torch is loaded and has it (2.8 brought some)."""
    found = getattr(sys.modules.get("torch"), name, None)
    return (found,) if isinstance(found, type) and issubclass(found, BaseException) else ()


@dataclass(frozen=True)
class OpenBreaker:
    """One operation that stays on stock on one device, and why."""

    operation: str
    device: str
    reason: str


class Breaker:
    """Which operations stay on stock on which devices; one per process, shared by all ops."""

    def __init__(self) -> None:
        # Without a lock: no step of a dict's own leaves room for another thread.
        self._open: dict[tuple[str, Hashable], OpenBreaker] = {}

    def reason(self, operation: str, device: Hashable) -> str | None:
        """Why the operation stays on stock there, or None; one look-up."""
        entry = self._open.get((operation, device))
        return None if entry is None else entry.reason

    def open(self, operation: str, device: Hashable, reason: str) -> bool:
        """Keep the operation on stock there. True for the call that opened it: the first reason
        stands, and its caller is the one to log it."""
        mine = OpenBreaker(operation, str(device), reason)
        return self._open.setdefault((operation, device), mine) is mine

    def snapshot(self) -> tuple[OpenBreaker, ...]:
        """Everything that is open, in the order of opening."""
        return tuple(self._open.copy().values())
