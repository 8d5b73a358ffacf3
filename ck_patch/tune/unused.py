"""Why the settings of a process keep it from using its tuning table."""

from __future__ import annotations

from ck_patch import settings


def reason(wanted: settings.Settings) -> str | None:
    """The setting to blame, or None."""
    if not wanted.enabled:
        return f"{settings.ENABLED.name}=0"
    if wanted.force is not None:
        return f"{settings.FORCE.name}={wanted.force}"
    if wanted.int8 != "auto":
        return f"{settings.INT8.name}={wanted.int8}"
    return f"{settings.TUNE.name}=off" if wanted.tune == "off" else None
