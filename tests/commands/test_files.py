"""The files that commands write: whole or not at all, and asked for before anything is measured."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ck_patch import cli, files, results

posix = pytest.mark.skipif(os.name == "nt", reason="needs links, pipes or permissions")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_at_once_or_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.json"
    files.write(file, b"old")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, full)
            with pytest.raises(OSError, match="no space"):
                files.write(file, b"new")
        assert (file.read_bytes(), names(tmp_path)) == (b"old", ["bench.json"])
    files.write(file, b"new")
    assert file.read_bytes() == b"new"


@posix
def test_a_file_is_as_open_to_others_as_the_user_makes_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        files.replace(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(("refusals", "replaced"), [(0, True), (2, True), (3, True), (4, False)])
def test_a_file_that_a_reader_has_open_on_windows_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusals: int, replaced: bool
) -> None:
    real, tried = os.replace, []

    def refuse(source: Path, target: Path) -> None:
        tried.append(target)
        if len(tried) <= refusals:
            raise PermissionError(errno.EACCES, "Access is denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(files, "_PAUSES", (0.0, 0.0, 0.0))
    file = tmp_path / "file"
    if replaced:
        files.replace(file, b"new")
    else:
        with pytest.raises(PermissionError):
            files.replace(file, b"new")
    assert len(tried) == min(refusals + 1, 4)
    assert names(tmp_path) == (["file"] if replaced else [])


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    old, young = "it[1].json.77-0badcafe.tmp", "it[1].json.78-0badcafe.tmp"
    others = ["it1.json.79-0badcafe.tmp", "it[1].json.mine.tmp", "it[1].json.bak"]
    for name in (old, young, *others):
        (tmp_path / name).touch()
        if name != young:
            os.utime(tmp_path / name, (0, 0))
    files.write(tmp_path / "it[1].json", b"")
    assert names(tmp_path) == sorted([young, *others, "it[1].json"])
    files.remove_abandoned(tmp_path, "*.json")
    assert names(tmp_path) == sorted([young, *others[1:], "it[1].json"])


def test_looking_whether_a_file_can_be_written_leaves_everything_as_it_was(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("old", encoding="utf-8")
    assert cli._file(str(old)) == old
    assert cli._file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert names(tmp_path) == ["old.json"]
    assert old.read_text(encoding="utf-8") == "old"


@posix
@pytest.mark.parametrize("is_there", [False, True])
def test_a_link_stays_one_whether_it_leads_to_a_file_yet_or_not(
    tmp_path: Path, is_there: bool
) -> None:
    link, target = tmp_path / "link.json", tmp_path / "there" / "real.json"
    target.parent.mkdir()
    link.symlink_to(target)
    if is_there:
        target.touch()
    before = names(target.parent)
    files.check(link)
    assert (link.is_symlink(), names(target.parent)) == (True, before)
    files.write(link, b"all of it")
    assert link.is_symlink()
    assert target.read_bytes() == b"all of it"
    assert names(target.parent) == ["real.json"]


def a_folder(path: Path) -> None:
    path.mkdir()


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_link_into_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "no such folder" / "file")


def a_file_for_a_folder(path: Path) -> None:
    path.parent.rmdir()
    path.parent.touch()


def a_folder_that_is_gone(path: Path) -> None:
    path.parent.rmdir()


@posix
@pytest.mark.parametrize(
    "put_in_place",
    [a_folder, a_loop, a_link_into_nothing, a_file_for_a_folder, a_folder_that_is_gone],
)
def test_what_cannot_be_written_is_found_out_before_and_stays(
    tmp_path: Path, put_in_place: Callable[[Path], None]
) -> None:
    path = tmp_path / "folder" / "file.json"
    path.parent.mkdir()
    put_in_place(path)
    was = path.is_symlink(), path.is_dir()
    for touch in (files.check, lambda path: files.write(path, b"new")):
        with pytest.raises(OSError, match=r"."):
            touch(path)
    assert (path.is_symlink(), path.is_dir()) == was


@posix
@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() == 0, reason="root may write everywhere")
def test_a_folder_and_a_file_that_are_read_only_are_found_out_before(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.touch()
    file.chmod(0o444)
    with pytest.raises(PermissionError):
        files.check(file)
    file.chmod(0o644)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(PermissionError):
            files.check(file)
    finally:
        tmp_path.chmod(0o755)
    files.check(file)


def test_what_an_option_cannot_write_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(files, "check", read_only)
    for option in (
        ["bench", "--plot", "a.png"],
        ["tune", "--export", "a"],
        ["demo", "--json", "a"],
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(option)
        assert stop.value.code == 2
        said = f"argument {option[1]}: {option[2]} cannot be written (Read-only file system)"
        assert said in capsys.readouterr().err


@posix
def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    files.check(pipe)
    script = f"from pathlib import Path; print(Path({str(pipe)!r}).read_text(), end='')"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as reader:
        files.write(pipe, b"all of it")
        out, _ = reader.communicate(timeout=60)
    assert out == b"all of it"
    assert pipe.is_fifo()


def test_one_file_that_cannot_be_written_costs_the_other_nothing(tmp_path: Path) -> None:
    titles = []

    def draw(title: str, suffix: str) -> bytes:
        titles.append((title, suffix))
        return b"a picture"

    document = {"stamp": {"gpu": "H200", "driver": None, "torch": "2.11"}, "rows": [1]}
    plot = tmp_path / "plot.png"
    gone = tmp_path / "gone" / "file"
    assert results.write(document, gone, plot, draw) == [
        f"{gone} cannot be written (No such file or directory)"
    ]
    assert (plot.read_bytes(), titles) == (b"a picture", [("gpu H200, torch 2.11", ".png")])
    (unwritten,) = results.write(document, tmp_path / "it.json", gone, draw)
    assert unwritten.startswith(str(gone))
    assert (tmp_path / "it.json").read_text(encoding="utf-8").startswith('{\n "stamp"')
    assert results.write(document, None) == []

    def broken(title: str, suffix: str) -> bytes:
        raise AttributeError("no such backend")

    assert results.write(document, None, plot, broken) == [
        f"{plot} cannot be written (AttributeError: no such backend)"
    ]


def test_a_number_that_is_none_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.write({"rows": [float("nan")]}, tmp_path / "it.json")
    assert names(tmp_path) == []
