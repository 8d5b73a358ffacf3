"""The tuning table: what was measured in this environment, kept from one process to the next."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from pathlib import Path

from ck_patch import cache_dir, file_lock, files, log, table_file
from ck_patch.device import DeviceProfile
from ck_patch.environment import Environment, differences, environment, table_name
from ck_patch.forks import ForkSafe
from ck_patch.table_file import Entry

__all__ = ["Entry", "Table", "for_device"]

# Long enough to gather what one pass through a model measures.
_DELAY = 5.0
_WAIT = 2.0
_LOCK_FILE = "tuned.lock"
_HOMELESS = "there is no home directory"


def for_device(profile: DeviceProfile, configured: str | None) -> Table:
    """The table of a device in this environment; `configured` is CK_PATCH_CACHE_DIR."""
    here = environment(profile)
    folder = cache_dir.folder(configured)
    return Table(folder and folder / table_name(here), here)


class Table(ForkSafe):
    """Entries by key, in memory and in one file, which many processes may share.

    The file is read at the first use. What is put is saved some seconds later by a thread of its
    own, and when the interpreter ends. Nothing about the file is ever an error: what cannot be
    read is not there, and what cannot be saved is said once and stays in memory, as all does where
    `path` is None. Safe in many threads and across fork: a child starts with what was known and
    with nothing to save.
    """

    def __init__(self, path: Path | None, environment: Environment) -> None:
        super().__init__()
        self.path = path
        """The file, which need not exist."""
        self._environment = dict(environment)
        self._entries: dict[str, Entry] | None = None
        self._fault: str | None = None
        _tables.add(self)

    def _start(self) -> None:
        super()._start()  # The lock of the other three; never held while a file is written.
        self._unsaved: dict[str, Entry] = {}
        self._timer: threading.Timer | None = None
        self._saving = threading.Lock()

    def get(self, key: str) -> Entry | None:
        """The entry of that key."""
        entries = self._entries
        if entries is None:
            with self._lock:
                entries = self._loaded()
        return entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Keep an entry, in the place of the one before; but one of a render never replaces one of
        a sweep."""
        with self._lock:
            entries = self._loaded()
            known = entries.get(key)
            if known == entry or not table_file.displaces(entry, known):
                return
            entries[key] = entry
            self._unsaved[key] = entry
            self._schedule()

    def entries(self) -> dict[str, Entry]:
        """All entries by key."""
        with self._lock:
            return dict(self._loaded())

    def unreadable(self) -> str | None:
        """Why nothing of the file is used, where there is one: "is of another environment"."""
        with self._lock:
            self._loaded()
            return self._fault

    def unwritable(self) -> str | None:
        """Why nothing could be saved now, as far as can be told; nothing is left behind."""
        if self.path is None:
            return _HOMELESS
        path = Path(os.path.realpath(self.path))
        obstacle = table_file.read(path, self._environment).obstacle
        if obstacle is not None:
            return f"{path} {obstacle}"
        place = path
        try:
            # Of a drive that is not there, no folder exists.
            place = next(filter(Path.exists, path.parents), path.parent)
            files.check_replace(place / path.name)
            place = path.with_name(_LOCK_FILE)
            if place.exists():
                with file_lock.held(place, _WAIT) as alone:
                    return None if alone else _held(place)
        except OSError as error:
            return f"{place} cannot be written ({files.reason(error)})"
        return None

    def save(self, last: bool = False) -> bool:
        """Write what was put, together with what other processes have written meanwhile, which is
        then known here too. Returns whether all is saved; waits some seconds at most, and says so
        if that was the `last` try."""
        if not self._unsaved:
            return True
        saving = self._saving
        if self.path is None or not saving.acquire(timeout=_WAIT):
            return False
        try:
            return self._save(Path(os.path.realpath(self.path)), last)  # A link stays one.
        except OSError as error:
            _complain(self.unwritable() or str(error))
            return False
        except Exception as error:
            _complain(str(error) or type(error).__name__)
            return False
        finally:
            saving.release()

    def export(self, path: Path) -> int:
        """Write all entries to a file for machines of the same kind and return their number;
        raises OSError."""
        entries = self.entries()
        files.write(path, table_file.render(self._environment, entries))
        return len(entries)

    def import_(self, path: Path) -> tuple[int, int]:
        """Put the entries that `export` wrote, on this machine or one of the same kind, and return
        how many of them count here, and how many there are: a sweep here stays, and a choice may
        name no candidate. Raises OSError, and ValueError that says why none of them is taken."""
        try:
            theirs, entries = table_file.parse(table_file.read_bytes(path))
        except ValueError as error:
            raise ValueError(f"{path} holds no table that can be read: {error}") from None
        different = differences(self._environment, theirs)
        if different:
            raise ValueError(f"{path} is of another kind of machine: {'; '.join(different)}")
        choices = {key: e for key, e in entries.items() if table_file.names_candidate(e)}
        for key, entry in choices.items():
            self.put(key, entry)
        here = self.entries()
        return sum(here[key] == entry for key, entry in choices.items()), len(entries)

    def _loaded(self) -> dict[str, Entry]:
        if self._entries is None:
            self._entries = {}
            if self.path is not None:
                found = table_file.read(self.path, self._environment)
                self._entries, self._fault = found.entries, found.obstacle or found.fault
        return self._entries

    def _schedule(self) -> None:
        if self.path is None:
            _complain(_HOMELESS)
        elif self._timer is None and not sys.is_finalizing():
            timer = threading.Timer(_DELAY, self._save_now)
            timer.name = "ck_patch table"
            timer.daemon = True
            # At the limit of threads, and when the interpreter ends, none starts.
            with contextlib.suppress(RuntimeError):
                timer.start()
                self._timer = timer

    def _save_now(self) -> None:
        with self._lock:
            self._timer = None
        self.save()

    def _save(self, path: Path, last: bool) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(_LOCK_FILE)
        with file_lock.held(lock, _WAIT) as alone:
            if not alone:
                if last:
                    _complain(_held(lock))
                return False
            files.remove_abandoned(path.parent, "tuned-*.json")
            found = table_file.read(path, self._environment)
            if found.obstacle is not None:
                _complain(f"{path} {found.obstacle}")
                return False
            with self._lock:
                unsaved = dict(self._unsaved)
                known = table_file.merged(self._loaded(), found.entries)
            entries = table_file.merged(known, unsaved)
            content = table_file.render(self._environment, entries)
            if len(content) > table_file.LARGEST:
                _complain(f"{path} is full, and is begun anew where it is removed")
                unsaved = table_file.fitting(self._environment, found.entries, unsaved)
                if not unsaved:
                    return False
                fitting = table_file.merged(found.entries, unsaved)
                content = table_file.render(self._environment, fitting)
            files.replace(path, content)
        with self._lock:
            for key, entry in unsaved.items():
                if self._unsaved.get(key) is entry:
                    del self._unsaved[key]
            self._entries = table_file.merged(entries, self._unsaved)
            self._fault = None
            if self._unsaved:
                return False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return True


def _held(lock: Path) -> str:
    return f"another process holds {lock}"


def _complain(reason: str) -> None:
    log.once(
        "tuning table",
        f"what is tuned is forgotten when the process ends: {reason}; CK_PATCH_CACHE_DIR can name "
        "another folder",
    )


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


@atexit.register
def _save_all() -> None:
    for table in list(_tables):
        table.save(last=True)
