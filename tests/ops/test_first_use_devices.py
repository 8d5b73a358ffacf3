"""First uses on several devices: none is declined for another one's, and one compiles at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from ck_patch.ops import first_use
from ck_patch.ops.first_use import FirstUse


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are none, and are not captured."""
    monkeypatch.setattr(first_use, "stream_of", lambda pointer, device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Compilation:
    """One that lasts until it is told to end; `left` says what `prove` returned."""

    def __init__(self, uses: FirstUse, device: int) -> None:
        self.left: list[tuple[bool, str | None]] = []
        self._inside, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: self.left.append(self._prove(uses, device)))

    def _prove(self, uses: FirstUse, device: int) -> tuple[bool, str | None]:
        def compile_() -> None:
            self._inside.set()
            assert self._end.wait(60)

        return uses.prove(device, 0, compile_, lambda: None)

    def __enter__(self) -> Compilation:
        self._thread.start()
        assert self._inside.wait(60)
        return self

    def end(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def __exit__(self, *error: object) -> None:
        self.end()


def nothing() -> None:
    """A kernel that runs."""


def test_what_one_device_compiles_keeps_that_device_on_stock_and_no_other() -> None:
    uses = FirstUse()
    with Compilation(uses, 0) as compilation:
        assert not uses.possible(0)
        assert uses.possible(1)
        assert uses.prove(0, 0, nothing, lambda: None) == (False, None)
        compilation.end()
        assert compilation.left == [(True, None)]
        assert uses.possible(0)


@pytest.mark.parametrize("same_op", [True, False])
def test_while_one_device_compiles_another_one_goes_to_stock_and_does_not_wait(
    same_op: bool,
) -> None:
    uses = FirstUse()
    mine = uses if same_op else FirstUse()
    with Compilation(uses, 0) as compilation:
        assert mine.prove(1, 0, nothing, lambda: None) == (False, None)
        compilation.end()
    assert mine.prove(1, 0, nothing, lambda: "differs") == (True, "differs")


@pytest.mark.parametrize("same_op", [True, False])
def test_the_interpreter_runs_as_soon_as_the_compiler_is_free(same_op: bool) -> None:
    uses = FirstUse()
    order: list[str] = []

    def prove(work: Callable[[], None]) -> None:
        mine = uses if same_op else FirstUse()
        assert mine.prove(-1, 0, work, lambda: None) == (True, None)

    with Compilation(uses, 0) as compilation:
        second = threading.Thread(target=prove, args=(lambda: order.append("second"),))
        second.start()
        second.join(0.1)
        assert order == []
        order.append("first")
        compilation.end()
        second.join(60)
    assert order == ["first", "second"]


def test_a_kernel_may_be_compared_with_one_that_has_a_first_use_itself() -> None:
    inner, outer = FirstUse(), FirstUse()
    found = outer.prove(0, 0, nothing, lambda: inner.prove(0, 0, nothing, lambda: "inner")[1])
    assert found == (True, "inner")


def test_what_fails_on_one_device_leaves_it_free_for_the_next_try() -> None:
    uses = FirstUse()

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        uses.prove(0, 0, fail, lambda: None)
    assert uses.possible(0)
    assert uses.prove(0, 0, nothing, lambda: "differs") == (True, "differs")
