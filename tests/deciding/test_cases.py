"""Reported failures that the policy alone prevents."""

from __future__ import annotations

import pytest

from ck_patch import shapes
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.route import BACKENDS, Backend, GemmCall, decide
from ck_patch.tiles import TileConfig

LAYERS = sorted({(n, k) for _, n, k in shapes.unique()})[::4]
SIZES = [*range(1, 2000, 13), *range(2000, 100_000, 1999)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_a_layer_needs_few_binaries_however_its_rows_change(
    device: DeviceProfile, backend: Backend
) -> None:
    """What is compiled depends on the configuration, and nothing is tuned for a number of rows."""

    def config(m: int, n: int, k: int) -> TileConfig | None:
        return decide(GemmCall(m, n, k, "bfloat16", backend=backend), device, "triton").config

    for n, k in LAYERS:
        assert len({config(m, n, k) for m in SIZES} - {None}) <= 9, (n, k)


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_no_number_of_rows_is_a_hole(device: DeviceProfile, backend: Backend) -> None:
    """Where the device takes our GEMM at all: the CUDA backend's may leave sizes to stock."""
    ours = decide(GemmCall(4096, 2048, 2048, "bfloat16", backend=backend), device).config
    for m in range(1, 261):
        route = decide(GemmCall(m, 2048, 2048, "bfloat16", backend=backend), device)
        assert (route.config is None) == (ours is None), (m, route.reason)
