"""What an op does about a failure of its own: stock gets the call, and one line says why."""

from __future__ import annotations

from ck_patch import log
from ck_patch.breaker import Breaker, classify, describe, text_of

# What the caller set or did may last: so many attempts on each device, and no more.
_ATTEMPTS = 16


class Failures:
    """Accounts for the failures of one operation."""

    def __init__(self, operation: str, breaker: Breaker) -> None:
        self._operation = operation
        self._breaker = breaker
        self._attempts: dict[int, int] = {}

    def reason(self, device: int) -> str | None:
        """Why the operation stays on stock on that device, or None."""
        return self._breaker.reason(self._operation, device)

    def excluded(self, device: int, candidate: str) -> bool:
        """Whether the operation does without that candidate on that device."""
        return self._breaker.reason(f"{self._operation} by {candidate}", device) is not None

    def exclude(self, device: int, candidate: str, reason: str) -> None:
        """Have the operation do without a candidate on that device, for good."""
        operation = f"{self._operation} by {candidate}"
        if self._breaker.open(operation, device, reason):
            log.warn(
                f"{operation} breaker {device}",
                f"{operation} is not used on {_where(device)} ({reason}); "
                "CK_PATCH_INT8=stock avoids the attempt, CK_PATCH=0 turns ck_patch off",
            )

    def account(self, error: Exception, device: int, candidate: str | None = None) -> bool:
        """Log the error and return whether it keeps the operation, or that candidate, on stock from
        now on; raises it again if stock cannot help, because the CUDA context is dead."""
        failure = classify(error)
        if failure == "sticky":
            raise error
        if failure == "caller":
            self._attempts[device] = self._attempts.get(device, 0) + 1
            if self._attempts[device] >= _ATTEMPTS:
                self.open(device, f"{describe(error)}, {_ATTEMPTS} times")
                return True
        if failure != "other":
            why = "out of memory" if failure == "memory" else describe(error)
            log.once(
                f"{self._operation} {failure}",
                f"{self._operation}: {why}, this call goes to stock",
            )
            return False
        if candidate is None:
            self.open(device, describe(error))
        else:
            self.exclude(device, candidate, describe(error))
        return True

    def open(self, device: int, reason: str) -> None:
        """Keep the operation on stock on that device."""
        if self._breaker.open(self._operation, device, reason):
            log.warn(
                f"{self._operation} breaker {device}",
                f"{self._operation} stays on stock on {_where(device)} ({reason}); "
                "CK_PATCH_INT8=stock avoids the attempt, CK_PATCH=0 turns ck_patch off",
            )


def hand_over(operation: str, error: Exception) -> None:
    """Log that calls go to stock for an error that is not ours: an argument that does not answer,
    or a step of the host's. Stock says it best; raises it again if the CUDA context is dead."""
    failure = classify(error)
    if failure == "sticky":
        raise error
    name = type(error).__name__
    calls = "this call goes" if failure == "memory" else "such calls go"
    log.once(f"{operation} {name}", f"{operation}: {name}, {calls} to stock ({text_of(error)})")


def decline(operation: str, x: object) -> None:
    """Log, under CK_PATCH_LOG=path, that a form of call is stock's."""
    if log.paths_wanted():
        shape = "x".join(map(str, getattr(x, "shape", ())))
        log.path(f"{operation}, x {shape}: stock (a form of call that ours does not take)")


def _where(device: int) -> str:
    return f"device {device}" if device >= 0 else "the CPU"
