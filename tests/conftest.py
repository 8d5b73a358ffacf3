"""Fixtures that test folders share: GPU markers, records, and interpreters to break things in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure is not for the user's table, nor is what that has for the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CK_PATCH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record",
        type=Path,
        metavar="FILE",
        help="write what the GPU tests measured and compared to FILE, as JSON",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are; ask torch only when a test needs one."""
    needs = {"gpu": 1, "gpu2": 2}
    marked = [(item, n) for item in items for mark, n in needs.items() if mark in item.keywords]
    if not marked:
        return
    import torch

    present = torch.cuda.device_count()
    for item, needed in marked:
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {present}"))


class Record:
    """Rows that the tests of this run measured or compared, by the name of the table."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def add(self, table: str, **row: Any) -> None:
        self.tables.setdefault(table, []).append(row)


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    """What the GPU tests saw; `--record FILE` keeps it."""
    record = Record()
    yield record
    target: Path | None = request.config.getoption("--record")
    if target is None:
        return
    from ck_patch.stamp import stamp

    session = request.session
    document = {
        "stamp": stamp(),
        "command": _command(request.config, target.name),
        "tests": {"collected": session.testscollected, "failed": session.testsfailed},
        **record.tables,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _command(config: pytest.Config, record: str) -> str:
    """What makes this run again."""
    option, words = config.option, ["./scripts/test.sh", "-m", config.option.markexpr]
    if option.keyword:
        words += ["-k", option.keyword]
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        words += config.args
    return shlex.join([*words, "--record", record])


class WarmInterpreter:
    """A Python process with torch already imported that forks one fresh child per script.

    Starting Python with torch takes seconds, forking it milliseconds, and what a child imports,
    patches or breaks is gone with it.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        script: str,
        *,
        env: Mapping[str, str] | None = None,
        site: Path | None = None,
        first: Sequence[Path] = (),
    ) -> Any:
        """Run `script` in a child and return what it assigned to `result`, by way of JSON.

        `env` is added to the environment. `site` stands in for every installed package, `first`
        goes to the head of `sys.path`. What the child raises fails the test.
        """
        request = {
            "script": script,
            "env": dict(env or {}),
            "site": str(site) if site else None,
            "first": [str(path) for path in first],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            pytest.fail(f"the child failed:\n{answer['error']}", pytrace=False)
        return answer["result"]


@pytest.fixture(scope="session")
def warm_interpreter() -> Iterator[WarmInterpreter]:
    """One warm interpreter for the whole run; skips where torch or fork is missing."""
    pytest.importorskip("torch")
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    env = {name: text for name, text in os.environ.items() if not name.startswith("CK_PATCH")}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "CK_PATCH": "0"}
    server = Path(__file__).with_name("fork_server.py")
    with subprocess.Popen(
        [sys.executable, str(server), str(REPOSITORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        yield WarmInterpreter(process)
        assert process.stdin is not None
        process.stdin.close()


class SitePackages:
    """A copy of the installed packages, by symbolic links, to take away from and add to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        for scheme in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(scheme).iterdir():
                if entry.suffix not in {".pth", ".start"} and entry.name != "ck_patch":
                    path.joinpath(entry.name).symlink_to(entry)

    def remove(self, name: str) -> None:
        """Take a package and its metadata away."""
        for entry in [*self.path.glob(name), *self.path.glob(f"{name}-*.dist-info")]:
            entry.unlink()

    def write(self, name: str, text: str) -> None:
        """Put a file of that relative name there."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def release(self, version: str, folder: str = "comfy_kitchen-0.dist-info") -> None:
        """Say that the installed comfy-kitchen is of that version."""
        for entry in self.path.glob("comfy_kitchen-*.dist-info"):
            if entry.is_symlink():
                entry.unlink()
        text = f"Metadata-Version: 2.4\nName: comfy-kitchen\nVersion: {version}\n"
        self.write(f"{folder}/METADATA", text)


@pytest.fixture
def site_packages(tmp_path: Path) -> SitePackages:
    """A private copy of site-packages."""
    return SitePackages(tmp_path / "site-packages")
