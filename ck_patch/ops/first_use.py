"""The first use of a kernel in a process: run it where that is allowed, and compare the result."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ck_patch.ops import capture_mode


class FirstUse:
    """Proves the kernels of one op, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def possible(self, device: int) -> bool:
        """Whether `prove` would run now, as far as that can be told beforehand."""
        if device < 0:
            return True
        return not (self._lock.locked() or torch.cuda.is_current_stream_capturing())

    def prove(
        self, device: int, stream: int, run: Callable[[], None], fault: Callable[[], str | None]
    ) -> tuple[bool, str | None]:
        """Call `run` and then `fault` on that raw stream; whether it did, and what `fault` found.

        It does not under graph capture, which forbids to compile, to load a module and to compare,
        nor while another thread proves a kernel: stock is quicker than to wait for it. For the
        interpreter (device -1) there is nothing to prove: stock refuses CPU tensors.
        """
        if device < 0:
            with self._lock:  # The interpreter is not made for threads.
                run()
            return True, None
        if not self._lock.acquire(blocking=False):
            return False, None
        try:
            with torch.cuda.stream(stream_of(stream, device)):
                if torch.cuda.is_current_stream_capturing():
                    return False, None
                with capture_mode.relaxed():  # Another thread may capture.
                    run()
                    return True, fault()
        finally:
            self._lock.release()


def stream_of(pointer: int, device: int) -> torch.cuda.Stream:
    """The stream behind a raw pointer."""
    # ExternalStream(0) would be a new stream out of torch's pool.
    if pointer == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device)
