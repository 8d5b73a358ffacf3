"""What `ck_patch.pth` and `ck_patch.start` run: has comfy_kitchen patched once it is imported.

Runs at every start of the interpreter, whatever the user starts it for. So it imports nothing that
`site` has not loaded by then, and nothing that goes wrong in it may reach the interpreter.
"""

import os
import sys

HOST = "comfy_kitchen"

# How start() ended, for whoever asks why nothing is patched.
outcome = "start() has not run"


def start() -> None:
    """Wait for comfy_kitchen, or patch it at once if it is there; never raises."""
    global outcome
    try:
        outcome = _start()
    except BaseException as error:
        # `site` catches Exception alone: SystemExit or KeyboardInterrupt would end the interpreter.
        outcome = f"failed with {type(error).__name__}"


def _start() -> str:
    if os.environ.get("CK_PATCH", "").strip().lower() in ("0", "false", "off", "no"):
        return "switched off by CK_PATCH"
    host = sys.modules.get(HOST)
    # The import system's own mark of a module that is still running.
    spec = getattr(host, "__spec__", None)
    if host is not None and not getattr(spec, "_initializing", False):
        _activate()
        return f"{HOST} was there already"
    from ck_patch import _import_hook

    _import_hook.call_after_import(HOST, _activate)
    return f"waits for {HOST}"


def _activate() -> None:
    try:
        import ck_patch

        ck_patch.enable()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        import logging

        reason = f"{type(error).__name__}: {error}"
        logging.getLogger("ck_patch").warning(
            "ck_patch is not active, %s stays on stock (%s); CK_PATCH=0 switches it off",
            HOST,
            reason,
        )
