"""A table in one process: what it gives, when it reads and writes, and that it never fails."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ck_patch import cache_dir, file_lock, table, table_file
from ck_patch.device import KNOWN
from ck_patch.environment import FORMAT, table_name
from ck_patch.table import Entry, Table, for_device
from tests.tuning.examples import HERE, KEY, OTHER, OURS, STOCK, SWEPT, document, item, written

FORGOTTEN = "what is tuned is forgotten when the process ends: "


def saved(path: Path, entries: dict[str, Entry] | None = None) -> Path:
    """A table that another process saved before."""
    other = Table(path, HERE)
    for key, entry in (entries or {KEY: STOCK}).items():
        other.put(key, entry)
    assert other.save()
    return path


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_what_one_process_saved_the_next_one_knows(path: Path) -> None:
    first = Table(path, HERE)
    assert first.get(KEY) is None
    first.put(KEY, STOCK)
    first.put(OTHER, SWEPT)
    assert first.get(KEY) == STOCK
    assert not path.exists()
    assert first.save()
    second = Table(path, HERE)
    assert second.get(OTHER) == SWEPT
    assert second.entries() == {KEY: STOCK, OTHER: SWEPT}
    assert names(path.parent) == [path.name, "tuned.lock"]
    assert document(path)["environment"] == HERE


def test_the_file_is_read_once_and_at_the_first_use(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    known = Table(path, HERE)
    saved(path)
    assert known.get(KEY) == STOCK
    monkeypatch.setattr(table_file, "read", None)
    assert known.get(KEY) == STOCK
    assert known.get(OTHER) is None
    assert known.entries() == {KEY: STOCK}


def test_nothing_is_written_where_nothing_is_new(path: Path) -> None:
    saved(path)
    before = path.stat()
    known = Table(path, HERE)
    known.put(KEY, Entry(STOCK.choice, STOCK.m, dict(STOCK.us), STOCK.source))
    assert known._timer is None
    assert known.save()
    assert path.stat().st_ino == before.st_ino
    empty = Table(path.with_name("none") / path.name, HERE)
    assert empty.get(KEY) is None
    assert empty.save()
    assert not path.with_name("none").exists()


def test_two_tables_lose_nothing_of_each_other(path: Path) -> None:
    first, second = Table(path, HERE), Table(path, HERE)
    assert first.entries() == second.entries() == {}
    first.put(KEY, STOCK)
    assert first.save()
    second.put(OTHER, OURS)
    assert second.save()
    assert second.get(KEY) == STOCK
    assert Table(path, HERE).entries() == {KEY: STOCK, OTHER: OURS}


@pytest.mark.parametrize(
    ("theirs", "ours", "stays"),
    [
        (STOCK, OURS, OURS),
        (SWEPT, OURS, SWEPT),
        (STOCK, SWEPT, SWEPT),
        (Entry("cfg1", 4096, {}, "sweep"), SWEPT, SWEPT),
    ],
)
def test_of_two_entries_for_one_key_a_sweep_stays_else_ours(
    path: Path, theirs: Entry, ours: Entry, stays: Entry
) -> None:
    known = Table(path, HERE)
    known.put(KEY, ours)
    saved(path, {KEY: theirs})
    assert known.save()
    assert known.get(KEY) == Table(path, HERE).get(KEY) == stays


def test_what_was_read_long_ago_gives_way_to_what_others_wrote_since(path: Path) -> None:
    known = Table(saved(path), HERE)
    assert known.get(KEY) == STOCK
    saved(path, {KEY: OURS})
    known.put(OTHER, STOCK)
    assert known.save()
    assert known.get(KEY) == Table(path, HERE).get(KEY) == OURS


def test_in_memory_too_a_render_does_not_replace_a_sweep(path: Path) -> None:
    known = Table(saved(path, {KEY: SWEPT}), HERE)
    known.put(KEY, OURS)
    assert known.get(KEY) == SWEPT
    newer = Entry("stock", 1, {}, "sweep")
    known.put(KEY, newer)
    assert known.get(KEY) == newer


def test_what_is_put_while_the_file_is_written_is_kept_for_the_next_save(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    known = Table(path, HERE)
    known.put(KEY, STOCK)
    real = os.replace

    def put_meanwhile(*arguments: Any) -> None:
        known.put(KEY, OURS)
        known.put(OTHER, STOCK)
        real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", put_meanwhile)
        assert not known.save()
    assert known.entries() == {KEY: OURS, OTHER: STOCK}
    assert Table(path, HERE).entries() == {KEY: STOCK}
    assert known.save()
    assert Table(path, HERE).entries() == {KEY: OURS, OTHER: STOCK}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 200_000,
        bytes(2**20),
        written({KEY: item()})[:-9].encode(),
    ],
    ids=["empty", "list", "not UTF-8", "deep", "zeros", "truncated"],
)
def test_a_corrupt_file_is_a_miss_and_is_replaced(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    known = Table(path, HERE)
    assert known.get(KEY) is None
    known.put(KEY, STOCK)
    assert known.save()
    assert Table(path, HERE).entries() == {KEY: STOCK}
    assert caplog.messages == []


def test_of_a_damaged_file_the_good_entries_are_used_and_kept(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(written({KEY: item(), "bad": item(m="x")}), encoding="utf-8")
    known = Table(path, HERE)
    known.put(OTHER, STOCK)
    assert known.save()
    assert list(document(path)["entries"]) == [OTHER, KEY]


def test_a_file_corrupted_meanwhile_costs_nothing_that_is_known(path: Path) -> None:
    known = Table(saved(path), HERE)
    assert known.get(KEY) == STOCK
    path.write_bytes(b"\0" * 100)
    known.put(OTHER, OURS)
    assert known.save()
    assert Table(path, HERE).entries() == {KEY: STOCK, OTHER: OURS}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"format": FORMAT + 1}, "was written by a newer ck_patch"),
        ({"environment": {**HERE, "triton": "3.7.0"}}, "is of another environment"),
    ],
)
def test_a_file_of_others_is_a_miss_and_stays_as_it_is(
    path: Path, changed: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(written({KEY: item()}, **changed), encoding="utf-8")
    before = path.read_bytes()
    known = Table(path, HERE)
    assert known.get(KEY) is None
    known.put(KEY, STOCK)
    assert not known.save()
    assert not known.save()
    assert known.get(KEY) == STOCK
    assert path.read_bytes() == before
    assert caplog.messages == [
        f"{FORGOTTEN}{path} {reason}; CK_PATCH_CACHE_DIR can name another folder"
    ]


def a_folder_in_place(path: Path) -> None:
    path.mkdir(parents=True)


def a_pipe_in_place(path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs pipes")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def a_file_for_a_folder(path: Path) -> None:
    path.parent.parent.mkdir()
    path.parent.touch()


def a_folder_for_the_lock(path: Path) -> None:
    path.with_name("tuned.lock").mkdir(parents=True)


def a_loop(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


@pytest.mark.skipif(os.name != "posix", reason="needs pipes and links")
@pytest.mark.parametrize(
    "put_in_place",
    [a_folder_in_place, a_pipe_in_place, a_file_for_a_folder, a_folder_for_the_lock, a_loop],
)
def test_what_stands_in_the_way_stays_and_is_said_once(
    path: Path, put_in_place: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    put_in_place(path)
    known = Table(path, HERE)
    assert known.get(KEY) is None
    reason = known.unwritable()
    for entry in (STOCK, OURS):
        known.put(KEY, entry)
        assert not known.save()
    assert known.get(KEY) == OURS
    (message,) = caplog.messages
    assert message == f"{FORGOTTEN}{reason}; CK_PATCH_CACHE_DIR can name another folder"
    assert "ck_patch" in message
    assert "[Errno" not in message


def test_whether_a_table_can_be_saved_is_known_before_and_nothing_is_left(
    path: Path, tmp_path: Path
) -> None:
    known = Table(path, HERE)
    assert known.unwritable() is None
    assert names(tmp_path) == []
    saved(path)
    assert known.unwritable() is None
    path.chmod(0o444)  # Which keeps nobody from replacing it.
    assert known.unwritable() is None
    assert names(path.parent) == [path.name, "tuned.lock"]
    assert Table(None, HERE).unwritable() == "there is no home directory"


def test_a_file_of_which_nothing_was_read_has_a_reason_until_it_is_replaced(path: Path) -> None:
    assert Table(path, HERE).unreadable() is None
    saved(path)
    assert Table(path, HERE).unreadable() is None
    path.write_text("{", encoding="utf-8")
    known = Table(path, HERE)
    assert str(known.unreadable()).startswith("holds no table that can be read: Expecting")
    known.put(KEY, STOCK)
    assert known.save()
    assert known.unreadable() is None
    path.write_text(written({}, format=FORMAT + 1), encoding="utf-8")
    assert Table(path, HERE).unreadable() == "was written by a newer ck_patch"


def refuse(code: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "code"),
    [
        (os, "fsync", errno.ENOSPC),
        (os, "fsync", errno.EIO),
        (os, "replace", errno.EDQUOT),
        (os, "replace", errno.EBUSY),
        (os, "open", errno.EROFS),
        (Path, "mkdir", errno.EACCES),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_said_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
    code: int,
) -> None:
    if name != "mkdir":
        saved(path)
    known, other = Table(path, HERE), Table(path, HERE)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refuse(code))
        for one in (known, other, known):
            one.put(OTHER, OURS)
            assert not one.save()
    assert known.get(OTHER) == OURS
    (message,) = caplog.messages
    assert message.startswith(FORGOTTEN)
    assert os.strerror(code) in message
    if name != "mkdir":
        assert names(path.parent) == [path.name, "tuned.lock"]
        assert Table(path, HERE).entries() == {KEY: STOCK}
    assert known.save()
    assert Table(path, HERE).get(OTHER) == OURS


def test_a_read_only_folder_is_read_and_not_written(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if sys.platform == "win32" or os.geteuid() == 0:
        pytest.skip("needs a user whom modes of folders stop")
    saved(path)
    path.with_name("tuned.lock").unlink()
    path.parent.chmod(0o555)
    try:
        known = Table(path, HERE)
        assert known.get(KEY) == STOCK
        known.put(OTHER, STOCK)
        assert not known.save()
    finally:
        path.parent.chmod(0o755)
    assert len(caplog.messages) == 1


def test_without_a_home_all_stays_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    known = Table(None, HERE)
    assert known.get(KEY) is None
    assert known.save()
    for entry in (STOCK, OURS):
        known.put(KEY, entry)
    assert known.get(KEY) == OURS
    assert known.entries() == {KEY: OURS}
    assert known._timer is None
    assert not known.save()
    assert caplog.messages == [
        f"{FORGOTTEN}there is no home directory; CK_PATCH_CACHE_DIR can name another folder"
    ]
    assert caplog.records[0].levelno == logging.INFO


def test_an_error_nobody_thought_of_does_not_leave_save(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    known = Table(path, HERE)
    known.put(KEY, STOCK)
    monkeypatch.setattr(table_file, "render", fail)
    assert not known.save()
    assert caplog.messages[0].startswith(f"{FORGOTTEN}MemoryError;")


def test_tables_of_two_environments_live_side_by_side(tmp_path: Path) -> None:
    other = {**HERE, "driver": "590.48.01"}
    folder = tmp_path
    first = Table(folder / table_name(HERE), HERE)
    second = Table(folder / table_name(other), other)
    first.put(KEY, STOCK)
    second.put(KEY, OURS)
    assert first.save()
    assert second.save()
    assert Table(folder / table_name(HERE), HERE).entries() == {KEY: STOCK}
    assert Table(folder / table_name(other), other).entries() == {KEY: OURS}
    assert names(folder) == sorted([table_name(HERE), table_name(other), "tuned.lock"])


def test_a_device_has_its_table_in_the_folder_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(table, "environment", lambda profile: {**HERE, "device": profile.name})
    gpu = KNOWN[-1]
    known = for_device(gpu, str(tmp_path))
    known.put(KEY, STOCK)
    assert known.save()
    assert table_name({**HERE, "device": gpu.name}) in names(tmp_path)
    assert for_device(gpu, str(tmp_path)).get(KEY) == STOCK
    assert for_device(KNOWN[0], str(tmp_path)).get(KEY) is None
    monkeypatch.setattr(cache_dir, "folder", lambda configured: None)
    assert for_device(gpu, None).entries() == {}


@pytest.mark.skipif(os.name != "posix", reason="needs links")
def test_links_to_the_folder_and_to_the_file_stay_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to("disk")
    path = tmp_path / "cache" / "table.json"
    path.symlink_to(tmp_path / "elsewhere" / "real.json")
    saved(path)
    assert path.is_symlink()
    assert Table(path, HERE).get(KEY) == STOCK
    assert names(tmp_path / "elsewhere") == ["real.json", "tuned.lock"]


def test_old_temporary_files_go_with_the_next_save(path: Path) -> None:
    saved(path)
    left = path.with_name(f"{path.name}.77-0badcafe.tmp")
    left.touch()
    os.utime(left, (0, 0))
    saved(path, {OTHER: STOCK})
    assert names(path.parent) == [path.name, "tuned.lock"]


def test_a_table_that_is_full_keeps_what_it_has_and_takes_no_new_key(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(path, {KEY: STOCK})
    monkeypatch.setattr(table_file, "LARGEST", path.stat().st_size + 90)
    known = Table(path, HERE)
    known.put(OTHER, STOCK)
    known.put(KEY, OURS)
    assert not known.save()
    assert not known.save()
    assert (known.get(KEY), known.get(OTHER)) == (OURS, STOCK)
    assert Table(path, HERE).entries() == {KEY: OURS}
    assert caplog.messages == [
        f"{FORGOTTEN}{path} is full, and is begun anew where it is removed; CK_PATCH_CACHE_DIR can "
        "name another folder"
    ]
    path.unlink()
    assert known.save()
    assert Table(path, HERE).entries() == {OTHER: STOCK}


def test_a_table_that_is_too_large_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(path, {KEY: STOCK, OTHER: STOCK})
    before = path.read_bytes()
    monkeypatch.setattr(table_file, "LARGEST", len(before) - 1)
    known = Table(path, HERE)
    assert known.entries() == {}
    known.put(KEY, OURS)
    assert not known.save()
    assert path.read_bytes() == before
    assert caplog.messages == [
        f"{FORGOTTEN}{path} is too large for a table; CK_PATCH_CACHE_DIR can name another folder"
    ]


def test_a_lock_that_others_keep_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(path)
    known = Table(path, HERE)
    known.put(OTHER, STOCK)
    monkeypatch.setattr(table, "_WAIT", 0.05)
    lock = path.with_name("tuned.lock")
    with file_lock.held(lock, 0.0) as got:
        assert got
        assert known.unwritable() == f"another process holds {lock}"
        assert not known.save()
    assert known.save()
    assert Table(path, HERE).get(OTHER) == STOCK
    assert caplog.messages == []
    known.put(OTHER, OURS)
    with file_lock.held(lock, 0.0):
        assert not known.save(last=True)
    (message,) = caplog.messages
    assert message.startswith(f"{FORGOTTEN}another process holds {lock}")


def test_what_is_put_is_saved_a_little_later_by_another_thread(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(table, "_DELAY", 0.05)
    known = Table(path, HERE)
    for number in range(20):
        known.put(f"{KEY} {number}", STOCK)
    timer = known._timer
    assert timer is not None
    assert timer.daemon
    timer.join(30)
    assert len(Table(path, HERE).entries()) == 20
    assert known._timer is None
    known.put(OTHER, STOCK)
    timer = known._timer
    assert timer is not None
    timer.join(30)
    assert Table(path, HERE).get(OTHER) == STOCK


def test_a_save_leaves_no_thread_behind(path: Path) -> None:
    known = Table(path, HERE)
    known.put(KEY, STOCK)
    timer = known._timer
    assert timer is not None
    assert known.save()
    assert known._timer is None
    timer.join(30)
    assert not timer.is_alive()


def test_where_no_thread_can_start_the_next_save_does_it(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    known = Table(path, HERE)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        known.put(KEY, STOCK)
    assert known._timer is None
    assert known.save()
    assert Table(path, HERE).get(KEY) == STOCK


def test_threads_that_put_get_and_save_lose_nothing(path: Path) -> None:
    known = Table(path, HERE)

    def work(number: int) -> None:
        key = f"{KEY} {number}"
        known.put(key, STOCK)
        assert known.get(key) == STOCK
        if number % 8 == 0:
            known.save()
        assert known.entries()[key] == STOCK

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert known.save()
    assert len(Table(path, HERE).entries()) == 200


def test_an_exported_table_is_taken_by_a_machine_of_the_same_kind(
    path: Path, tmp_path: Path
) -> None:
    known = Table(saved(path, {KEY: STOCK, OTHER: SWEPT}), HERE)
    exported = tmp_path / "exported.json"
    assert known.export(exported) == 2
    assert document(exported)["environment"] == HERE
    there = {**HERE, "driver": "590.48.01", "torch": "2.12.0+cu130", "triton": "3.7.0"}
    other = Table(tmp_path / "there.json", there)
    assert other.import_(exported) == (2, 2)
    assert other.save()
    again = Table(tmp_path / "there.json", there)
    assert again.entries() == {KEY: STOCK, OTHER: SWEPT}
    # The user asked for these: they win over what renders here measured, not over sweeps.
    swept_here = Entry("cfg5", 4096, {}, "sweep")
    mixed = Table(None, HERE)
    mixed.put(KEY, swept_here)
    mixed.put(OTHER, OURS)
    assert mixed.import_(exported) == (1, 2)
    assert mixed.import_(exported) == (1, 2)
    assert mixed.entries() == {KEY: swept_here, OTHER: SWEPT}


def test_a_choice_that_names_no_candidate_is_not_imported(tmp_path: Path) -> None:
    known = Table(None, HERE)
    gone = Entry("triton:gone", 4096, {}, "sweep")
    known.put(KEY, gone)
    known.put(OTHER, SWEPT)
    assert known.export(tmp_path / "exported.json") == 2
    other = Table(None, HERE)
    assert other.import_(tmp_path / "exported.json") == (1, 2)
    assert other.entries() == {OTHER: SWEPT}
    # Nor does it stand in the way of what a render measures.
    known.put(KEY, STOCK)
    assert known.get(KEY) == STOCK


@pytest.mark.parametrize(
    "changed", ["device", "capability", "sm_count", "kernels", "comfy_kitchen"]
)
def test_another_kind_of_machine_takes_nothing_and_says_why(
    path: Path, tmp_path: Path, changed: str
) -> None:
    exported = tmp_path / "exported.json"
    Table(saved(path), HERE).export(exported)
    other = Table(None, {**HERE, changed: "another", "driver": "590.1"})
    with pytest.raises(ValueError, match=r"exported\.json is of another kind of machine: ") as said:
        other.import_(exported)
    assert str(said.value).endswith(f": {changed} is {HERE[changed]!r}, here 'another'")
    assert other.entries() == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Expecting value"),
        ("{}", "it is no table"),
        (json.dumps({"format": FORMAT + 1}), f"its format is {FORMAT + 1}, here {FORMAT}"),
    ],
)
def test_what_is_no_table_is_not_imported(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "file"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"holds no table that can be read: {said}"):
        Table(None, HERE).import_(file)
    with pytest.raises(FileNotFoundError):
        Table(None, HERE).import_(tmp_path / "none")
