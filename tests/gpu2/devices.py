"""Values on one GPU or another, what ran on which, and programs in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from tests.conftest import REPOSITORY

T = TypeVar("T")

GEMM = "_int8_gemm_dequant_"
QUANTIZER = "_quantize_rows_"
"""How the names of our kernels begin; stock's Triton kernels have others."""

# Where a test needs our GEMM to win on an H200: it takes two thirds of stock's time there.
M, N, K = 1024, 4096, 4096

CALLS = 12
"""First use, a few of what a trial has yet to try, and launches of what is known."""

_MARK = "RESULT"


def on(device: int, value: T) -> T:
    """The value with every tensor in it copied to that GPU.

    By way of the CPU: torch's copy between two GPUs would let the kernels of each read the memory
    of the other from then on, and hide who runs on the wrong one.
    """
    found: Any = value
    if isinstance(found, torch.Tensor):
        found = found.detach().cpu().to(torch.device("cuda", device))
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        names = [field.name for field in dataclasses.fields(found)]
        found = dataclasses.replace(found, **{n: on(device, getattr(found, n)) for n in names})
    elif isinstance(found, dict):
        found = {name: on(device, item) for name, item in found.items()}
    return found  # type: ignore[no-any-return]


def back(result: Any) -> tuple[torch.Tensor, ...]:
    """What a function returned, one tensor or several, on the CPU."""
    tensors = (result,) if isinstance(result, torch.Tensor) else result
    return tuple(tensor.detach().cpu() for tensor in tensors)


def same(found: Any, expected: Any) -> bool:
    """Whether two results are equal, wherever they are."""
    pairs = zip(back(found), back(expected), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


class Kernel(NamedTuple):
    """What ran on a GPU: a kernel with its launch, a copy or a fill."""

    name: str
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int = 0


def launched(work: Callable[[], object]) -> dict[int, set[Kernel]]:
    """What ran on which GPU during the work."""
    synchronize()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of what a profiler cannot do besides.
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            synchronize()
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    found: dict[int, set[Kernel]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            given = event["args"]
            kernel = Kernel(
                event["name"],
                tuple(given.get("grid", ())),
                tuple(given.get("block", ())),
                given.get("registers per thread", 0),
            )
            found.setdefault(given["device"], set()).add(kernel)
    return found


def kernels(seen: set[Kernel], start: str) -> set[str]:
    """The names of those that begin so."""
    return {kernel.name for kernel in seen if kernel.name.startswith(start)}


def synchronize() -> None:
    """Wait for all GPUs."""
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def allocations(device: int) -> int:
    """How many blocks of that GPU's memory torch has handed out so far."""
    count: int = torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)
    return count


def answer(**values: Any) -> None:
    """What a program hands back to the test that waits for it."""
    print(_MARK + json.dumps(values))


@dataclasses.dataclass(frozen=True)
class Run:
    """One process: the arguments of its program, and what its environment has of ours."""

    arguments: Sequence[object] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Started:
    """A module of this folder, running as a program in several processes at once.

    Of our variables a process has those of its run, and the folder of this process's tables.
    """

    def __init__(self, program: str, runs: Mapping[str, Run]) -> None:
        ours = {name for name in os.environ if name.startswith("CK_PATCH")} - {"CK_PATCH_CACHE_DIR"}
        base = {name: text for name, text in os.environ.items() if name not in ours}
        self.runs = runs
        self._program = program
        self._answers: dict[str, Any] = {}
        self._processes = {
            name: subprocess.Popen(
                [sys.executable, "-m", f"tests.gpu2.{program}", *map(str, run.arguments)],
                env={**base, **run.environment},
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for name, run in runs.items()
        }

    def answers(self) -> dict[str, Any]:
        """What each one handed to `answer`, by the name of its run; waits for them."""
        for name, process in self._processes.items():
            if name not in self._answers:
                out, error = process.communicate(timeout=120)
                assert process.returncode == 0, f"{self._program} {name}:\n{error}"
                self._answers[name] = json.loads(out.rpartition(_MARK)[2])
        return self._answers

    def stop(self) -> None:
        """End what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()
