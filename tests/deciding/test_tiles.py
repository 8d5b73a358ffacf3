"""What a configuration needs, on which devices it fits, and which one a shape gets."""

from __future__ import annotations

import pytest

from ck_patch import tiles
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.tiles import TileConfig
from tests import choices

POINTER = TileConfig("pointer", 128, 128, 64, 4, 4, 8)
TMA = TileConfig("tma", 128, 128, 128, 4, 3, 16)
LIMITS = (49152, 65536, 101376, 166912, 232448)


def test_a_name_says_everything_about_a_configuration() -> None:
    assert POINTER.name == "pointer-128x128x64-w4-s4-g8"
    assert len({config.name for config in tiles.EVERY}) == len(tiles.EVERY)


def test_every_configuration_is_chosen_or_tried_on_some_gpu_and_no_other() -> None:
    assert {config for device in KNOWN for config in choices.chosen(device)} == {*tiles.EVERY}


@pytest.mark.parametrize(
    ("m", "n", "count"), [(1, 8, 1), (128, 128, 1), (129, 128, 2), (128, 136, 2), (300, 300, 9)]
)
def test_tiles_cover_the_output(m: int, n: int, count: int) -> None:
    assert POINTER.tiles(m, n) == count


def test_shared_memory_holds_the_pipeline_or_the_output_tile() -> None:
    assert POINTER.shared_memory(2) == 4 * (128 + 128) * 64 + 2048
    # A tile of float32 is as large as four stages of int8 here.
    assert POINTER.shared_memory(4) == 128 * 128 * 4 + 2048


@pytest.mark.parametrize("config", tiles.EVERY, ids=lambda config: config.name)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("out_bytes", [2, 4])
def test_a_configuration_fits_exactly_where_its_shared_memory_does(
    config: TileConfig, limit: int, out_bytes: int
) -> None:
    needed = config.shared_memory(out_bytes)
    assert tiles.fits(config, limit, True, out_bytes) == (needed <= limit)


def test_the_copy_engine_is_used_from_sm_90_on_only() -> None:
    assert not tiles.fits(TMA, 1 << 20, False, 2)
    assert tiles.fits(TMA, 1 << 20, True, 2)
    assert tiles.fits(POINTER, 1 << 20, False, 2)


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_every_output_dtype_gets_a_configuration_that_fits_on_every_known_gpu(
    device: DeviceProfile,
) -> None:
    for config, uses in choices.chosen(device).items():
        for use in uses:
            out_bytes = 4 if use.out_dtype == "float32" else 2
            assert tiles.fits(config, device.shared_memory, device.descriptors, out_bytes)


@pytest.mark.parametrize("config", tiles.EVERY, ids=lambda config: config.name)
def test_a_configuration_is_one_that_triton_can_compile(config: TileConfig) -> None:
    # Tile sides are powers of two, `tl.dot` of int8 wants K of 32 at least, warps a power of two.
    for size in (config.block_m, config.block_n, config.block_k, config.num_warps):
        assert size > 0
        assert size & (size - 1) == 0
    assert config.block_m >= 16
    assert config.block_n >= 16
    assert config.block_k >= 32
    assert config.num_warps in (4, 8)
    # A row of a TMA box spans 256 elements at the most.
    if config.family != "pointer":
        assert max(config.block_m, config.block_n, config.block_k) <= 256


def test_more_work_never_costs_less() -> None:
    for cost in (*tiles.HOPPER_SMALL, *tiles.MMA_SYNC_COSTS):
        times = [cost.estimate(m, 4096, 4096, 132) for m in range(1, 4097, 64)]
        assert times == sorted(times)
        assert cost.estimate(64, 4096, 8192, 132) > cost.estimate(64, 4096, 4096, 132)
        assert cost.estimate(512, 4096, 4096, 66) >= cost.estimate(512, 4096, 4096, 132)


def test_small_gemms_on_sm_90_get_a_tile_whose_steps_fill_k_or_none() -> None:
    for m in (1, 2, 16, 77, 128, 274, 512):
        for n in (8, 1024, 4096):
            for k in (16, 128, 256, 384, 1280, 2048, 2064, 4096):
                config = tiles.hopper(m, n, k, 132)
                assert config is None or k % config.block_k == 0


@pytest.mark.parametrize(("m", "rows"), [(1, 16), (16, 16), (128, 64), (1024, 128), (8192, 128)])
def test_the_mma_sync_class_takes_larger_tiles_for_more_rows(m: int, rows: int) -> None:
    assert tiles.mma_sync(m, 4096, 4096, 82).block_m == rows


def test_sm_100_takes_no_tile_that_spills_where_the_accumulator_is_in_tensor_memory() -> None:
    for m in (1, 16, 100, 512, 1023, 1024, 8192, 100_000):
        config = tiles.mma_sync(m, 4096, 4096, 148, tensor_memory=True)
        assert config.block_m * config.block_n < 128 * 128 or config.num_warps == 8
        assert (config == tiles.EIGHT_WARPS) == (m >= 1024)


def test_the_mma_sync_class_has_one_tile_that_takes_any_k() -> None:
    for m in (1, 128, 8192):
        for tensor_memory, floor in ((False, tiles.MMA_SYNC), (True, tiles.EIGHT_WARPS)):
            assert tiles.mma_sync(m, 4096, 2064, 82, tensor_memory) == floor
            config = tiles.mma_sync(m, 4096, 384, 82, tensor_memory)
            assert 384 % config.block_k == 0
