"""The two start files: their bytes, where they land, and what the entry point resolves to."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from tests.startup import environments
from tests.startup.conftest import Built
from tests.startup.environments import WAITING, Environment

pytestmark = pytest.mark.startup

PTH = b"import ck_patch._bootstrap; ck_patch._bootstrap.start()\n"
START = b"ck_patch._bootstrap:start\n"


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_both_start_files_lie_at_the_root_of_the_wheel_with_exactly_these_bytes(
    built: Built, kind: str
) -> None:
    with zipfile.ZipFile(getattr(built, kind)) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    assert files["ck_patch.pth"] == PTH
    assert files["ck_patch.start"] == START
    record = files["ck_patch-0.1.0.dist-info/RECORD"].decode().splitlines()
    for name, content in (("ck_patch.pth", PTH), ("ck_patch.start", START)):
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert f"{name},sha256={digest},{len(content)}" in record


def test_the_editable_file_of_the_build_back_end_has_another_name_and_comes_first(
    built: Built,
) -> None:
    with zipfile.ZipFile(built.editable) as wheel:
        start_files = sorted(n for n in wheel.namelist() if n.endswith((".pth", ".start")))
    # `site` reads .pth files in this order, so the path is there before the import.
    assert start_files == ["_ck_patch.pth", "ck_patch.pth", "ck_patch.start"]


def test_the_wheel_has_every_file_of_the_package_and_no_other(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {
        file.relative_to(built.project).as_posix()
        for file in (built.project / "ck_patch").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts  # from environments that run it
    }
    assert found == wanted | {"ck_patch.pth", "ck_patch.start"}
    assert "ck_patch/py.typed" in found


def test_a_wheel_built_from_the_sdist_is_the_same(built: Built, tmp_path: Path) -> None:
    sdist = environments.build(built.project, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None
            target = tmp_path / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())
    wheel = environments.build(tmp_path / "ck_patch-0.1.0", tmp_path / "wheel")
    with zipfile.ZipFile(built.wheel) as one, zipfile.ZipFile(wheel) as two:
        assert {n: one.read(n) for n in one.namelist()} == {n: two.read(n) for n in two.namelist()}


def test_the_start_file_names_what_the_pth_file_calls(installed: Environment) -> None:
    """By hand what PEP 829 has Python 3.15 do: import the module, call the name."""
    code = (
        "import importlib, pathlib, sys\n"
        f"site = {str(installed.site_packages)!r}\n"
        "sys.path.insert(0, site)\n"
        "lines = pathlib.Path(site, 'ck_patch.start').read_text('utf-8').splitlines()\n"
        "for line in lines:\n"
        "    module, name = line.split(':')\n"
        "    getattr(importlib.import_module(module), name)()\n"
        f"print(len(lines), {WAITING})\n"
    )
    assert installed.output("-S", "-c", code) == "1 1"
    # After the .pth, as if both ran.
    assert installed.output("-c", code) == "1 1"
