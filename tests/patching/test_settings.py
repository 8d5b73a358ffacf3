"""What each variable accepts, and that anything else means the default and says so."""

from __future__ import annotations

import pytest

from ck_patch import _bootstrap, settings
from ck_patch.settings import Settings, load


def test_an_empty_environment_means_the_defaults() -> None:
    assert load({}) == Settings()
    assert load({}).problems == ()


def test_an_empty_value_means_the_default_without_a_problem() -> None:
    assert load({variable.name: "  " for variable in settings.VARIABLES}) == Settings()


def test_every_variable_is_named_once_and_says_what_it_is_for() -> None:
    names = [variable.name for variable in settings.VARIABLES]
    assert len(set(names)) == len(names)
    for variable in settings.VARIABLES:
        assert variable.name.startswith("CK_PATCH")
        assert variable.help
        assert not variable.choices or variable.default in variable.choices


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("CK_PATCH", "0", "enabled", False),
        ("CK_PATCH", "False", "enabled", False),
        ("CK_PATCH", " off ", "enabled", False),
        ("CK_PATCH", "no", "enabled", False),
        ("CK_PATCH", "YES", "enabled", True),
        ("CK_PATCH_INT8", "Triton", "int8", "triton"),
        ("CK_PATCH_INT8", "stock", "int8", "stock"),
        ("CK_PATCH_INT8", "fp16", "int8", "fp16"),
        ("CK_PATCH_SLOTS", " a, b ,,", "slots", ("a", "b")),
        ("CK_PATCH_LOG", "PATH", "log", "path"),
        ("CK_PATCH_CACHE_DIR", "/tmp/Ünï cödé", "cache_dir", "/tmp/Ünï cödé"),
        ("CK_PATCH_ASSUME_DEVICE", " sm_70 ", "assume", ((None, (7, 0)),)),
        ("CK_PATCH_ASSUME_DEVICE", "sm_121", "assume", ((None, (12, 1)),)),
        ("CK_PATCH_ASSUME_DEVICE", "SM_86", "assume", ((None, (8, 6)),)),
        ("CK_PATCH_ASSUME_DEVICE", "0=sm_90, 1 = sm_70,", "assume", ((0, (9, 0)), (1, (7, 0)))),
        ("CK_PATCH_ASSUME_DEVICE", "1=sm_70,sm_86", "assume", ((1, (7, 0)), (None, (8, 6)))),
    ],
)
def test_a_good_value_is_taken(name: str, text: str, field: str, value: object) -> None:
    loaded = load({name: text})
    assert getattr(loaded, field) == value
    assert loaded.problems == ()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("CK_PATCH", "2", "CK_PATCH='2' is neither 0 nor 1; it means 1"),
        (
            "CK_PATCH_INT8",
            "int8",
            "CK_PATCH_INT8='int8' is none of auto, stock, triton, fp16; it means auto",
        ),
        ("CK_PATCH_LOG", "debug", "CK_PATCH_LOG='debug' is none of off, info, path; it means info"),
        ("CK_PATCH_SLOTS", " , ", "CK_PATCH_SLOTS=',' names no slot; it means nothing set"),
        (
            "CK_PATCH_CACHE_DIR",
            "cache",
            "CK_PATCH_CACHE_DIR='cache' is not an absolute path; it means nothing set",
        ),
        *(
            (
                "CK_PATCH_ASSUME_DEVICE",
                text,
                f"CK_PATCH_ASSUME_DEVICE={text!r} is not of the form sm_70 or 0=sm_90,1=sm_70; it "
                "means nothing set",
            )
            for text in (
                *("70", "7.0", "sm_7", "sm_1000", "sm_90a", "sm_", "V100", "sm_70 sm_80"),
                *("0=", "=sm_70", "-1=sm_70", "cuda:0=sm_70", "0=sm_90,1=70", "0:sm_90"),
                *("sm_٧٠", "٠=sm_70"),  # noqa: RUF001, digits to str.isdigit()
            )
        ),
    ],
)
def test_a_bad_value_means_the_default_and_says_so(name: str, text: str, problem: str) -> None:
    loaded = load({name: text})
    assert loaded.problems == (problem,)
    assert loaded == Settings(problems=(problem,))


@pytest.mark.parametrize("word", ["0", "false", "OFF", " No "])
def test_the_bootstrap_understands_the_same_words(
    monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """It decides before the settings are imported, with a list of its own."""
    monkeypatch.setenv("CK_PATCH", word)
    assert not load().enabled
    _bootstrap.start()
    assert _bootstrap.outcome == "switched off by CK_PATCH"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CK_PATCH_INT8", "fp16")
    assert load().int8 == "fp16"


def test_a_device_is_assumed_by_its_index_or_else_by_what_goes_for_all() -> None:
    assert Settings().assumed(0) is None
    every = load({"CK_PATCH_ASSUME_DEVICE": "sm_70"})
    assert [every.assumed(device) for device in (-1, 0, 7)] == [(7, 0)] * 3
    some = load({"CK_PATCH_ASSUME_DEVICE": "0=sm_90,1=sm_70"})
    assert [some.assumed(device) for device in (-1, 0, 1, 2)] == [None, (9, 0), (7, 0), None]
    mixed = load({"CK_PATCH_ASSUME_DEVICE": "1=sm_70,sm_86"})
    assert [mixed.assumed(device) for device in (-1, 0, 1)] == [(8, 6), (8, 6), (7, 0)]


def test_a_slot_is_wanted_unless_switched_off_or_left_out() -> None:
    assert Settings().wants("a")
    assert Settings(slots=("a",)).wants("a")
    assert not Settings(slots=("b",)).wants("a")
    assert not Settings(enabled=False).wants("a")
