"""Where measurements are kept on each platform, and that a missing home is an answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ck_patch.cache_dir import folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the paths are those of POSIX")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)


def test_the_setting_is_the_folder_itself() -> None:
    assert folder("/data/Ünï cödé", "linux") == Path("/data/Ünï cödé")


@pytest.mark.parametrize(
    ("platform", "variable", "value", "expected"),
    [
        ("linux", "HOME", "/home/me", "/home/me/.cache/ck_patch"),
        ("linux", "XDG_CACHE_HOME", "/fast/cache", "/fast/cache/ck_patch"),
        ("linux", "XDG_CACHE_HOME", "relative", "/home/me/.cache/ck_patch"),
        ("linux", "XDG_CACHE_HOME", "", "/home/me/.cache/ck_patch"),
        ("linux", "LOCALAPPDATA", "/local", "/home/me/.cache/ck_patch"),
        ("freebsd14", "HOME", "/home/me", "/home/me/.cache/ck_patch"),
        ("darwin", "HOME", "/Users/me", "/Users/me/Library/Caches/ck_patch"),
        ("darwin", "XDG_CACHE_HOME", "/fast/cache", "/home/me/Library/Caches/ck_patch"),
        ("win32", "LOCALAPPDATA", "/local", "/local/ck_patch"),
        ("win32", "HOME", "/c/me", "/c/me/AppData/Local/ck_patch"),
    ],
)
def test_each_platform_has_its_place(
    monkeypatch: pytest.MonkeyPatch, platform: str, variable: str, value: str, expected: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert folder(None, platform) == Path(expected)


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_a_user_without_a_home_has_no_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    import pwd

    def nobody(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("HOME")
    assert folder(None, platform) is None
    assert folder("/data", platform) == Path("/data")
    monkeypatch.setenv("HOME", "relative")
    assert folder(None, platform) is None


def test_nothing_is_created(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = folder(None, "linux")
    assert found is not None
    assert not found.exists()
