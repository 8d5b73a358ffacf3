"""Pythons on this machine, virtual environments made from them, and the project to install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT_FILES = ("LICENSE", "README.md", "ck_patch.pth", "ck_patch.start", "pyproject.toml")
PROMISED = ("3.10", "3.11", "3.12", "3.13")

# What a host looks like to start-up: it says how it was loaded, and fails on demand.
HOST = """\
import sys
seen = [type(__spec__.loader).__module__, type(__loader__).__module__]
if getattr(sys, "host_fails", False):
    raise RuntimeError("the host fails")
"""

# Counts calls instead of patching: a fake host has nothing to patch.
COUNT_ENABLE = """\
import sys, ck_patch
calls = []
ck_patch.enable = lambda: calls.append("comfy_kitchen" in sys.modules)
"""

# How many finders of ours wait.
WAITING = "sum(type(f).__module__ == 'ck_patch._import_hook' for f in sys.meta_path)"


def find_pythons() -> dict[str, Path]:
    """Interpreters by version ("3.12"), from PATH, from pyenv and the running one."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": Path(sys.executable)}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(10, 20):
        version = f"3.{minor}"
        candidates = [shutil.which(f"python{version}")]
        candidates += [str(p) for p in sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for candidate in candidates:
            # A pyenv shim is on PATH even where its version is not switched on, and then fails.
            if version not in found and candidate and _version(candidate) == version:
                found[version] = Path(candidate)
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def _version(python: str) -> str | None:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip; the pip of this process installs into it."""

    path: Path
    site_packages: Path

    @classmethod
    def make(cls, python: Path, path: Path) -> Environment:
        _check([str(python), "-m", "venv", "--without-pip", str(path)], clean_environ())
        (site_packages,) = path.glob("lib/python3.*/site-packages")
        return cls(path, site_packages)

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    def clone(self, path: Path) -> Environment:
        """A copy to break things in."""
        shutil.copytree(self.path, path, symlinks=True)
        return Environment(path, path / self.site_packages.relative_to(self.path))

    def run(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Start the interpreter with `env` added to a clean environment."""
        return subprocess.run(
            [str(self.python), *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            cwd=self.path,
            env={**clean_environ(), "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
            timeout=60,
        )

    def output(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """What it prints, where it ends well and says nothing on stderr."""
        done = self.run(*arguments, env=env)
        assert (done.returncode, done.stderr) == (0, ""), done
        return done.stdout.strip()

    def pip(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        return _check(command, {**clean_environ(), **(env or {})})

    def files(self) -> set[str]:
        """Every file in it, without byte code, relative to its root."""
        return {
            file.relative_to(self.path).as_posix()
            for file in self.path.rglob("*")
            if not file.is_dir() and "__pycache__" not in file.parts
        }

    def installed(self, name: str) -> str | None:
        """The installed version of a distribution, from its metadata folder."""
        folders = list(self.site_packages.glob(f"{name}-*.dist-info"))
        assert len(folders) < 2, folders
        return folders[0].name.removesuffix(".dist-info").split("-")[1] if folders else None

    def add_host(self, text: str = HOST) -> None:
        """Put a fake comfy_kitchen there."""
        package = self.site_packages / "comfy_kitchen"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(text, encoding="utf-8")


def clean_environ() -> dict[str, str]:
    """The environment without anything that steers Python, pip's user options or ck_patch."""
    left_out = ("PYTHON", "CK_PATCH", "VIRTUAL_ENV", "COVERAGE")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(left_out)}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONNOUSERSITE": "1"}


def _check(command: list[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=dict(env), timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_project(target: Path, version: str | None = None) -> Path:
    """A copy of what the package is built from, as that version if one is given."""
    target.mkdir(parents=True)
    for name in PROJECT_FILES:
        shutil.copy2(REPOSITORY / name, target)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "ck_patch", target / "ck_patch", ignore=ignore)
    if version:
        init = target / "ck_patch" / "__init__.py"
        old = next(line for line in init.read_text().splitlines() if "__version__ =" in line)
        init.write_text(init.read_text().replace(old, f'__version__ = "{version}"'))
    return target


def build(project: Path, target: Path, kind: str = "wheel") -> Path:
    """Build through the hooks that pip uses: `kind` is "wheel", "editable" or "sdist"."""
    code = f"import hatchling.build, sys; print(hatchling.build.build_{kind}(sys.argv[1]))"
    target.mkdir(parents=True, exist_ok=True)
    printed = _check([sys.executable, "-c", code, str(target)], clean_environ(), cwd=project)
    return target / printed.split()[-1]


def copy_build_requirements(target: Path) -> Path:
    """hatchling and what it needs in one folder, for builds without isolation or network."""
    for found in _with_requirements("hatchling", set()):
        for file in found.files or ():
            if not file.as_posix().startswith("..") and "__pycache__" not in file.parts:
                destination = target / file.as_posix()
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(file.locate()), destination)
    return target


def _with_requirements(name: str, seen: set[str]) -> Iterator[Distribution]:
    seen.add(name)
    found = distribution(name)
    yield found
    for requirement in map(Requirement, found.requires or ()):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen:
            yield from _with_requirements(requirement.name, seen)


def loaded_modules(environment: Environment, **env: str) -> set[str]:
    """What sys.modules has after a bare start."""
    code = "import sys; names = sorted(sys.modules); import json; print(json.dumps(names))"
    return set(json.loads(environment.output("-c", code, env=env)))
