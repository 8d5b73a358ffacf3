"""The tile configurations that the policy chooses or tries on a GPU, found by asking it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from ck_patch import shapes
from ck_patch.candidates import candidates
from ck_patch.device import DeviceProfile
from ck_patch.route import BACKENDS, OUT_BYTES, Backend, GemmCall, device_path
from ck_patch.tiles import TileConfig

INT8_VALUES = ("auto", "stock", "triton", "fp16")

_M = (1, 2, 16, 17, 64, 77, 127, 128, 129, 274, 512, 1024, 4096, 8192, 80661)
_N = (8, 1024, 4096, 28672)
_K = (16, 512, 2048, 5376, 28672)
GRID = [*shapes.unique(), *product(_M, _N, _K)]
"""The shapes of real models, and sizes to either side of every limit in the rules."""


class Use(NamedTuple):
    """What a configuration is chosen for; the backend decides how its epilogue rounds."""

    out_dtype: str
    backend: Backend
    residual: bool


USES = [
    *(Use(out_dtype, backend, False) for out_dtype in OUT_BYTES for backend in BACKENDS),
    # No other backend's GEMM has a residual.
    *(Use(out_dtype, "cuda", True) for out_dtype in OUT_BYTES),
]


def calls(use: Use) -> Iterator[GemmCall]:
    """The shapes of the grid as calls."""
    for m, n, k in GRID:
        yield GemmCall(m, n, k, use.out_dtype, residual=use.residual, backend=use.backend)


@functools.cache
def chosen(device: DeviceProfile) -> dict[TileConfig, frozenset[Use]]:
    """The configurations chosen or tried on that device under any setting, and what for."""
    found: dict[TileConfig, set[Use]] = {}
    for use, int8 in product(USES, INT8_VALUES):
        if device_path(device, int8, use.backend).path != "triton":
            continue
        for call in calls(use):
            for candidate in candidates(call, device, int8).ordered:
                if candidate.config is not None:
                    found.setdefault(candidate.config, set()).add(use)
    return {config: frozenset(uses) for config, uses in found.items()}
