"""The eager backend of the host, for calls that another backend's kernels cannot run."""

from __future__ import annotations

import sys
from typing import Any


def module() -> Any:
    """`comfy_kitchen.backends.eager`, as it is now: its functions may be ours."""
    return sys.modules["comfy_kitchen.backends.eager"]


def linear_is_ours() -> bool:
    """Whether its `int8_linear` is ours, and has not been told to leave every call to stock."""
    function = module().int8_linear
    op = getattr(function, "ck_patch_op", None)
    # What wraps ours may have its attributes.
    return op is not None and op.function is function and op.active
