"""The first use of a kernel in a process: run it where that is allowed, and compare the result."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ck_patch.forks import ForkSafe
from ck_patch.ops import capture_mode


class _Triton(ForkSafe):
    """Whose compiler and interpreter are for one thread at a time."""

    def _start(self) -> None:
        # Six threads that compiled at once got "AST constructor recursion depth mismatch" out of
        # Python 3.11.7, once in 150 kernels. What a kernel is compared with may compile as well.
        self.alone = threading.RLock()


_triton = _Triton()


class FirstUse(ForkSafe):
    """Proves the kernels of one op, on each device one at a time."""

    def _start(self) -> None:
        self._locks: dict[int, threading.Lock] = {}

    def possible(self, device: int) -> bool:
        """Whether `prove` would run now, as far as that can be told beforehand."""
        if device < 0:
            return True
        return not (self._of(device).locked() or torch.cuda.is_current_stream_capturing())

    def prove(
        self, device: int, stream: int, run: Callable[[], None], fault: Callable[[], str | None]
    ) -> tuple[bool, str | None]:
        """Call `run` and then `fault` on that raw stream; whether it did, and what `fault` found.

        It does not under graph capture, which forbids to compile, to load a module and to compare,
        nor while another thread proves a kernel: stock is quicker than to wait for it, and waiting
        might never end where the other comparison needs what this thread is to launch. For the
        interpreter (device -1) there is nothing to prove: stock refuses CPU tensors.
        """
        if device < 0:
            with _triton.alone:
                run()
            return True, None
        lock = self._of(device)
        if not lock.acquire(blocking=False):
            return False, None
        try:
            with torch.cuda.stream(stream_of(stream, device)):
                if torch.cuda.is_current_stream_capturing():
                    return False, None
                if not _triton.alone.acquire(blocking=False):
                    return False, None
                try:
                    with capture_mode.relaxed():  # Another thread may capture.
                        run()
                        return True, fault()
                finally:
                    _triton.alone.release()
        finally:
            lock.release()

    def _of(self, device: int) -> threading.Lock:
        return self._locks.setdefault(device, threading.Lock())


def stream_of(pointer: int, device: int) -> torch.cuda.Stream:
    """The stream behind a raw pointer."""
    # ExternalStream(0) would be a new stream out of torch's pool.
    if pointer == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device)
