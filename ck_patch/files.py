"""Writing what was measured: a file is there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, content: bytes) -> None:
    """Put `content` in the place of the file at once; into a pipe or a device, as it is."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()  # A link stays one.
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write one JSON document; ValueError, and nothing written, where a number is not finite."""
    text = json.dumps(document, indent=1, allow_nan=False)
    write(path, f"{text}\n".encode())
