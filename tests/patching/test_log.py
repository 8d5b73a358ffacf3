"""One line per key, at the level the settings ask for, through the logger of the host."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from ck_patch import log


def test_each_key_is_written_once(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("info")
    for _ in range(3):
        log.once("slot", "patched")
        log.warn("slot", "something failed")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "patched"),
        ("WARNING", "something failed"),
    ]


def test_off_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("off")
    log.once("a", "patched")
    log.warn("b", "something failed")
    log.path("m=1 triton")
    assert caplog.messages == []


def test_paths_are_written_once_each_and_only_when_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log.configure("info")
    assert not log.paths_wanted()
    log.path("m=1 triton")
    log.configure("path")
    assert log.paths_wanted()
    for message in ("m=1 triton", "m=2 stock", "m=1 triton"):
        log.path(message)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "m=1 triton"),
        ("INFO", "m=2 stock"),
    ]


def test_threads_that_log_the_same_key_write_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log.configure("info")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: log.once("key", "line"), range(200)))
    assert caplog.messages == ["line"]


def test_no_handler_is_installed_and_the_root_logger_gets_the_lines() -> None:
    logger = logging.getLogger("ck_patch")
    assert logger.handlers == []
    assert logger.propagate
