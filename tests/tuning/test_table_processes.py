"""Tables in real processes: many at once, killed at the worst moments, forked, and ending."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ck_patch.table import Table
from tests.tuning.examples import HERE, KEY, STOCK, document, finish, start

PRELUDE = f"""
import os, sys, threading, time
from pathlib import Path
from ck_patch import file_lock, files, table
from ck_patch.table import Entry, Table
HERE = {HERE!r}
STOCK = {STOCK!r}
known = Table(Path(sys.argv[1]), HERE)
"""
WRITER = f"""{PRELUDE}
known.get("")
print("ready", flush=True)
sys.stdin.readline()
for number in range(5):
    known.put(f"{{sys.argv[2]}} {{number}}", STOCK)
    known.save()
"""
# Each stops where a writer can be killed: the new file is written but not in place; the lock is
# held and nothing was done; and half of the new file is written.
STOP = """
def stop(*arguments):
    print("stopped", flush=True)
    sys.stdin.read()
"""
BEFORE_REPLACE = f"{STOP}os.replace = stop"
HOLDING_THE_LOCK = f"{STOP}files.remove_abandoned = stop"
HALF_WRITTEN = f"""{STOP}
class Half:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        stop()
real = Path.open
Path.open = lambda path, mode: Half(real(path, mode)) if mode == "xb" else real(path, mode)
"""


@pytest.mark.parametrize(
    ("moment", "left"),
    [(BEFORE_REPLACE, 1), (HALF_WRITTEN, 1), (HOLDING_THE_LOCK, 0)],
    ids=["before the replacement", "half written", "holding the lock"],
)
def test_eight_processes_of_which_one_is_killed_lose_nothing_that_was_saved(
    path: Path, moment: str, left: int
) -> None:
    before = Table(path, HERE)
    before.put(KEY, STOCK)
    assert before.save()
    victim = start(f"{PRELUDE}{moment}\nknown.put('victim', STOCK)\nknown.save()", path)
    writers = [start(WRITER, path, number) for number in range(7)]
    for process in writers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert victim.stdout is not None
    assert victim.stdout.readline() == "stopped\n"
    # All of them wait for the victim's lock now, and get it because the victim is dead.
    for process in writers:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        writers[0].wait(0.3)
    victim.kill()
    victim.communicate()
    for process in writers:
        finish(process)
    expected = {KEY, *(f"{number} {entry}" for number in range(7) for entry in range(5))}
    assert set(Table(path, HERE).entries()) == expected
    assert set(document(path)["entries"]) == expected
    parts = list(path.parent.glob("*.tmp"))
    assert len(parts) == left
    for part in parts:
        os.utime(part, (0, 0))
    before.put("later", STOCK)
    assert before.save()
    assert list(path.parent.glob("*.tmp")) == []


def test_what_was_put_is_saved_when_the_interpreter_ends(path: Path) -> None:
    assert finish(start(f"{PRELUDE}known.put('a', STOCK)", path)) == ""
    finish(start(f"{PRELUDE}known.put('b', STOCK)\nsys.exit(0)", path))
    failed = start(f"{PRELUDE}known.put('c', STOCK)\n1 / 0", path)
    assert "ZeroDivisionError" in failed.communicate(timeout=60)[1]
    assert set(Table(path, HERE).entries()) == {"a", "b", "c"}


def test_an_end_during_a_save_waits_for_it(path: Path) -> None:
    script = f"""{PRELUDE}
table._DELAY = 0.0
real, begun = os.fsync, threading.Event()
def slow(descriptor):
    begun.set()
    time.sleep(0.5)
    real(descriptor)
os.fsync = slow
known.put("a", STOCK)
begun.wait()
known.put("b", STOCK)
"""
    finish(start(script, path))
    assert set(Table(path, HERE).entries()) == {"a", "b"}
    assert list(path.parent.glob("*.tmp")) == []


def test_an_end_does_not_wait_for_a_save_that_hangs(path: Path) -> None:
    script = f"""{PRELUDE}
table._DELAY = 0.0
table._WAIT = 0.2
begun = threading.Event()
def hang(descriptor):
    begun.set()
    time.sleep(3600)
os.fsync = hang
known.put("a", STOCK)
begun.wait()
"""
    finish(start(script, path))


def test_what_is_put_after_the_end_began_harms_nothing(path: Path) -> None:
    script = f"""{PRELUDE}
import atexit
class Late:
    def __del__(self):
        known.put("late", STOCK)
        known.save()
late = Late()
sys.modules["kept"] = late
known.put("a", STOCK)
atexit.register(known.put, "b", STOCK)
"""
    finish(start(script, path))
    assert set(Table(path, HERE).entries()) >= {"a", "b"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_knows_all_and_saves_only_its_own(path: Path) -> None:
    # Every lock is held, by another thread, at the moment of the fork.
    script = f"""{PRELUDE}
import warnings
warnings.simplefilter("ignore")
def there():
    return set(Table(Path(sys.argv[1]), HERE).entries())
known.put("parent", STOCK)
known.save()
known.put("unsaved", STOCK)
inside, over = threading.Event(), threading.Event()
def hold():
    lock = Path(sys.argv[1]).with_name("tuned.lock")
    with known._saving, known._lock, file_lock.held(lock, 0.0):
        inside.set()
        over.wait()
holder = threading.Thread(target=hold)
holder.start()
inside.wait()
child = os.fork()
if child == 0:
    assert known.get("parent") == known.get("unsaved") == STOCK
    assert known.save()
    assert there() == {{"parent"}}
    known.put("child", STOCK)
    assert known._timer.is_alive()
    sys.exit(0)
time.sleep(0.2)
over.set()
holder.join()
assert os.waitpid(child, 0)[1] == 0
assert "child" in there()
assert set(known._unsaved) == {{"unsaved"}}
"""
    finish(start(script, path))
    assert set(Table(path, HERE).entries()) == {"parent", "child", "unsaved"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_that_puts_nothing_writes_nothing_for_its_parent(path: Path) -> None:
    script = f"""{PRELUDE}
import warnings
warnings.simplefilter("ignore")
known.put("parent", STOCK)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not os.path.exists(sys.argv[1])
"""
    finish(start(script, path))
    assert set(Table(path, HERE).entries()) == {"parent"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a user id without a home")
def test_a_process_without_a_home_keeps_its_table_in_memory() -> None:
    script = f"""
import os
for name in ("HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
import pwd
def nobody(uid): raise KeyError(uid)
pwd.getpwuid = nobody
from ck_patch import cache_dir
from ck_patch.table import Entry, Table
assert cache_dir.folder(None) is None
known = Table(cache_dir.folder(None), {HERE!r})
known.put({KEY!r}, {STOCK!r})
assert known.get({KEY!r}) == {STOCK!r}
"""
    finish(start(script))


def test_neither_torch_nor_triton_is_imported_for_a_table(path: Path) -> None:
    script = f"""{PRELUDE}
from ck_patch import cache_dir, environment
known.put({KEY!r}, STOCK)
known.save()
print(sorted({{"torch", "triton", "comfy_kitchen", "rich"}} & set(sys.modules)))
"""
    assert finish(start(script, path)) == "[]\n"
