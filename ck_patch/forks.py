"""Locks in forked processes, where they would be held for ever by threads that are not there."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager


class ForkSafe:
    """Base of what has locks: a forked child gets new ones that nobody holds.

    The thread that forked may be inside an old one, and leaves it as it came: `with self._lock`
    looks the attribute up once.
    """

    def __init__(self) -> None:
        self._start()
        _living.add(self)

    def _start(self) -> None:
        """Make the locks, and set what a child must not have of its parent's."""
        self._lock: AbstractContextManager[bool] = threading.Lock()


_living: weakref.WeakSet[ForkSafe] = weakref.WeakSet()


def _start_in_child() -> None:
    for one in list(_living):
        one._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_in_child)
