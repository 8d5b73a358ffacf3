"""The log lines of the project: the logger "ck_patch", each line written once."""

from __future__ import annotations

import logging

_logger = logging.getLogger("ck_patch")
# CK_PATCH_LOG to the level of the logger. It has no handler of its own: the host shows what
# reaches the root logger, at INFO.
_LEVELS = {"off": logging.CRITICAL + 1, "info": logging.INFO, "path": logging.DEBUG}

# By kind and key, whose call came first. No lock: a child that was forked while another thread
# held it would hang at its first line.
_seen: dict[tuple[str, str], object] = {}


def configure(level: str) -> None:
    """Set what is written, by a value of CK_PATCH_LOG."""
    _logger.setLevel(_LEVELS[level])


def once(key: str, message: str) -> None:
    """Write one line at INFO for this key in the life of the process."""
    if _first("once", key):
        _logger.info(message)


def warn(key: str, message: str) -> None:
    """Write one line at WARNING for this key in the life of the process."""
    if _first("warn", key):
        _logger.warning(message)


def paths_wanted() -> bool:
    """Whether path() writes anything: ask before composing a message."""
    return _logger.isEnabledFor(logging.DEBUG)


def path(message: str) -> None:
    """Write which path ran, once per message, under CK_PATCH_LOG=path.

    At INFO, like everything else: the host hides DEBUG.
    """
    if paths_wanted() and _first("path", message):
        _logger.info(message)


def _first(kind: str, key: str) -> bool:
    mine = object()
    return _seen.setdefault((kind, key), mine) is mine
