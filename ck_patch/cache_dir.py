"""The folder for what is measured on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder(configured: str | None, platform: str = sys.platform) -> Path | None:
    """`configured` (CK_PATCH_CACHE_DIR), or `ck_patch` in the user's cache folder as the platform
    has it; None where there is no home directory. Nothing is created."""
    if configured:
        return Path(configured)
    parent = _user_cache(platform)
    return None if parent is None else parent / "ck_patch"


def _user_cache(platform: str) -> Path | None:
    variable, *below_home = {
        "win32": ("LOCALAPPDATA", "AppData", "Local"),
        "darwin": ("", "Library", "Caches"),
    }.get(platform, ("XDG_CACHE_HOME", ".cache"))
    named = os.environ.get(variable, "")
    # The XDG specification has relative paths ignored; expanduser answers "~" if it cannot tell.
    if os.path.isabs(named):
        return Path(named)
    home = os.path.expanduser("~")
    return Path(home, *below_home) if os.path.isabs(home) else None
