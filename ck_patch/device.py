"""Device profiles: what a route needs to know of a GPU, queried once per device and not before."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

KIB = 1024


@dataclass(frozen=True)
class DeviceProfile:
    """A device as the policy sees it. `kind` is "cuda", "interpreter" (the CPU, with Triton's
    interpreter on) or "other"; shared_memory is bytes per block, opted in; `descriptors` says
    whether kernels can be given TMA descriptors made on the host, `tensor_memory` whether Triton
    keeps the accumulator in tensor memory: a 128x128 tile of 4 warps spills then; `compiles`
    whether Triton can be asked to compile for it at all."""

    kind: Literal["cuda", "interpreter", "other"]
    name: str
    capability: tuple[int, int] = (0, 0)
    sm_count: int = 1
    shared_memory: int = 0
    descriptors: bool = False
    tensor_memory: bool = False
    compiles: bool = True

    @property
    def architecture(self) -> str:
        """For example `sm_89`."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.kind == "cuda" else self.kind


def interpreting() -> bool:
    """Whether Triton was told to interpret kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def profile(index: int, assume: tuple[int, int] | None = None) -> DeviceProfile:
    """The profile of CUDA device `index`, or of the CPU for -1. Initializes CUDA for a GPU.

    `assume` is the compute capability to take the device for, for tests and support: the profile is
    then that of a known GPU, and nothing is asked. Raises RuntimeError where torch does.
    """
    if assume is not None:
        return _assumed(assume)
    import torch

    if index < 0:
        return DeviceProfile("interpreter" if interpreting() else "other", "CPU")
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None or interpreting():
        # The interpreter would copy every tensor to the CPU.
        return DeviceProfile("other", properties.name)
    return DeviceProfile(
        "cuda",
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        # TMA came with sm_90, and Triton's host-side descriptors with 3.4.
        properties.major >= 9 and find_spec("triton.tools.tensor_descriptor") is not None,
        (properties.major, properties.minor) == (10, 0) and _with_tensor_memory(),
        # The LLVM in Triton 3.3 does not know sm_121 and ends the process over a shuffle.
        (properties.major, properties.minor) != (12, 1) or _triton_since("3.4", True),
    )


def _assumed(capability: tuple[int, int]) -> DeviceProfile:
    for known in KNOWN:
        if known.capability == capability:
            return replace(known, name=f"{known.name} (assumed)")
    name = f"sm_{capability[0]}{capability[1]} (assumed)"
    return DeviceProfile("cuda", name, capability, shared_memory=48 * KIB)


def _with_tensor_memory() -> bool:
    """Whether Triton uses it on sm_100: from 3.8 on, by the code that it makes."""
    return _triton_since("3.8", False)


@functools.cache
def _triton_since(first: str, unknown: bool) -> bool:
    """Whether Triton is of that version or newer; `unknown` where that cannot be told."""
    for name in ("triton", "triton-windows"):
        # A report must be had where packaging is missing, or the version is none.
        with contextlib.suppress(metadata.PackageNotFoundError, ImportError, ValueError):
            from packaging.version import Version

            return Version(metadata.version(name)) >= Version(first)
    return unknown


# One GPU of each class that INT8 models run on, for tables and tests: shared memory per block from
# the CUDA programming guide's table of compute capabilities, SM counts from the vendor's data.
KNOWN = (
    DeviceProfile("cuda", "Tesla P100", (6, 0), 56, 48 * KIB),
    DeviceProfile("cuda", "GeForce GTX 1080 Ti", (6, 1), 28, 48 * KIB),
    DeviceProfile("cuda", "Jetson TX2", (6, 2), 2, 48 * KIB),
    DeviceProfile("cuda", "Tesla V100", (7, 0), 80, 96 * KIB),
    DeviceProfile("cuda", "Jetson AGX Xavier", (7, 2), 8, 96 * KIB),
    DeviceProfile("cuda", "GeForce GTX 1660 SUPER", (7, 5), 22, 64 * KIB),
    DeviceProfile("cuda", "GeForce RTX 2080 Ti", (7, 5), 68, 64 * KIB),
    DeviceProfile("cuda", "A100", (8, 0), 108, 163 * KIB),
    DeviceProfile("cuda", "GeForce RTX 3090", (8, 6), 82, 99 * KIB),
    DeviceProfile("cuda", "Jetson AGX Orin", (8, 7), 16, 163 * KIB),
    DeviceProfile("cuda", "GeForce RTX 4090", (8, 9), 128, 99 * KIB),
    DeviceProfile("cuda", "H200", (9, 0), 132, 227 * KIB, True),
    DeviceProfile("cuda", "B200", (10, 0), 148, 227 * KIB, True, _with_tensor_memory()),
    DeviceProfile("cuda", "B300", (10, 3), 148, 227 * KIB, True),
    DeviceProfile("cuda", "Jetson AGX Thor", (11, 0), 20, 227 * KIB, True),
    DeviceProfile("cuda", "GeForce RTX 5090", (12, 0), 170, 99 * KIB, True),
    DeviceProfile("cuda", "GB10", (12, 1), 48, 99 * KIB, True),
)
