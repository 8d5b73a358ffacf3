"""An op that only counts its calls and hands them to stock: what the patcher is tested with."""

from __future__ import annotations

from typing import Any

from ck_patch.context import Function, Op, OpContext


class Probe(Op):
    """Counts calls while active; `function` is a plain wrapper."""

    def __init__(self, stock: Function, context: OpContext) -> None:
        self.context = context
        self.calls = 0

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls += self._active
            return stock(*args, **kwargs)

        super().__init__(function)


BUILT: list[Probe] = []


def build(stock: Function, context: OpContext) -> Probe:
    """Build a probe and remember it for the test to look at."""
    BUILT.append(Probe(stock, context))
    return BUILT[-1]


def build_nothing(stock: Function, context: OpContext) -> Probe:
    """A factory that fails the way a broken installation does."""
    raise SystemError("PY_SSIZE_T_CLEAN macro must be defined")


not_callable = None
