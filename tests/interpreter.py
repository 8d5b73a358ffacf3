"""Runs the tests marked `interpreter` in one pytest of their own, where Triton interprets kernels.

Triton decides between compiling and interpreting once, when it is imported, so that both kinds of
test cannot share a process. Every such test is still collected, selected and reported here, one by
one; only its body runs elsewhere. With TRITON_INTERPRET=1 set outside it runs in place, for
debuggers: `TRITON_INTERPRET=1 pytest tests/ops`.

A folder with such tests imports the hooks into its conftest.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import pytest

MARK = "interpreter"


def interpreting() -> bool:
    """Whether this very process is one in which Triton interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class _Worker:
    """The other pytest, running the given tests in order; its reports are read as they come."""

    def __init__(self, config: pytest.Config, node_ids: Sequence[str]) -> None:
        self._config = config
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=config.rootpath,
            env=_environment(),
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            json.dump([*_options(config), *node_ids], stdin)

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of one test: setup, call and teardown, or one failure that says why not."""
        reports = self._reports.setdefault(item.nodeid, [])
        assert self._process.stdout is not None
        while not (reports and reports[-1].when == "teardown"):
            line = self._process.stdout.readline()
            if not line:
                return [self._no_report(item)]
            report = self._config.hook.pytest_report_from_serializable(
                config=self._config, data=json.loads(line)
            )
            if isinstance(report, pytest.TestReport):
                if isinstance(report.longrepr, list):  # JSON's idea of the tuple of a skip.
                    path, line, reason = report.longrepr
                    report.longrepr = path, line, reason
                self._reports.setdefault(report.nodeid, []).append(report)
        return self._reports.pop(item.nodeid)

    def _no_report(self, item: pytest.Item) -> pytest.TestReport:
        status = self._process.wait()
        self._errors.seek(0)
        why = f"the interpreter's pytest ended with status {status}:\n{self._errors.read()}"
        keywords: dict[str, Literal[1]] = dict.fromkeys(item.keywords, 1)
        return pytest.TestReport(item.nodeid, item.location, keywords, "failed", why, "setup")

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


_WORKER = pytest.StashKey[_Worker]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARK}: runs where Triton interprets kernels, in a process of its own"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if MARK not in item.keywords:
        return
    from tests.interpreter_facts import interpreter_fault

    fault = interpreter_fault()
    if fault is not None:
        pytest.skip(fault)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if MARK not in item.keywords or interpreting():
        return None
    config = item.config
    if _WORKER not in config.stash:
        node_ids = [other.nodeid for other in item.session.items if MARK in other.keywords]
        worker = config.stash[_WORKER] = _Worker(config, node_ids)
        config.add_cleanup(worker.close)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in config.stash[_WORKER].reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What the test before this one left set up for this folder, if the next one is elsewhere.
    item.session._setupstate.teardown_exact(nextitem)
    return True


def _environment() -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("CK_PATCH")}
    # An installed .pth would patch the entry that tests take for stock. The interpreter works on
    # the CPU; an op that saw a GPU would stand aside.
    return clean | {"TRITON_INTERPRET": "1", "CK_PATCH": "0", "CUDA_VISIBLE_DEVICES": ""}


def _options(config: pytest.Config) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        options += ["-c", str(config.inipath)]
    return options + [f"-W{text}" for text in config.known_args_namespace.pythonwarnings or ()]


class _Reporter:
    """Inside the other pytest: writes each report as one line of JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        data: dict[str, Any] | None = self._config.hook.pytest_report_to_serializable(
            config=self._config, report=report
        )
        print(json.dumps(data), file=self._stream, flush=True)


def _main() -> int:
    # What tests print must not mix with the reports.
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        return int(pytest.main(json.load(sys.stdin), plugins=[_Reporter(stream)]))


if __name__ == "__main__":
    sys.exit(_main())
