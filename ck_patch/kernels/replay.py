"""Launching a compiled Triton kernel again and again, for the host time of its C launcher alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

Replay = Callable[[Sequence[Any], int], None]
"""Launches on values for the kernel's leading arguments, on a raw CUDA stream of the current
device."""


def replay(compiled: Any, programs: int, leading: int, rest: Sequence[object]) -> Replay:
    """The launch of `compiled` with so many programs, of whose arguments `leading` are given at
    each launch and `rest` are always the same.

    At each launch Triton's own runner looks for hooks, asks whether the kernel needs scratch memory
    and puts the arguments of a C function together. Those are the same every time but for the
    stream and the leading arguments, so that they are recorded once. The runner itself is used
    while somebody has set a launch hook, and always where recording does not give what it should:
    with scratch memory, or in a Triton that launches in some other way.
    """
    run = compiled[programs, 1, 1]

    def by_runner(values: Sequence[Any], stream: int) -> None:
        run(*values, *rest, stream=stream)

    try:
        direct = _direct(compiled, programs, leading, rest)
        hooks = _holder_of_hooks()
    except Exception:
        return by_runner
    if direct is None:
        return by_runner

    def launch(values: Sequence[Any], stream: int) -> None:
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Since Triton 3.5 each is a chain of hooks, which may be empty.
        if (enter is not None and getattr(enter, "calls", True)) or (
            leave is not None and getattr(leave, "calls", True)
        ):
            by_runner(values, stream)
        else:
            direct(values, stream)

    return launch


def _direct(compiled: Any, programs: int, leading: int, rest: Sequence[object]) -> Replay | None:
    """The launch by the C function, or by what makes its descriptors; None where in doubt."""
    launcher = compiled.run
    if launcher.global_scratch_size or getattr(launcher, "profile_scratch_size", 0):
        return None
    recorded: list[tuple[Any, ...]] = []
    recorder = copy.copy(launcher)
    recorder.launch = lambda *given: recorded.append(given)
    # No C function takes these: what is not recorded, because it is not launched by `launch`, fails
    # instead of running.
    stream_mark, marks = object(), tuple(object() for _ in range(leading))
    packed = compiled.packed_metadata
    hooks = (None, None)
    recorder(programs, 1, 1, stream_mark, compiled.function, packed, None, *hooks, *marks, *rest)
    (given,) = recorded
    function = launcher.launch
    at = given.index(stream_mark)
    head, tail = given[:at], given[at + 1 :]
    if tail[-1] == (*marks, *rest):  # Since Triton 3.7 the kernel's arguments are one of the C's.
        between = tail[:-1]

        def launch_grouped(values: Sequence[Any], stream: int) -> None:
            function(*head, stream, *between, (*values, *rest))

        return launch_grouped
    first = tail.index(marks[0])
    between = tail[:first]
    if tail[first:] != (*marks, *rest):
        return None

    def launch_flat(values: Sequence[Any], stream: int) -> None:
        function(*head, stream, *between, *values, *rest)

    return launch_flat


def _holder_of_hooks() -> Any:
    """What the launch hooks are attributes of; Triton 3.3 has no knobs."""
    import triton  # Which a process that only patches has no need of.

    if hasattr(triton, "knobs"):
        return triton.knobs.runtime
    return triton.compiler.CompiledKernel
