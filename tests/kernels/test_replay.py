"""What reaches the C function of a compiled kernel: the same by replay as by the runner."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from ck_patch.kernels import replay as module
from ck_patch.kernels.replay import Replay, replay

REST = (0, 0, 77, 384, "cutlass", True, 64)
ADDRESSES = (11, 12, 13)
GRID = (5, 1, 1)
SIZES = ("size", "align")
Given = list[tuple[Any, ...]]


class Launcher:
    """Calls `launch` as Triton's launchers do: before 3.7, or since then (`grouped`)."""

    global_scratch_size = 0

    def __init__(self, launch: Callable[..., None], grouped: bool) -> None:
        self.launch = launch
        self.grouped = grouped

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
        hooks, kernel_args = args[:4], args[4:]
        if self.grouped:
            self.launch(x, y, z, stream, function, False, *hooks, None, b"types", kernel_args)
        else:
            self.launch(x, y, z, stream, function, False, None, *hooks, *kernel_args)


class Compiled:
    """Stands in for Triton's compiled kernel; `given` has what the C function was called with."""

    function = 4711
    packed_metadata = (4, 1, 0)

    def __init__(self, make: Callable[[Callable[..., None]], Any]) -> None:
        self.given: Given = []
        self.runs = 0
        self.run = make(lambda *given: self.given.append(given))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def runner(*args: Any, stream: int) -> None:
            self.runs += 1
            hooks = _hooks()
            found = (hooks.launch_enter_hook, hooks.launch_exit_hook)
            set_ones = tuple(hook if getattr(hook, "calls", hook) else None for hook in found)
            self.run(*grid, stream, self.function, self.packed_metadata, None, *set_ones, *args)

        return runner


def _hooks() -> Any:
    return triton.knobs.runtime if hasattr(triton, "knobs") else triton.compiler.CompiledKernel


def of_triton(launch: Callable[..., None]) -> Any:
    """The launcher of the installed Triton, around another C function; it needs no GPU."""
    from triton.backends.nvidia.driver import CudaLauncher

    launcher = object.__new__(CudaLauncher)
    scratch = {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in SIZES}
    flags = dict.fromkeys(("launch_cooperative_grid", "launch_pdl", "gsan_enabled"), False)
    vars(launcher).update(scratch, **flags, num_ctas=1, arg_annotations=(), kernel_signature=b"t")
    vars(launcher)["launch"] = launch
    return launcher


LAUNCHERS: dict[str, Callable[[Callable[..., None]], Any]] = {
    "flat": lambda launch: Launcher(launch, grouped=False),
    "grouped": lambda launch: Launcher(launch, grouped=True),
    "installed": of_triton,
}


@pytest.fixture
def active_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that is there without a GPU: newer launchers of Triton's ask for it."""
    driver = SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace()))
    monkeypatch.setattr(triton.runtime, "driver", driver)


def replayed(compiled: Compiled) -> Replay:
    return replay(compiled, GRID[0], len(ADDRESSES), REST)


every_launcher = pytest.mark.parametrize("make", LAUNCHERS.values(), ids=LAUNCHERS.keys())


@every_launcher
@pytest.mark.usefixtures("active_driver")
def test_the_c_function_gets_what_the_runner_would_give_it(make: Any) -> None:
    compiled = Compiled(make)
    launch = replayed(compiled)
    assert compiled.given == []
    launch(ADDRESSES, 7)
    launch([21, 22, 23], 8)
    assert compiled.runs == 0
    for addresses, stream in ((ADDRESSES, 7), ((21, 22, 23), 8)):
        compiled[GRID](*addresses, *REST, stream=stream)
    direct, by_runner = compiled.given[:2], compiled.given[2:]
    assert direct == by_runner


@every_launcher
@pytest.mark.usefixtures("active_driver")
@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_hook_is_the_runners_to_call_while_it_is_set(
    make: Any, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled(make)
    launch = replayed(compiled)
    hooks, hook = _hooks(), lambda metadata: None
    chain = getattr(hooks, which)
    if chain is None:
        monkeypatch.setattr(hooks, which, hook)
    else:
        chain.add(hook)
    try:
        launch(ADDRESSES, 7)
        assert compiled.runs == 1
    finally:
        if chain is None:
            monkeypatch.setattr(hooks, which, None)
        else:
            chain.remove(hook)
    launch(ADDRESSES, 7)
    assert (compiled.runs, len(compiled.given)) == (1, 2)


def with_scratch(launch: Callable[..., None]) -> Any:
    launcher = Launcher(launch, grouped=False)
    launcher.global_scratch_size = 8
    return launcher


def in_one_piece(launch: Callable[..., None]) -> Any:
    """A launcher that does not look `launch` up; its C function wants a number for a stream."""

    class Sealed(Launcher):
        def __call__(self, x: int, y: int, z: int, stream: int, *args: Any) -> None:
            launch(x, y, z, stream + 0, *args)

    return Sealed(launch, grouped=False)


class AddsOne(Launcher):
    def __call__(self, *given: Any) -> None:
        super().__call__(*given, 1)


UNKNOWN: dict[str, Callable[[Callable[..., None]], Any]] = {
    "scratch memory": with_scratch,
    "one argument more": lambda launch: AddsOne(launch, grouped=False),
    "one grouped argument more": lambda launch: AddsOne(launch, grouped=True),
    "another way to launch": in_one_piece,
    "no launcher": lambda launch: None,
}


@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_where_in_doubt_every_launch_is_the_runners(make: Any) -> None:
    compiled = Compiled(make)
    launch = replayed(compiled)
    assert compiled.given == []
    if compiled.run is None:
        compiled.run = Launcher(lambda *given: compiled.given.append(given), grouped=False)
    for count in (1, 2):
        launch(ADDRESSES, 7)
        assert (compiled.runs, len(compiled.given)) == (count, count)


def test_a_triton_whose_hooks_are_elsewhere_is_launched_by_its_runner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> Any:
        raise AttributeError("runtime")

    monkeypatch.setattr(module, "_holder_of_hooks", missing)
    compiled = Compiled(LAUNCHERS["flat"])
    replayed(compiled)(ADDRESSES, 7)
    assert (compiled.runs, len(compiled.given)) == (1, 1)
