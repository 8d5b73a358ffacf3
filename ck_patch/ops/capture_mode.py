"""Calls that CUDA forbids while any thread captures a graph, made harmless for the graph."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def relaxed() -> Iterator[bool]:
    """Let this thread ask for events, load modules and wait for its own stream while another one
    captures a graph.

    torch captures in global mode unless told otherwise, under which such a call of any thread
    fails and spoils the graph. CUDA's own answer is a mode per thread:
    cuThreadExchangeStreamCaptureMode in the driver API. Gives False where that is not to be had.
    """
    exchange = _exchange()
    if exchange is None:
        yield False
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(library).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
