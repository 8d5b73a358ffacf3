"""What a command has measured, as files: a JSON document, and a picture of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ck_patch import files
from ck_patch.stamp import facts

Draw = Callable[[str, str], bytes]
"""Makes a picture of a title and the suffix of its file."""


def write(
    document: Mapping[str, Any],
    json_path: Path | None,
    plot_path: Path | None = None,
    draw: Draw | None = None,
) -> list[str]:
    """Write the files that have a path, each whatever becomes of the other; a sentence for each
    that cannot be written. `document` has a stamp, which is the title of the picture.

    Raises ValueError, and nothing is written, where a number is not finite.
    """
    wanted: list[tuple[Path, Callable[[], bytes]]] = []
    if json_path is not None:
        text = json.dumps(document, indent=1, allow_nan=False)
        wanted.append((json_path, f"{text}\n".encode))
    if plot_path is not None and draw is not None:
        wanted.append((plot_path, partial(draw, facts(document["stamp"]), plot_path.suffix)))
    unwritten = []
    for path, content in wanted:
        try:
            files.write(path, content())
        except OSError as error:
            unwritten.append(f"{path} cannot be written ({files.reason(error)})")
        except Exception as error:  # Of a library that draws.
            unwritten.append(f"{path} cannot be written ({type(error).__name__}: {error})")
    return unwritten
