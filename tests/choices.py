"""Every tile configuration that the policy can choose on each known GPU, found by asking it."""

from __future__ import annotations

import functools
from itertools import product

from ck_patch import shapes
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.route import OUT_BYTES, GemmCall, decide
from ck_patch.tiles import TileConfig

INT8_VALUES = ("auto", "stock", "triton", "fp16")

_M = (1, 2, 16, 17, 64, 77, 127, 128, 129, 274, 512, 1024, 4096, 8192, 32767, 32768, 80661)
_N = (8, 1024, 4096, 6144, 6152, 28672)
_K = (16, 512, 2048, 5376, 13296, 13312, 28672)
GRID = [*shapes.unique(), *product(_M, _N, _K)]
"""The shapes of real models, and sizes to either side of every limit in the rules."""


@functools.cache
def chosen(device: DeviceProfile) -> dict[TileConfig, frozenset[str]]:
    """The configurations chosen on that device under any setting, with their output dtypes."""
    found: dict[TileConfig, set[str]] = {}
    for out_dtype, int8, (m, n, k) in product(OUT_BYTES, INT8_VALUES, GRID):
        config = decide(GemmCall(m, n, k, out_dtype), device, int8).config
        if config is not None:
            found.setdefault(config, set()).add(out_dtype)
    return {config: frozenset(out_dtypes) for config, out_dtypes in found.items()}


def all_chosen() -> list[TileConfig]:
    """Each configuration that is chosen on any known GPU, once."""
    configs = {config for device in KNOWN for config in chosen(device)}
    return sorted(configs, key=lambda config: config.name)
