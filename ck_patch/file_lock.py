"""A lock between processes, which the operating system releases when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PAUSE = 0.01

# Descriptors of lock files that are open in this process. A forked child inherits them, and would
# keep a lock alive after its parent was killed.
_open: set[int] = set()


@contextlib.contextmanager
def held(path: Path, wait: float) -> Iterator[bool]:
    """Hold the lock of that file, which is made and stays; gives False if another process, or
    another thread of this one, had it for `wait` seconds.

    On a file system that has no locks it gives True. Raises OSError if there can be no such file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    _open.add(descriptor)
    got = False
    try:
        got = _acquire(descriptor, time.monotonic() + wait)
        yield got
    finally:
        if descriptor in _open:
            _open.discard(descriptor)
            if got:
                # Closing is not enough while a child that was forked meanwhile has it open too.
                with contextlib.suppress(OSError):
                    _unlock(descriptor)
            os.close(descriptor)


def _acquire(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            _lock(descriptor)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _unlock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _close_inherited() -> None:
        for descriptor in _open:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        _open.clear()

    os.register_at_fork(after_in_child=_close_inherited)
