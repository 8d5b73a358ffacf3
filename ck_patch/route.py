"""The policy: which path one INT8 GEMM takes on one device, and why. Pure; needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ck_patch import tiles
from ck_patch.device import DeviceProfile
from ck_patch.tiles import TileConfig

MAX_K = 131_071
"""Up to here K products of two int8 cannot overflow int32. Stock's MMA saturates, ours wraps."""

OUT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class GemmCall:
    """One well-formed call of the GEMM slot; dtypes by name, `bias_dtype` None without a bias.

    `accepts_bias` says whether stock reads a bias of that dtype.
    """

    m: int
    n: int
    k: int
    out_dtype: str
    bias_dtype: str | None = None
    accepts_bias: bool = True


@dataclass(frozen=True)
class Route:
    """Where a call goes: to our kernel in `config`, or to stock (`config` None), and the reason."""

    config: TileConfig | None
    reason: str

    @property
    def path(self) -> str:
        """`stock`, or the name of the configuration."""
        return "stock" if self.config is None else f"triton {self.config.name}"


def device_reason(device: DeviceProfile, int8: str) -> str | None:
    """Why no call at all is ours on this device under CK_PATCH_INT8=`int8`, or None."""
    if int8 == "stock":
        return "CK_PATCH_INT8=stock"
    if int8 == "fp16":
        return "CK_PATCH_INT8=fp16 asks for a path that this entry does not have"
    if device.kind == "interpreter":
        return None
    if device.kind != "cuda":
        return f"{device.name} is not an NVIDIA GPU"
    if device.capability < (8, 0):
        return f"Triton has no int8 tensor-core kernels for {device.architecture}"
    if device.capability == (10, 3):
        return "INT8 is slow on sm_103 whatever the kernel"
    if device.capability[0] not in (8, 9, 10, 12):
        return f"{device.architecture} is unknown to this version"
    if int8 == "auto" and device.capability not in ((9, 0), (12, 1)):
        return (
            f"our kernels were not measured to be faster than stock on {device.architecture}; "
            "CK_PATCH_INT8=triton tries them"
        )
    return None


def decide(call: GemmCall, device: DeviceProfile, int8: str = "auto") -> Route:
    """Choose the path of one call; `int8` is the value of CK_PATCH_INT8."""
    reason = device_reason(device, int8) or _shape_reason(call)
    if reason is not None:
        return Route(None, reason)
    config, reason = _config(call, device, int8)
    if config is None:
        return Route(None, reason)
    if device.kind == "cuda" and not tiles.fits(
        config, device.shared_memory, device.descriptors, OUT_BYTES[call.out_dtype]
    ):
        return Route(None, f"{config.name} needs more shared memory than {device.name} has")
    return Route(config, reason)


def _shape_reason(call: GemmCall) -> str | None:
    if min(call.m, call.n, call.k) == 0:
        return "nothing to compute"
    if not call.accepts_bias:
        return f"stock refuses a {call.bias_dtype} bias with {call.out_dtype} output"
    if call.k > MAX_K:
        return f"int32 cannot hold a sum over K = {call.k} > {MAX_K}"
    if call.n % 8 != 0:
        return "stock leaves N that is not a multiple of 8 to cuBLAS"
    if call.k % 16 != 0:
        return "rows of K bytes that is not a multiple of 16 cannot be loaded 16 bytes at a time"
    return None


def _config(call: GemmCall, device: DeviceProfile, int8: str) -> tuple[TileConfig | None, str]:
    m, n, k = call.m, call.n, call.k
    if device.kind == "interpreter":
        return tiles.INTERPRETER, "Triton's interpreter is on"
    if device.capability == (9, 0):
        out_bytes = OUT_BYTES[call.out_dtype]
        config = tiles.hopper(m, n, k, device.sm_count, out_bytes, device.descriptors)
        if config is not None:
            return config, "measured faster than stock on sm_90"
        if int8 == "auto":
            return None, "stock is as fast at this size with this K on sm_90"
    if int8 == "triton":
        return tiles.mma_sync(m), "CK_PATCH_INT8=triton"
    if m < 128:
        return None, "on sm_121 only M >= 128 was reported faster than stock"
    return tiles.MMA_SYNC, "reported 2.3 times as fast as stock on sm_121"
