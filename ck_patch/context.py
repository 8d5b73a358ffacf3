"""The contract of patcher and op: what a factory gets and hands back, and whose a function is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ck_patch.breaker import Breaker
from ck_patch.releases import Release
from ck_patch.settings import Settings
from ck_patch.tuner import Tuner

Function = Callable[..., Any]


@dataclass(frozen=True)
class OpContext:
    """What every op of this process is built with.

    `check_first` is true for a release newer than any that was tested: the first real call of the
    op is then compared with stock on its own inputs before the op's result is used. `tuner` is the
    same for all ops.
    """

    settings: Settings
    breaker: Breaker
    release: Release
    check_first: bool
    tuner: Tuner = field(default_factory=Tuner)


class Refused(Exception):
    """Raised by a factory: the slot stays on stock, for the reason that the text gives."""


class Op:
    """What stands in a slot: built, and ready to be installed in place of the stock function that
    it was built from.

    `function` has stock's signature, name and docstring, and asks `_active` at each call.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._active = True
        # A wrapt wrapper keeps names that begin with _self_, and hands others to what it wraps.
        function._self_ck_patch_op = self  # type: ignore[attr-defined]

    @property
    def function(self) -> Function:
        """The function to install; the same object at every access."""
        return self._function

    @property
    def active(self) -> bool:
        """Whether calls are still ours."""
        return self._active

    def deactivate(self) -> None:
        """Pass every further call straight to stock, or to what is as good as stock, for good.

        The patcher calls this when it takes the function out: another patcher, or a caller that
        kept a reference, may go on calling it.
        """
        self._active = False


def op_of(function: object) -> Op | None:
    """The op whose function this is, active or not. What wraps ours is not ours."""
    op: Op | None = getattr(function, "_self_ck_patch_op", None)
    # By identity: a wrapper may have the attributes of what it wraps.
    return op if op is not None and op._function is function else None


Factory = Callable[[Function, OpContext], Op]
"""`build(stock, context)`; called under the patcher's lock, so it must not import the host."""
