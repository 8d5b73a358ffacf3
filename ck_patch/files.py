"""Writing a file: it is there whole or not at all, and whether it can be is known beforehand."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import sys
import time
from pathlib import Path

# On Windows a file cannot be replaced while another process has it open, if only to read it.
_PAUSES = (0.01, 0.05, 0.2) if sys.platform == "win32" else ()
_ABANDONED_AFTER = 3600.0


def check(path: Path) -> None:
    """Raise the OSError that `write` would, as far as can be told; nothing is left behind."""
    if path.is_dir():
        raise _error(errno.EISDIR, path)
    # A file that may not be written to is not replaced either. And opening a pipe and closing it
    # again would look like the end to its reader.
    if path.exists() and not os.access(path, os.W_OK):
        raise _error(errno.EACCES, path)
    if not _is_stream(path):
        check_replace(_target(path))


def write(path: Path, content: bytes) -> None:
    """Put `content` in the place of the file at once; into a pipe or a device, as it is. A link
    stays one. Raises OSError."""
    if _is_stream(path):
        path.write_bytes(content)
    else:
        target = _target(path)
        remove_abandoned(target.parent, glob.escape(target.name))
        replace(target, content)


def replace(path: Path, content: bytes) -> None:
    """Put `content` in the place of the file, which is no link, whole or not at all; raises
    OSError."""
    part = _part(path)
    try:
        with part.open("xb") as file:
            file.write(content)
            file.flush()
            # Without it a crash of the machine can leave the new name on an empty file.
            os.fsync(file.fileno())
        for pause in _PAUSES:
            with contextlib.suppress(PermissionError):
                os.replace(part, path)
                return
            time.sleep(pause)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def check_replace(path: Path) -> None:
    """Raise the OSError that `replace` would, as far as can be told; nothing is left behind."""
    part = _part(path)
    part.open("xb").close()
    part.unlink()


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove what processes left that were killed while they wrote a file whose name fits the
    pattern."""
    for part in folder.glob(f"{names}.[0-9]*-????????.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_AFTER:
                part.unlink()


def reason(error: OSError) -> str:
    """What the operating system says, without the number and the path."""
    return error.strerror or str(error)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _target(path: Path) -> Path:
    """Where a link leads to, be it to a file that is not there yet."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise _error(errno.ELOOP, path)
    return target


def _part(path: Path) -> Path:
    # Not by process id alone: containers that share the folder may have the same ones.
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
