"""The command line itself: what it accepts, and how it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ck_patch
from ck_patch import cli
from tests.commands import running
from tests.conftest import REPOSITORY


def test_the_version_is_the_package_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"ck_patch {ck_patch.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["info", "--no-such-option"],
        ["info", "surplus"],
        ["demo", "--json"],
        ["demo", "--json", "no-such-folder/out.json"],
        ["demo", "--json", "."],
        ["demo", "--json", "name" * 100],
        ["demo", "--shape", "1x2"],
        ["demo", "--shape", "1x2x"],
        ["demo", "--shape", "1x-2x3"],
        ["demo", "--shape", "1x2x²"],
        ["demo", "--shape", "0x8x16"],
        ["demo", "--shape", "1048577x1048576x16"],
        ["demo", "--shape", "9" * 5000 + "x8x16"],
    ],
)
def test_a_usage_error_ends_with_2_and_prints_nothing_on_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: ck-patch" in printed.err


@pytest.mark.parametrize(
    "text", ["1" * 100_000, "9" * 100_000 + "x8x16", "x" * 100_000, "1x8x16" * 20_000]
)
@pytest.mark.parametrize("option", [["bench", "--shapes"], ["demo", "--shape"]])
def test_an_error_does_not_repeat_all_of_a_long_text(
    option: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([*option, text])
    assert len(capsys.readouterr().err) < 2000


def test_the_console_script_and_the_module_run_the_same_function() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^ck-patch = "ck_patch\.cli:main"$', project, re.MULTILINE)
    done = running.ck_patch("--version")
    assert (done.returncode, done.stdout) == (0, f"ck_patch {ck_patch.__version__}\n")


def test_the_help_imports_neither_torch_nor_the_host() -> None:
    done = running.python(
        "-c",
        "import sys\n"
        "from ck_patch import cli\n"
        "try: cli.main(['demo', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'triton', 'comfy_kitchen', 'wrapt'} & set(sys.modules)))",
    )
    assert done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.skipif(os.name == "nt", reason="there a broken pipe is another error")
def test_a_reader_that_has_seen_enough_gets_no_traceback(tmp_path: Path) -> None:
    _without_packages(tmp_path)
    command = [sys.executable, "-m", "ck_patch", "info"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (1, "")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, encoding: str) -> None:
    folder = tmp_path / "Ünï 数"
    folder.mkdir()
    _without_packages(folder)
    done = running.ck_patch("info", first=[folder], PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ck_patch" in done.stdout


def _without_packages(folder: Path) -> None:
    """Shadow what takes long to import."""
    for name in ("torch", "triton", "comfy_kitchen"):
        (folder / f"{name}.py").write_text("raise ImportError", encoding="utf-8")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_disk_below_stdout_is_one_line(tmp_path: Path) -> None:
    done = _with_stdout("/dev/full", tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "ck_patch info: [Errno 28] No space left on device\n",
    )


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    done = _with_stdout("&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def _with_stdout(target: str, packages: Path) -> subprocess.CompletedProcess[str]:
    """Run `info`, with its standard output where a shell's > sends it."""
    _without_packages(packages)
    env = os.environ | {"PYTHONPATH": f"{packages}{os.pathsep}{REPOSITORY}"}
    command = f'exec "$0" -m ck_patch info >{target}'
    return subprocess.run(
        ["/bin/sh", "-c", command, sys.executable], env=env, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("info", "ck_patch info: interrupted\n"),
        ("tune", "ck_patch tune: interrupted; the choices made so far are kept\n"),
    ],
)
def test_an_interrupt_is_one_line_and_the_exit_code_of_a_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, line: str
) -> None:
    def interrupt(options: object) -> int:
        print("what was shown")
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_command", interrupt)
    assert cli.main([command]) == 130
    assert capsys.readouterr() == ("what was shown\n", line)
