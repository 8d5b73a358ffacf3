"""The ways to run one INT8 GEMM that give the same bits: which there are, and in which order to try
them. Pure; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ck_patch import route, tiles
from ck_patch.device import DeviceProfile
from ck_patch.route import OUT_BYTES, GemmCall
from ck_patch.tiles import TileConfig

STOCK_CONFIGS = 14
"""Tile configurations of stock's that `_C.cutlass_int8_dequant_config` runs, by number."""
# By the kernels' names two are Stream-K, which splits K among programs: 13 by a public report, and
# 12 by its place beside it.
STREAM_K = (12, 13)

_OURS = "triton:"
_CONFIG = "cfg"


@dataclass(frozen=True)
class Candidate:
    """One way to run a GEMM: our kernel in `config`; stock in the configuration of that number; or,
    with neither, stock in the one that it picks itself."""

    config: TileConfig | None = None
    stock_config: int | None = None

    @property
    def name(self) -> str:
        """`triton:` and the configuration's name, `cfg7`, or `stock`."""
        if self.config is not None:
            return _OURS + self.config.name
        return "stock" if self.stock_config is None else f"{_CONFIG}{self.stock_config}"

    @property
    def path(self) -> str:
        """The same in the words of a route."""
        return self.name.replace(_OURS, "triton ").replace(_CONFIG, "stock's configuration ")


STOCK = Candidate()


def parse(name: str) -> Candidate:
    """The candidate of that name; ValueError says what is wrong with it."""
    if name == STOCK.name:
        return STOCK
    number = name.removeprefix(_CONFIG)
    if name.startswith(_CONFIG) and number in map(str, range(STOCK_CONFIGS)):
        return Candidate(stock_config=int(number))
    if name.startswith(_OURS):
        return Candidate(tiles.parse(name.removeprefix(_OURS)))
    raise ValueError(f"is none of stock, {_CONFIG}0 to {_CONFIG}{STOCK_CONFIGS - 1}, {_OURS}NAME")


@dataclass(frozen=True)
class Candidates:
    """At least one candidate, the one to start with first, and why that is the first; `problem`
    says what was asked for and cannot be."""

    ordered: tuple[Candidate, ...]
    reason: str
    problem: str = ""


def key(call: GemmCall) -> str:
    """What a measured choice is for, its device aside.

    Scales and alignment need no part in it: our kernels get N scales and tensors on 16 bytes.
    """
    residual = " residual" if call.residual else ""
    return (
        f"{call.backend} {bucket(call.m)}x{call.n}x{call.k} {call.out_dtype} "
        f"{call.bias_dtype or 'no'} bias{residual}"
    )


def bucket(m: int) -> int:
    """The largest M that shares its choice with this one.

    Up to 1024 rows 64, the height of a small tile; beyond that a sixteenth of a power of two: the
    number of tiles in a bucket differs by 6% at the most, so that what was the fastest at one end
    is about that at the other.
    """
    if m <= 64:
        return max(16, 1 << (m - 1).bit_length())
    step = max(64, 1 << (m - 1).bit_length() >> 5)
    return -(-m // step) * step


def candidates(
    call: GemmCall, device: DeviceProfile, int8: str = "auto", stock_configs: int = STOCK_CONFIGS
) -> Candidates:
    """What is worth measuring for a call, in the order in which to try it.

    `int8` is the value of CK_PATCH_INT8; `stock_configs` how many configurations of stock's the
    installed release can run by number. Where nothing is to be chosen there is one candidate.
    """
    first = route.decide(call, device, int8)
    prior = Candidate(first.config)
    found = route.device_path(device, int8, call.backend)
    if device.kind != "cuda" or not found.ours or route.shape_reason(call) is not None:
        return Candidates((prior,), first.reason)
    others: list[Candidate] = []
    reason = first.reason
    if call.backend == "cuda" and int8 == "auto":
        others.append(STOCK)
        numbers = [number for number in _promising(call, device) if number < stock_configs]
        if numbers and device.capability == (8, 6) and (64 < call.m <= 512 or call.m >= 2048):
            # Public figures of an A6000 with comfy-kitchen 0.2.31, ms, stock's pick beside:
            # 25900x16384x4096 26.27 (13) and 16.98 (0), 80666x28672x5376 186.8 and 122.8 (0),
            # 8192x16384x4096 8.26 and 5.60 (0), 274x2048x2048 0.036 (2) and 0.020 (7).
            prior = Candidate(stock_config=numbers[0])
            reason = f"reported faster than stock's own choice on {device.architecture}"
        others += [Candidate(stock_config=number) for number in numbers]
    ours = [Candidate(config) for config in _likely(call, device)]
    # Stock second: it is what the others have to beat.
    ordered = [prior, *others[:1], *ours, *others[1:]]
    return Candidates(tuple(dict.fromkeys(ordered)), reason)


def chosen(
    call: GemmCall,
    device: DeviceProfile,
    int8: str,
    force: str | None,
    stock_configs: int = STOCK_CONFIGS,
) -> Candidates:
    """The candidate that `force` (CK_PATCH_FORCE) names, alone, or all that are worth measuring."""
    if force is None or not route.device_path(device, int8, call.backend).ours:
        return candidates(call, device, int8, stock_configs)
    forced = parse(force)
    reason = f"CK_PATCH_FORCE={force}"
    if forced == STOCK or forced in every(call, device, stock_configs):
        return Candidates((forced,), reason)
    bias = "a" if call.bias_dtype else "no"
    residual = " and a residual" if call.residual else ""
    return Candidates(
        (STOCK,),
        f"{reason} cannot run it",
        f"{reason} cannot run {call.m}x{call.n}x{call.k} with {call.out_dtype} output, {bias} "
        f"bias{residual} on {device.name} in the {call.backend} backend: such calls are stock's",
    )


def every(
    call: GemmCall, device: DeviceProfile, stock_configs: int = STOCK_CONFIGS
) -> tuple[Candidate, ...]:
    """All that can run a call, for a sweep; nothing where our kernels cannot take it."""
    if route.shape_reason(call) is not None or not route.device_path(device, "triton").ours:
        return ()
    found = [STOCK] if call.backend == "cuda" else []
    if call.backend == "cuda" and _plain(call):
        found += [Candidate(stock_config=number) for number in range(stock_configs)]
    return (*found, *map(Candidate, _fitting(tiles.EVERY, call, device)))


def _plain(call: GemmCall) -> bool:
    """Whether stock can run a call in a configuration by number."""
    return call.bias_dtype is None and not call.residual


def _promising(call: GemmCall, device: DeviceProfile) -> tuple[int, ...]:
    """Configurations of stock's that were the fastest of its fourteen at such an M: on one H200
    over 58 shapes (comfy-kitchen 0.2.40, 2026-11-30), and on an A6000 as told above."""
    # On sm_90 ours took two thirds of the time of the best of them.
    if not _plain(call) or device.capability == (9, 0):
        return ()
    if call.m <= 64:
        return (6,)
    if call.m <= 1024:
        return (7, 8) if call.m <= 512 else (8, 1)
    # Stream-K thrashes the 6 MB of L2 that sm_86 has.
    return (0, 1) if device.capability == (8, 6) else (0, 1, 13)


def _likely(call: GemmCall, device: DeviceProfile) -> Iterator[TileConfig]:
    """Our configurations that are expected to be the fastest."""
    m, n, k = call.m, call.n, call.k
    if device.capability == (9, 0):
        order = tiles.hopper_order(m, n, k, device.sm_count, device.descriptors)
    else:
        order = tiles.mma_sync_order(m, n, k, device.sm_count, device.tensor_memory)
    return _fitting(order, call, device)


def _fitting(
    configs: Iterable[TileConfig], call: GemmCall, device: DeviceProfile
) -> Iterator[TileConfig]:
    out_bytes = OUT_BYTES[call.out_dtype]
    for config in configs:
        if tiles.fits(config, device.shared_memory, device.descriptors, out_bytes):
            yield config
