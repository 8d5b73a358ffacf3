"""The policy: which path an INT8 linear takes on one device, and why. Pure; needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ck_patch import tiles
from ck_patch.device import DeviceProfile
from ck_patch.tiles import TileConfig

MAX_K = 131_071
"""Up to here K products of two int8 cannot overflow int32. Stock's MMA saturates, ours wraps."""

OUT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Backend = Literal["cuda", "triton", "eager"]
"""The backend of comfy_kitchen whose function is replaced."""
BACKENDS: tuple[Backend, ...] = ("cuda", "triton", "eager")

Path = Literal["stock", "tuned", "triton", "float16", "bfloat16", "eager"]
"""`triton` is our GEMM; `tuned` is stock's until ours was measured to be faster, shape by shape,
on the machine that it runs on; float16 and bfloat16 dequantize the weight, piece by piece, to that
dtype; `eager` hands a call of the CUDA backend to the eager one."""


CUDA_BACKEND = "comfy_kitchen's CUDA backend"
"""The advice where that backend would be faster: what keeps it from use is not the policy's to say.
"""


@dataclass(frozen=True)
class DevicePath:
    """What the INT8 linears of one backend do on one device, shapes aside.

    `advice` says, where the path is slow for the device, what would be faster; else it is empty.
    """

    path: Path
    reason: str
    advice: str = ""

    @property
    def ours(self) -> bool:
        """Whether our GEMM can come into it."""
        return self.path in ("tuned", "triton")


@dataclass(frozen=True)
class GemmCall:
    """One well-formed GEMM on int8 operands; dtypes by name, `bias_dtype` None without a bias.

    `accepts_bias` says whether stock reads a bias of that dtype.
    """

    m: int
    n: int
    k: int
    out_dtype: str
    bias_dtype: str | None = None
    accepts_bias: bool = True
    residual: bool = False
    backend: Backend = "cuda"


@dataclass(frozen=True)
class Route:
    """Where a GEMM goes: to our kernel in `config`, or to stock (`config` None), and the reason."""

    config: TileConfig | None
    reason: str

    @property
    def path(self) -> str:
        """`stock`, or the name of the configuration."""
        return "stock" if self.config is None else f"triton {self.config.name}"


def device_path(device: DeviceProfile, int8: str, backend: Backend = "cuda") -> DevicePath:
    """The path of a backend's `int8_linear`; `int8` is the value of CK_PATCH_INT8."""
    if int8 == "stock":
        return DevicePath("stock", "CK_PATCH_INT8=stock")
    if device.kind == "other":
        return DevicePath("stock", f"{device.name} is not an NVIDIA GPU")
    if int8 == "fp16" and not (backend == "cuda" and _without_kernels(device)):
        return _half_path(device)
    if device.kind == "interpreter":
        return DevicePath("triton", "Triton's interpreter is on")
    return _DEVICE_PATHS[backend](device, int8)


def _half_path(device: DeviceProfile) -> DevicePath:
    if device.kind == "cuda" and device.capability < (5, 3):
        return DevicePath("stock", f"{device.architecture} has no FP16 arithmetic")
    return DevicePath(_half(device), "CK_PATCH_INT8=fp16")


def _half(device: DeviceProfile) -> Path:
    # sm_103 has both; activations need no scaling in BF16.
    return "bfloat16" if device.capability == (10, 3) else "float16"


def _without_kernels(device: DeviceProfile) -> bool:
    """Whether stock's CUDA backend has none for this device."""
    return device.kind == "cuda" and device.capability < (7, 5)


def _cuda_path(device: DeviceProfile, int8: str) -> DevicePath:
    if _without_kernels(device):
        # Stock would raise "no kernel image is available for execution on the device".
        return DevicePath("eager", f"the CUDA backend has no kernels for {device.architecture}")
    unsupported = _unsupported(device)
    if unsupported is not None:
        return unsupported
    gain = _GAINS.get(device.capability)
    if gain is not None:
        return DevicePath("triton", gain)
    if int8 == "triton":
        return DevicePath("triton", "CK_PATCH_INT8=triton")
    return DevicePath(
        "tuned",
        f"nothing is known of our kernels on {device.architecture}: they are measured in use",
    )


_GAINS = {
    (9, 0): "measured faster than stock's CUTLASS on sm_90",
    (12, 1): "reported 2.3 times as fast as stock's CUTLASS on sm_121",
}


def _triton_path(device: DeviceProfile, int8: str) -> DevicePath:
    if device.capability < (8, 0):
        # The registry asks for sm_80, but of another device where a host mixes GPUs.
        half = _half_instead(device)
        if half is not None:
            return half
        reason = f"Triton has no int8 tensor-core kernels for {device.architecture}"
        return DevicePath("stock", reason, "comfy_kitchen's eager backend")
    unsupported = _unsupported(device)
    if unsupported is not None:
        return unsupported
    return DevicePath("triton", "the same GEMM in 64 bits, and not tuned anew for each M")


def _eager_path(device: DeviceProfile, int8: str) -> DevicePath:
    arch = device.architecture
    half = _half_instead(device)
    if half is not None:
        return half
    if device.capability < (6, 1):
        reason = f"{arch} has neither dp4a nor fast FP16"
        return DevicePath("stock", reason)
    if device.capability < (7, 0):
        return DevicePath("stock", f"cuBLAS runs INT8 by dp4a on {arch}")
    if device.capability < (8, 0):
        return DevicePath(
            "stock",
            f"Triton has no int8 tensor-core kernels for {arch}, cuBLAS has INT8 ones",
            CUDA_BACKEND,
        )
    if device.capability == (10, 3):
        return DevicePath(
            "bfloat16", "INT8 is slow on sm_103 whatever the kernel, and BF16 is fast there"
        )
    unsupported = _unsupported(device)
    if unsupported is not None:
        return unsupported
    return DevicePath(
        "triton",
        "fused, without the transposed copy of the weight and the int32 output",
        CUDA_BACKEND,
    )


_HALF_REASONS = {
    (6, 0): "sm_60 has no dp4a, and runs FP16 at double rate",
    (7, 0): "sm_70 has no INT8 tensor cores, and runs FP16 on tensor cores",
    (7, 2): "no kernel here uses the INT8 tensor cores of sm_72, and FP16 runs on tensor cores",
}


def _half_instead(device: DeviceProfile) -> DevicePath | None:
    """The FP16 path of GPUs that FP16 is faster on than INT8 can be; None on the others."""
    reason = _HALF_REASONS.get(device.capability)
    if reason is None:
        return None
    return DevicePath("float16", reason)


_DEVICE_PATHS = {"cuda": _cuda_path, "triton": _triton_path, "eager": _eager_path}


def _unsupported(device: DeviceProfile) -> DevicePath | None:
    """Why our GEMM is not for this device, which has at least sm_75; None if it is."""
    if not device.compiles:
        reason = f"this version of Triton cannot compile for {device.architecture}"
        return DevicePath("stock", reason, "a newer Triton")
    if device.capability < (8, 0):
        return DevicePath(
            "stock", f"Triton has no int8 tensor-core kernels for {device.architecture}"
        )
    if device.capability == (10, 3):
        return DevicePath(
            "stock",
            "INT8 is slow on sm_103 whatever the kernel",
            "CK_PATCH_INT8=fp16, which dequantizes to BF16",
        )
    if device.capability[0] not in (8, 9, 10, 12):
        return DevicePath("stock", f"{device.architecture} is unknown to this version")
    return None


def decide(call: GemmCall, device: DeviceProfile, int8: str = "auto") -> Route:
    """The path of one GEMM as long as nothing was measured, `int8` being CK_PATCH_INT8's value."""
    path = device_path(device, int8, call.backend)
    if not path.ours:
        return Route(None, path.reason)
    reason = shape_reason(call)
    if reason is not None:
        return Route(None, reason)
    if path.path == "tuned":
        return Route(None, path.reason)
    config, reason = _config(call, device, int8)
    if config is None:
        return Route(None, reason)
    if device.kind == "cuda" and not tiles.fits(
        config, device.shared_memory, device.descriptors, OUT_BYTES[call.out_dtype]
    ):
        return Route(None, f"{config.name} needs more shared memory than {device.name} has")
    return Route(config, reason)


def shape_reason(call: GemmCall) -> str | None:
    """Why our kernels take such a call on no device; None if they can."""
    if min(call.m, call.n, call.k) == 0:
        return "nothing to compute"
    if not call.accepts_bias:
        return f"stock refuses a {call.bias_dtype} bias with {call.out_dtype} output"
    if call.k > MAX_K:
        return f"int32 cannot hold a sum over K = {call.k} > {MAX_K}"
    if call.n % 8 != 0:
        return "rows of N that is not a multiple of 8 cannot be stored 16 bytes at a time"
    if call.k % 16 != 0:
        return "rows of K bytes that is not a multiple of 16 cannot be loaded 16 bytes at a time"
    return None


def _config(call: GemmCall, device: DeviceProfile, int8: str) -> tuple[TileConfig | None, str]:
    m, n, k = call.m, call.n, call.k
    if device.kind == "interpreter":
        return tiles.INTERPRETER, "Triton's interpreter is on"
    if device.capability == (9, 0):
        config = tiles.hopper(m, n, k, device.sm_count, device.descriptors)
        if config is not None:
            return config, "measured faster than stock on sm_90"
        if int8 == "auto" and call.backend == "cuda":
            return None, "stock is as fast at this size with this K on sm_90"
    if call.backend != "cuda" or int8 == "triton":
        config = tiles.mma_sync(m, n, k, device.sm_count, device.tensor_memory)
        reason = device_path(device, int8, call.backend).reason
        return config, "CK_PATCH_INT8=triton" if call.backend == "cuda" else reason
    if m < 128:
        return None, "on sm_121 only M >= 128 was reported faster than stock"
    return tiles.EIGHT_WARPS, "reported 2.3 times as fast as stock on sm_121"
