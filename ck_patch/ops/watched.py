"""Whether somebody else watches torch's operations, who would not see what our kernels do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext


def _of_torch(owner: Any, name: str, default: object) -> Callable[[], Any]:
    """A function of torch that is not public, or what answers `default` where it is missing."""
    found: Callable[[], Any] = getattr(owner, name, lambda: default)
    return found


_is_compiling = torch.compiler.is_compiling
# Modes: FakeTensorMode, make_fx, a counter or a debugger of the caller's.
_modes = _of_torch(torch._C, "_len_torch_dispatch_stack", 0)
_function_modes = _of_torch(torch._C, "_len_torch_function_stack", 0)
# vmap, jvp, grad and functionalize: their tensors are of type Tensor, and have no memory to read.
_transform = _of_torch(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
_jit_traces = _of_torch(torch._C, "_is_tracing", False)
_dual: Any = (
    forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=-1)
)


def watched() -> bool:
    """Whether stock has to run, for a tracer, a transform, forward-mode derivatives or a mode.

    Asked at every call. Dynamo knows the first answer, traces stock in our place, and never comes
    to the others.
    """
    return (
        _is_compiling()
        or _modes() > 0
        or (_function_modes() > 0 and _functions_are_seen())
        or _transform() is not None
        or _dual._current_level >= 0
        or _jit_traces()
    )


def _functions_are_seen() -> bool:
    """Whether a function mode is on that is not torch's own for a default device."""
    modes = (torch._C._get_function_stack_at(place) for place in range(_function_modes()))
    return any(type(mode) is not DeviceContext for mode in modes)
