"""What a table's file holds: all of a good one, what is good of a damaged one, never an error."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ck_patch import table_file
from ck_patch.environment import FORMAT
from ck_patch.table_file import Content, Entry, NewerFormat, merged, parse, read, render
from tests.tuning.examples import HERE, KEY, OTHER, OURS, STOCK, SWEPT, item, written

# With lone surrogates, which UTF-8 does not have.
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
ENTRIES = st.dictionaries(
    TEXT,
    st.builds(
        Entry,
        choice=TEXT.filter(bool),
        m=st.integers(1, 2**63 - 1),
        us=st.dictionaries(TEXT, st.floats(0, allow_infinity=False)),
        source=st.sampled_from(["run", "sweep"]),
    ),
    max_size=5,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
NEARLY_ITEMS = st.dictionaries(
    st.text(max_size=5),
    st.fixed_dictionaries(
        {},
        optional={
            "choice": st.just("stock") | JSON,
            "m": st.just(1) | JSON,
            "us": st.just({"stock": 1.0}) | st.dictionaries(st.text(max_size=3), JSON) | JSON,
            "source": st.just("run") | JSON,
        },
    )
    | JSON,
)


@given(ENTRIES)
def test_a_table_comes_back_as_it_was_written(entries: dict[str, Entry]) -> None:
    environment, back = parse(render(HERE, entries))
    assert environment == HERE
    assert back == entries


def test_the_document_is_for_people_too() -> None:
    text = render({"format": 1}, {"b": SWEPT, "a": STOCK}).decode("ascii")
    assert text == (
        '{\n "entries": {\n'
        '  "a": {\n   "choice": "stock",\n   "m": 4096,\n   "source": "run",\n'
        '   "us": {\n    "cfg0": 120.25,\n    "stock": 101.5\n   }\n  },\n'
        '  "b": {\n   "choice": "cfg0",\n   "m": 4096,\n   "source": "sweep",\n'
        '   "us": {\n    "cfg0": 80.0,\n    "stock": 100.0\n   }\n  }\n },\n'
        ' "environment": {\n  "format": 1\n },\n "format": 1\n}\n'
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"choice": ""},
        {"choice": None},
        {"choice": 3},
        {"m": 0},
        {"m": -1},
        {"m": 4096.0},
        {"m": True},
        {"m": "4096"},
        {"m": 2**63},
        {"us": None},
        {"us": [1.0]},
        {"us": []},
        {"us": [["stock", 1.0]]},
        {"us": {"stock": math.nan}},
        {"us": {"stock": math.inf}},
        {"us": {"stock": -1.0}},
        {"us": {"stock": True}},
        {"us": {"stock": "1"}},
        {"us": {"stock": 10**400}},
        {"source": "guess"},
        {"source": None},
        {"source": []},
    ],
    ids=str,
)
def test_an_entry_that_is_none_is_refused_and_dropped_alone(changed: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Entry(**item(**changed))
    text = written({KEY: item(**changed), OTHER: item()})
    assert list(parse(text.encode())[1]) == [OTHER]


def test_an_entry_lacks_nothing_and_may_have_more() -> None:
    lacking: dict[str, Any] = {name: item() for name in item()}
    for name, entry in lacking.items():
        del entry[name]
    good = {KEY: item(note="from the future")}
    entries = {**lacking, "text": "stock", "list": [], "none": None, **good}
    assert list(parse(written(entries).encode())[1]) == [KEY]


def test_an_entry_keeps_a_copy_of_its_times() -> None:
    times = {"stock": 1}
    entry = Entry("stock", 1, times, "run")
    times["cfg0"] = 2
    assert entry.us == {"stock": 1.0}


BROKEN = {
    "empty": b"",
    "spaces": b" \n",
    "half": written({KEY: item()}).encode()[:-40],
    "list": b"[]",
    "null": b"null",
    "number": b"1",
    "zeros": bytes(4096),
    "invalid UTF-8": b'{"format": 1, "\xff": 1}',
    "UTF-16": written({KEY: item()}).encode("utf-16"),
    "no format": json.dumps({"environment": HERE, "entries": {}}).encode(),
    "format true": written({KEY: item()}, format=True).encode(),
    "format 1.0": written({KEY: item()}, format=1.0).encode(),
    "format 0": written({KEY: item()}, format=0).encode(),
    "format '2'": written({KEY: item()}, format="2").encode(),
    "no environment": written({KEY: item()}, environment=None).encode(),
    "entries a list": json.dumps(
        {"format": FORMAT, "environment": HERE, "entries": [item()]}
    ).encode(),
    "no entries": json.dumps({"format": FORMAT, "environment": HERE}).encode(),
    "deep": b"[" * 200_000,
    "long number": b'{"format": ' + b"9" * 100_000 + b"}",
    "NaN": b"NaN",
    "two documents": written({}).encode() * 2,
    "trailing junk": written({}).encode() + b"\0",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_holds_nothing_and_may_be_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "table"
    file.write_bytes(content)
    found = read(file, HERE)
    assert (found.entries, found.obstacle) == ({}, None)
    assert found.fault is not None
    assert found.fault.startswith("holds no table that can be read: ")
    with pytest.raises(ValueError, match=r"."):
        parse(content)


def test_a_huge_file_is_not_read_and_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "table"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    assert read(file, HERE) == Content({}, "is too large for a table")
    assert len(table_file.read_bytes(file)) < 2**24


@given(ENTRIES, ENTRIES, st.integers(0, 4000))
def test_what_fits_can_be_read_again(
    older: dict[str, Entry], newer: dict[str, Entry], room: int
) -> None:
    alone = len(render(HERE, older))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table_file, "LARGEST", alone + room)
        fitting = table_file.fitting(HERE, older, newer)
        content = render(HERE, {**older, **fitting})
        assert set(parse(content)[1]) == older.keys() | fitting.keys()


def test_the_first_of_what_fits_comes_first_and_what_is_known_may_always_change() -> None:
    new = {f"new {number}": STOCK for number in range(9)}
    size = len(render(HERE, {"new 0": STOCK})) - len(render(HERE, {}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table_file, "LARGEST", len(render(HERE, {KEY: OURS})) + 3 * size)
        assert list(table_file.fitting(HERE, {KEY: OURS}, new)) == ["new 0", "new 1", "new 2"]
        patched.setattr(table_file, "LARGEST", len(render(HERE, {KEY: OURS})))
        assert table_file.fitting(HERE, {KEY: OURS}, {"new": STOCK, KEY: OURS}) == {KEY: OURS}


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(content)


@given(NEARLY_ITEMS, st.integers(0, 400))
def test_of_what_is_nearly_a_table_only_the_good_is_taken(
    items: dict[str, Any], missing: int
) -> None:
    content = written(items).encode()
    _, entries = parse(content)
    for key, entry in entries.items():
        assert items[key]["choice"] == entry.choice
        assert items[key]["m"] == entry.m
        assert items[key]["us"] == entry.us
        assert items[key]["source"] == entry.source
    assert parse(render(HERE, entries))[1] == entries
    with pytest.raises(ValueError, match=r"."):
        parse(content[: max(0, len(content) - 1 - missing)])


def test_a_missing_file_holds_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "none" / "table", HERE) == Content({})


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({"format": FORMAT + 1}, "was written by a newer ck_patch"),
        ({"format": FORMAT + 1, "environment": []}, "was written by a newer"),
        ({"environment": {**HERE, "driver": "590.1"}}, "is of another environment"),
        ({"environment": {}}, "is of another environment"),
    ],
)
def test_a_file_of_others_is_neither_used_nor_replaced(
    tmp_path: Path, changed: dict[str, Any], obstacle: str
) -> None:
    file = tmp_path / "table"
    text = written({KEY: item()}, **changed)
    file.write_text(text, encoding="utf-8")
    content = read(file, HERE)
    assert content.entries == {}
    assert content.obstacle is not None
    assert content.obstacle.startswith(obstacle)


def test_a_byte_order_mark_does_no_harm() -> None:
    assert list(parse(b"\xef\xbb\xbf" + written({KEY: item()}).encode())[1]) == [KEY]


def test_a_newer_format_is_told_from_none() -> None:
    with pytest.raises(NewerFormat, match="its format is 2, here 1"):
        parse(written({}, format=2).encode())


def test_what_is_not_a_file_is_an_obstacle_and_is_not_waited_for(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs pipes and links")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "pipe"):
        assert read(tmp_path / name, HERE) == Content({}, "is not a regular file")
    obstacle = read(tmp_path / "loop", HERE).obstacle
    assert obstacle is not None
    assert obstacle.startswith("cannot be read (")


def test_a_file_that_cannot_be_read_now_is_an_obstacle(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def busy(path: Path) -> bytes:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    (tmp_path / "table").write_text(written({}), encoding="utf-8")
    monkeypatch.setattr(table_file, "read_bytes", busy)
    assert read(tmp_path / "table", HERE).obstacle == (
        f"cannot be read ({os.strerror(errno.EBUSY)})"
    )


@pytest.mark.parametrize(
    ("older", "newer", "stays"),
    [
        (STOCK, OURS, OURS),
        (STOCK, SWEPT, SWEPT),
        (SWEPT, OURS, SWEPT),
        (SWEPT, Entry("stock", 1, {}, "sweep"), Entry("stock", 1, {}, "sweep")),
        (Entry("cfg99", 1, {}, "sweep"), OURS, OURS),
    ],
)
def test_a_sweep_gives_way_to_a_sweep_alone(older: Entry, newer: Entry, stays: Entry) -> None:
    assert merged({KEY: older}, {KEY: newer}) == {KEY: stays}
    assert merged({KEY: older}, {OTHER: newer}) == {KEY: older, OTHER: newer}
