"""The one-shot finder inside this process, against finders and loaders of every kind."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ck_patch import _import_hook
from ck_patch._import_hook import Finder

NAME = "host_of_the_hook_tests"


class Host:
    """A module on the path, and how often it was run and reported."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.reports: list[bool] = []
        self.finder = Finder(NAME, self.report)

    def report(self) -> None:
        self.reports.append(NAME in sys.modules)

    def write(self, text: str) -> None:
        self.file.write_text(text)
        importlib.invalidate_caches()

    @property
    def waits(self) -> bool:
        return any(finder is self.finder for finder in sys.meta_path)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / f"{NAME}.py"
    file.write_text("import sys\nloader = __spec__.loader\n")
    found = Host(file)
    # An installed start file has put a finder of its own into the process that runs the tests.
    others = [finder for finder in sys.meta_path if type(finder).__module__ != Finder.__module__]
    monkeypatch.setattr(sys, "meta_path", [found.finder, *others])
    yield found
    sys.modules.pop(NAME, None)


class Asked(MetaPathFinder):
    """A finder that answers with what a function says."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        return self.answer(fullname) if fullname == NAME else None


def test_it_reports_once_and_leaves(host: Host) -> None:
    module = importlib.import_module(NAME)
    assert host.reports == [True]
    assert not host.waits
    assert type(module.loader) is SourceFileLoader
    assert module.__loader__ is module.loader
    importlib.reload(module)
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert host.reports == [True]


def test_a_failed_import_leaves_it_in_place(host: Host) -> None:
    host.write("raise SystemExit('the host ends')")
    with pytest.raises(SystemExit, match="the host ends"):
        importlib.import_module(NAME)
    assert (host.reports, host.waits) == ([], True)
    host.write("answer = 42")
    assert importlib.import_module(NAME).answer == 42
    assert (host.reports, host.waits) == ([True], False)


def test_looking_without_importing_reports_nothing(host: Host) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    assert spec.loader.get_filename(NAME) == str(host.file)  # type: ignore[attr-defined]
    assert "import sys" in spec.loader.get_source(NAME)  # type: ignore[attr-defined]
    assert not hasattr(spec.loader, "no_such_thing")
    assert copy.copy(spec.loader).get_filename(NAME) == str(host.file)  # type: ignore[attr-defined]
    assert (host.reports, host.waits) == ([], True)
    importlib.import_module(NAME)
    assert host.reports == [True]


def test_a_private_copy_of_the_module_does_not_count(host: Host) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert type(module.__spec__.loader) is SourceFileLoader  # type: ignore[union-attr]
    assert (host.reports, host.waits) == ([], True)
    importlib.import_module(NAME)
    assert (host.reports, host.waits) == ([True], False)


def test_a_lazy_loader_around_it_reports_when_the_module_runs(host: Host) -> None:
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    assert host.reports == []
    assert type(module.loader) is SourceFileLoader
    assert host.reports == [True]


def test_a_module_that_replaces_itself_counts(host: Host) -> None:
    host.write("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(answer=42)")
    assert importlib.import_module(NAME).answer == 42
    assert (host.reports, host.waits) == ([True], False)


def test_a_finder_that_asks_all_finders_itself_is_answered(host: Host) -> None:
    asking = False

    def ask(name: str) -> ModuleSpec | None:
        nonlocal asking
        if asking:
            return None
        asking = True
        try:
            return importlib.util.find_spec(name)
        finally:
            asking = False

    sys.meta_path.insert(1, Asked(ask))
    sys.meta_path.insert(0, Asked(ask))
    assert type(importlib.import_module(NAME).loader) is SourceFileLoader
    assert (host.reports, host.waits) == ([True], False)


def test_a_finder_that_asks_all_the_others_as_ours_does_is_not_asked_for_ever(
    host: Host,
) -> None:
    def ask(name: str) -> ModuleSpec | None:
        for finder in sys.meta_path:
            spec = finder.find_spec(name, None) if finder is not other else None
            if spec is not None:
                return spec
        return None

    other = Asked(ask)
    sys.meta_path.insert(1, other)
    assert type(importlib.import_module(NAME).loader) is SourceFileLoader
    assert (host.reports, host.waits) == ([True], False)


def test_a_finder_in_front_of_ours_is_asked_once(host: Host) -> None:
    asked: list[str] = []
    sys.meta_path.insert(0, Asked(asked.append))
    importlib.import_module(NAME)
    assert asked == [NAME]


def test_a_finder_that_raises_raises_as_before(host: Host) -> None:
    def refuse(name: str) -> None:
        raise ImportError("not here")

    sys.meta_path.insert(1, Asked(refuse))
    with pytest.raises(ImportError, match="not here"):
        importlib.import_module(NAME)
    del sys.meta_path[1]
    importlib.import_module(NAME)
    assert (host.reports, host.waits) == ([True], False)


def test_finders_without_find_spec_are_passed_over(host: Host) -> None:
    sys.meta_path.insert(1, object())  # type: ignore[arg-type]
    importlib.import_module(NAME)
    assert host.reports == [True]


def test_a_finder_that_answers_twice_with_one_spec_gets_one_wrapper(host: Host) -> None:
    spec = ModuleSpec(NAME, SourceFileLoader(NAME, str(host.file)), origin=str(host.file))
    sys.meta_path.insert(1, Asked(lambda _: spec))
    importlib.util.find_spec(NAME)
    wrapper = spec.loader
    importlib.util.find_spec(NAME)
    assert spec.loader is wrapper
    assert type(importlib.import_module(NAME).loader) is SourceFileLoader
    assert host.reports == [True]


def test_a_spec_that_cannot_be_changed_is_left_alone(host: Host) -> None:
    class Fixed(ModuleSpec):
        def __setattr__(self, name: str, value: object) -> None:
            if name == "loader" and hasattr(self, "loader"):
                raise AttributeError(name)
            super().__setattr__(name, value)

    fixed = Fixed(NAME, SourceFileLoader(NAME, str(host.file)), origin=str(host.file))
    sys.meta_path.insert(1, Asked(lambda _: fixed))
    importlib.import_module(NAME)
    assert (host.reports, host.waits) == ([], True)


def test_a_loader_without_exec_module_is_left_alone(host: Host) -> None:
    class Old:
        pass

    old = Old()
    found = ModuleSpec(NAME, old)  # type: ignore[arg-type]
    sys.meta_path.insert(1, Asked(lambda _: found))
    spec = importlib.util.find_spec(NAME)
    assert spec is found
    assert spec.loader is old  # type: ignore[comparison-overlap]


def test_a_folder_without_code_is_no_host(host: Host) -> None:
    host.file.unlink()
    host.file.with_suffix("").mkdir()
    importlib.invalidate_caches()
    assert importlib.import_module(NAME).__file__ is None
    del sys.modules[NAME]
    host.file.with_suffix("").rmdir()
    host.write("")
    importlib.import_module(NAME)
    assert host.reports == [True]


def test_a_host_that_is_missing_raises_as_before(host: Host) -> None:
    host.file.unlink()
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{NAME}'"):
        importlib.import_module(NAME)
    assert host.waits


def test_somebody_else_may_take_it_out_at_any_time(host: Host) -> None:
    host.write("import sys\ndel sys.meta_path[0]")
    importlib.import_module(NAME)
    assert (host.reports, host.waits) == ([True], False)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, GeneratorExit, RecursionError])
def test_a_callback_that_raises_does_not_fail_the_import(
    host: Host, error: type[BaseException]
) -> None:
    def report() -> None:
        raise error

    sys.meta_path[0] = Finder(NAME, report)
    assert importlib.import_module(NAME).loader
    assert not _import_hook.is_waiting()


def test_the_callback_may_import_and_reload_the_host(host: Host) -> None:
    def report() -> None:
        host.reports.append(True)
        importlib.reload(importlib.import_module(NAME))

    sys.meta_path[0] = Finder(NAME, report)
    importlib.import_module(NAME)
    assert host.reports == [True]


def test_only_one_waits_at_a_time(host: Host) -> None:
    _import_hook.call_after_import(NAME, host.report)
    assert sys.meta_path[0] is host.finder
    importlib.import_module(NAME)
    assert host.reports == [True]
