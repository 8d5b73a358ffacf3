"""Tile configurations of the INT8 GEMM: which exist, which fit a device, which one a shape gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Family = Literal["pointer", "tma"]

KIB = 1024


@dataclass(frozen=True)
class TileConfig:
    """One way to run the GEMM: the kernel family, its tile, and how it is pipelined."""

    family: Family
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int

    @property
    def name(self) -> str:
        """For example `tma-128x128x128-w4-s3-g16`."""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.family}-{tile}-w{self.num_warps}-s{self.num_stages}-g{self.group_m}"

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """BLOCK_M, BLOCK_N, BLOCK_K and GROUP_M, in the order of the kernels' parameters."""
        return self.block_m, self.block_n, self.block_k, self.group_m

    @property
    def scales_first(self) -> bool:
        """Whether the pointer kernel loads scales and bias before its K loop."""
        return self not in SCALES_LAST

    def tiles(self, m: int, n: int) -> int:
        """Number of output tiles."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def shared_memory(self, out_bytes: int) -> int:
        """Bytes of shared memory a program needs at the most, `out_bytes` being the size of one
        output element. tests/kernels compares it with what the compiler reports."""
        pipeline = self.num_stages * (self.block_m + self.block_n) * self.block_k
        barriers = 2 * KIB
        # The epilogue's change of layout reuses the pipeline's buffers.
        return max(pipeline, self.block_m * self.block_n * out_bytes) + barriers


def fits(config: TileConfig, shared_memory: int, descriptors: bool, out_bytes: int) -> bool:
    """Whether a device with that many bytes of shared memory per block, and with TMA descriptors or
    without, can run the configuration."""
    if config.family != "pointer" and not descriptors:
        return False
    return config.shared_memory(out_bytes) <= shared_memory


# One program of the interpreter walks a tile in Python: few, small ones are quickest.
INTERPRETER = TileConfig("pointer", 32, 32, 32, 4, 1, 8)


@dataclass(frozen=True)
class WaveCost:
    """Measured cost of a configuration: a launch of one wave takes `fixed_us` and, for each 1024
    of K, the entry of `wave_us` for the number of programs that share an SM."""

    config: TileConfig
    fixed_us: float
    wave_us: tuple[float, ...]

    def estimate(self, m: int, n: int, k: int, sm_count: int) -> float:
        """Microseconds of a GEMM that its arithmetic bounds, not the memory."""
        per_sm = -(-self.config.tiles(m, n) // sm_count)
        full, rest = divmod(per_sm, len(self.wave_us))
        waves = full * self.wave_us[-1] + (self.wave_us[rest - 1] if rest else 0.0)
        return self.fixed_us + k / 1024 * waves


# The `mma.sync` class, sm_80 and newer but sm_90 and sm_100, within the 99 KiB of shared memory
# that most of it has; this one takes any K.
MMA_SYNC = TileConfig("pointer", 128, 128, 64, 4, 4, 16)

# On GB10 (sm_121) this one reaches about 170 of 196 TOPS where stock has 72 (public report on
# comfy-kitchen 0.2.31, M >= 128). On sm_100 it spills nothing where Triton has the accumulator in
# tensor memory, which 4 warps do with such a tile.
EIGHT_WARPS = TileConfig("pointer", 128, 128, 64, 8, 4, 8)

# The kernel compiled for sm_80, its PTX run on one H200 (scripts/bench_class.py, 2026-11-30, Triton
# 3.6): 12 shapes from M = 2 to 14,430, with as many programs to an SM as fit into 100 KiB. The
# cheapest by this estimate was 1.2 to 3.7 times as fast as the best of the six configurations of
# comfy_kitchen's Triton backend, compiled likewise. Microseconds of another GPU would differ; what
# counts is their order. The last one was measured with three stages.
MMA_SYNC_COSTS = (
    WaveCost(TileConfig("pointer", 16, 32, 512, 4, 3, 8), 4.0, (0.84, 1.15)),
    WaveCost(TileConfig("pointer", 16, 64, 256, 4, 4, 8), 4.2, (1.29, 1.74)),
    WaveCost(TileConfig("pointer", 32, 64, 256, 4, 3, 8), 2.9, (2.21, 3.1)),
    WaveCost(TileConfig("pointer", 64, 64, 128, 4, 4, 8), 2.1, (2.62, 4.27)),
    WaveCost(TileConfig("pointer", 64, 128, 128, 4, 3, 8), 1.4, (4.49, 6.76)),
    WaveCost(MMA_SYNC, 1.4, (7.25, 9.83)),
)

# These two have no registers to spare for scales and bias during their K loop: with them 128x128x64
# lost 1% and 64x64x128 6% (one H200, sm_80 PTX, Triton 3.6), where the others won up to 20%.
SCALES_LAST = (
    TileConfig("pointer", 64, 64, 128, 4, 4, 8),
    MMA_SYNC,
)

# sm_90, measured on two H200 on 2026-11-30 with torch 2.11+cu130, Triton 3.6 and comfy-kitchen
# 0.2.40, in graphs whose weights are not in the L2 and in calls as they come: on each of the 31
# shapes of shapes.json above `_LARGE` that were swept the first was the fastest, 1.13 to 1.25 times
# as fast as the second, which has half as many programs to an SM.
HOPPER = TileConfig("tma", 128, 128, 128, 4, 3, 16)
HOPPER_DEEP = TileConfig("tma", 128, 256, 128, 8, 4, 8)

# The cheapest by this estimate was within 0.3% of the fastest of the seven older ones on 126 shapes
# (geometric mean; worst 10%), and nowhere slower than stock by more than 1%.
HOPPER_SMALL = (
    WaveCost(TileConfig("pointer", 16, 32, 512, 4, 3, 8), 2.6, (0.89, 1.36, 1.94)),
    WaveCost(TileConfig("pointer", 16, 64, 256, 4, 4, 8), 2.5, (1.43, 1.9, 2.6)),
    WaveCost(TileConfig("pointer", 32, 32, 512, 4, 3, 8), 2.3, (0.95, 1.6)),
    WaveCost(TileConfig("pointer", 64, 32, 256, 4, 4, 8), 1.9, (1.38, 1.75)),
    WaveCost(TileConfig("pointer", 64, 64, 256, 4, 3, 8), 1.8, (1.95, 2.37)),
    WaveCost(TileConfig("pointer", 64, 128, 128, 4, 4, 8), 2.7, (2.97, 3.37)),
    # Later than the others, from three shapes with weights that were not in the L2.
    WaveCost(TileConfig("pointer", 64, 128, 128, 4, 3, 8), 2.7, (3.1, 3.5, 5.0)),
    WaveCost(TileConfig("pointer", 128, 128, 128, 4, 3, 16), 2.8, (4.75, 5.55)),
)

# About 100 us of GPU time: from here on the host's time for making descriptors is hidden.
_LARGE = 2**36


# From here on TMA is a few percent faster than the pointer kernel, if its host time is hidden.
_HOPPER_TMA = 2**33


def hopper(m: int, n: int, k: int, sm_count: int, descriptors: bool = True) -> TileConfig | None:
    """The configuration that sm_90 runs a shape with; None where stock is as fast or faster."""
    if m * n * k >= _LARGE and descriptors:
        return HOPPER
    return _hopper_small(m, n, k, sm_count)


def _hopper_small(m: int, n: int, k: int, sm_count: int) -> TileConfig | None:
    # A masked last step of the K loop costs these more than they gain, and the two that need only
    # K % 128 == 0 lose to stock where they do not fill the SMs.
    fills = -(-m // 128) * -(-n // 128) >= sm_count
    if k % 256 != 0 and not fills:
        return None
    costs = [cost for cost in HOPPER_SMALL if k % cost.config.block_k == 0]
    return next(iter(_cheapest(costs, m, n, k, sm_count)), None)


def mma_sync(m: int, n: int, k: int, sm_count: int, tensor_memory: bool = False) -> TileConfig:
    """The configuration of the `mma.sync` class for a shape; `tensor_memory` is the profile's."""
    return mma_sync_order(m, n, k, sm_count, tensor_memory)[0]


def mma_sync_order(
    m: int, n: int, k: int, sm_count: int, tensor_memory: bool = False
) -> tuple[TileConfig, ...]:
    """The three configurations of the `mma.sync` class that look best for a shape, the best first;
    fewer where K does not divide."""
    floor = EIGHT_WARPS if tensor_memory else MMA_SYNC
    costs = [
        cost
        for cost in MMA_SYNC_COSTS
        if k % cost.config.block_k == 0 and not (tensor_memory and cost.config == MMA_SYNC)
    ]
    order = _cheapest(costs, m, n, k, sm_count)
    # With so many rows nothing is gained by a tile that reads its operands more often.
    if not order or (tensor_memory and m >= 1024):
        return floor, *order[:2]
    return order[:3]


def hopper_order(
    m: int, n: int, k: int, sm_count: int, descriptors: bool = True
) -> tuple[TileConfig, ...]:
    """The few configurations that look best for a shape on sm_90, the best first."""
    size = m * n * k
    costs = [cost for cost in HOPPER_SMALL if k % cost.config.block_k == 0]
    small = _cheapest(costs, m, n, k, sm_count)
    if size >= _LARGE and descriptors:
        return HOPPER, *small[:1], HOPPER_DEEP
    tma = (HOPPER,) if size >= _HOPPER_TMA and descriptors else ()
    return (*small[:2], *tma)


def _cheapest(
    costs: Sequence[WaveCost], m: int, n: int, k: int, sm_count: int
) -> tuple[TileConfig, ...]:
    ordered = sorted(costs, key=lambda cost: cost.estimate(m, n, k, sm_count))
    return tuple(cost.config for cost in ordered)


EVERY = tuple(
    dict.fromkeys(
        (
            HOPPER,
            HOPPER_DEEP,
            MMA_SYNC,
            EIGHT_WARPS,
            *(cost.config for cost in (*MMA_SYNC_COSTS, *HOPPER_SMALL)),
        )
    )
)
"""All configurations that some rule can choose."""


def parse(name: str) -> TileConfig:
    """The configuration of that name; ValueError if there is none."""
    for config in EVERY:
        if config.name == name:
            return config
    raise ValueError(f"is no configuration; there are: {', '.join(c.name for c in EVERY)}")
