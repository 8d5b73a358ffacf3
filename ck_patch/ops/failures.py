"""What an op does about a failure of its own: stock gets the call, and one line says why."""

from __future__ import annotations

from ck_patch import log
from ck_patch.breaker import Breaker, classify


class Failures:
    """Accounts for the failures of one operation."""

    def __init__(self, operation: str, breaker: Breaker) -> None:
        self._operation = operation
        self._breaker = breaker

    def reason(self, device: int) -> str | None:
        """Why the operation stays on stock on that device, or None."""
        return self._breaker.reason(self._operation, device)

    def account(self, error: Exception, device: int) -> bool:
        """Log the error and return whether it keeps the operation on stock from now on; raises it
        again if stock cannot help, because the CUDA context is dead."""
        failure = classify(error)
        if failure == "sticky":
            raise error
        if failure == "memory":
            log.once(
                f"{self._operation} memory",
                f"{self._operation}: out of memory, this call goes to stock",
            )
            return False
        lines = str(error).strip().splitlines() or [""]
        self.open(device, f"{type(error).__name__}: {lines[0]}")
        return True

    def open(self, device: int, reason: str) -> None:
        """Keep the operation on stock on that device."""
        if self._breaker.open(self._operation, device, reason):
            where = f"device {device}" if device >= 0 else "the CPU"
            log.warn(
                f"{self._operation} breaker {device}",
                f"{self._operation} stays on stock on {where} ({reason}); "
                "CK_PATCH_INT8=stock avoids the attempt, CK_PATCH=0 turns ck_patch off",
            )
