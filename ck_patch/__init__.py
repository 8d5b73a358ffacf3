"""Faster INT8 linears for comfy_kitchen: `enable`, `disable` and `status`.

Interpreter start-up imports this module, so it imports nothing itself.
"""

# What type checkers take for typing.TYPE_CHECKING, without the import of typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from ck_patch.patcher import Status

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "status"]


def enable() -> None:
    """Patch every slot that fits the installed comfy_kitchen; repeated calls change nothing."""
    from ck_patch import patcher

    patcher.enable()


def disable() -> None:
    """Put stock back wherever the function in place is still ours."""
    from ck_patch import patcher

    patcher.disable()


def status() -> "Status":
    """What is patched now, read from the live objects, and the reason where nothing is."""
    from ck_patch import patcher

    return patcher.status()
