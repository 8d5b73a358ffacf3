"""The contract between the patcher and an op: what a factory is given and what it hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Replacement(Protocol):
    """One op, built and ready to be installed in place of the stock function it was built from."""

    @property
    def function(self) -> Function:
        """The function to install; the same object at every access."""

    def deactivate(self) -> None:
        """Pass every further call straight to stock, for good.

        The patcher calls this when it takes the function out: another patcher, or a caller that
        kept a reference, may go on calling it.
        """


Factory = Callable[[Function, OpContext], Replacement]
"""`build(stock, context)`; called under the patcher's lock, so it must not import the host."""
