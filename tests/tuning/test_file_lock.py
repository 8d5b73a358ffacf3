"""One process or thread at a time, no longer than it lives, and no waiting without end."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from ck_patch import file_lock
from tests.tuning.examples import finish, start

HOLDER = """
import sys
from pathlib import Path
from ck_patch import file_lock
with file_lock.held(Path(sys.argv[1]), 0.0) as got:
    print(got, flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_waits_and_then_goes_without(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with file_lock.held(lock, 0.0) as first:
        began = time.monotonic()
        with file_lock.held(lock, 0.1) as second:
            assert (first, second) == (True, False)
            assert 0.1 <= time.monotonic() - began < 5
        # That the second one ended took nothing from the first.
        with file_lock.held(lock, 0.0) as third:
            assert not third
    with file_lock.held(lock, 0.0) as last:
        assert last
    assert not file_lock._open


def test_another_thread_gets_it_as_soon_as_it_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(5):
            with file_lock.held(lock, 30.0) as got:
                assert got
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.001)
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 20


def test_a_killed_process_holds_it_no_more(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with start(HOLDER, lock) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with file_lock.held(lock, 0.0) as got:
            assert not got
        holder.kill()
        holder.wait()
        with file_lock.held(lock, 5.0) as got:
            assert got


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_meanwhile_does_not_keep_it(tmp_path: Path) -> None:
    script = """
import os, sys, threading, warnings
from pathlib import Path
from ck_patch import file_lock
warnings.simplefilter("ignore")
lock = Path(sys.argv[1])
inside, never = threading.Event(), threading.Event()
def hold():
    with file_lock.held(lock, 0.0):
        inside.set()
        never.wait()
threading.Thread(target=hold, daemon=True).start()
inside.wait()
if os.fork() == 0:
    with file_lock.held(lock, 0.0) as got:
        print(got, flush=True)
    sys.stdin.read()
    with file_lock.held(lock, 5.0) as got:
        print(got, flush=True)
    os._exit(0)
never.wait()
"""
    # The child has no part in its parent's lock, and gets it when the parent is killed.
    with start(script, tmp_path / "lock") as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "False\n"
        parent.kill()
        assert parent.wait(30) < 0
        parent.stdin.close()
        assert parent.stdout.readline() == "True\n"


def test_a_file_system_without_locks_does_not_stop_anyone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock, "_lock", refuse)
    with file_lock.held(tmp_path / "lock", 0.0) as got:
        assert got


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), file_lock.held(tmp_path / "none" / "lock", 0.0):
        pass
    assert not file_lock._open


def test_what_fails_inside_releases_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), file_lock.held(tmp_path / "lock", 0.0):
        raise KeyError
    assert finish(start(HOLDER, tmp_path / "lock")) == "True\n"
