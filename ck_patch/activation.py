"""Whether this interpreter started ck_patch by itself, and if not, why."""

from __future__ import annotations

import importlib
import os
import shlex
import site
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import ck_patch

_BOOTSTRAP = "ck_patch._bootstrap"
# Without these the patcher cannot be loaded, or patches nothing.
_REQUIREMENTS = ("packaging", "wrapt")


@dataclass(frozen=True)
class Activation:
    """`active`: the import of comfy_kitchen in this interpreter gets patched without being asked.
    `files` are the start files found, whether Python reads them there or not."""

    active: bool
    files: tuple[str, ...]
    reason: str


def examine() -> Activation:
    """Look at what ran when this interpreter started, and at where the start files lie."""
    read = _existing(_folders_python_reads())
    elsewhere = [folder for folder in _existing(_other_folders()) if folder not in read]
    found = [file for folder in read for file in _start_files(folder)]
    unread = [file for folder in elsewhere for file in _start_files(folder)]
    active, reason = _verdict(found, unread)
    return Activation(active, tuple(map(str, found + unread)), reason)


def _verdict(found: list[Path], unread: list[Path]) -> tuple[bool, str]:
    # Nothing else loads the bootstrap before a command runs.
    outcome = getattr(sys.modules.get(_BOOTSTRAP), "outcome", None)
    if outcome is not None:
        reason = f"when this interpreter started: {outcome}"
        missing = [problem for name in _REQUIREMENTS if (problem := _problem(name))]
        return outcome.startswith("waits") and not missing, "; but ".join([reason, *missing])
    if sys.flags.no_site:
        if list(Path(sys.executable).parent.glob("python*._pth")):
            return False, f"the ._pth file beside {sys.executable} has no line `import site`"
        return False, "Python was started with -S and reads no .pth file"
    if found:
        return False, (
            f"{found[0]} did not run; install ck_patch anew with "
            f"{pip_install('--force-reinstall', '--no-deps', _checkout())}"
        )
    users = Path(site.getusersitepackages())
    if any(file.parent == users for file in unread):
        return False, (
            f"ck_patch is in the user site {users}, which this interpreter leaves out (-s, -I, "
            "PYTHONNOUSERSITE or a virtual environment); install it without --user"
        )
    if unread:
        return False, f"{unread[0].parent} is no folder where Python reads .pth files"
    return False, (
        f"no start file is in the site-packages of this interpreter, ck_patch runs from "
        f"{Path(ck_patch.__file__).parent}; install it with {pip_install(_checkout())} "
        "or call ck_patch.enable() once comfy_kitchen has been imported"
    )


def pip_install(*arguments: str) -> str:
    """The command, quoted for a shell, that installs into this interpreter."""
    words = [sys.executable, "-m", "pip", "install", *arguments]
    return f"`{subprocess.list2cmdline(words) if os.name == 'nt' else shlex.join(words)}`"


def _checkout() -> str:
    folder = Path(ck_patch.__file__).parent.parent
    return str(folder) if (folder / "pyproject.toml").exists() else "PATH_OF_YOUR_CHECKOUT"


def _problem(requirement: str) -> str | None:
    try:
        importlib.import_module(requirement)
    except ModuleNotFoundError:
        return f"{requirement} is missing; install it with {pip_install(requirement)}"
    except (Exception, SystemExit) as error:
        return f"{requirement} cannot be imported ({type(error).__name__}: {error})"
    return None


def _folders_python_reads() -> Iterable[str]:
    yield from site.getsitepackages()
    if site.ENABLE_USER_SITE:
        yield site.getusersitepackages()


def _other_folders() -> Iterable[str]:
    yield site.getusersitepackages()
    yield str(Path(ck_patch.__file__).parent.parent)
    yield from sys.path


def _existing(folders: Iterable[str]) -> list[Path]:
    paths = (Path(folder) for folder in folders if folder)
    return list(dict.fromkeys(path for path in paths if path.is_dir()))


def _start_files(folder: Path) -> list[Path]:
    # Python 3.15 reads a .start file in place of the .pth of the same name.
    names = ["ck_patch.pth"] if sys.version_info < (3, 15) else ["ck_patch.start", "ck_patch.pth"]
    # A checkout has them too, but is no site-packages: it also has pyproject.toml.
    if (folder / "pyproject.toml").exists():
        return []
    return [folder / name for name in names if (folder / name).is_file()]
