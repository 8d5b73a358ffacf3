"""Writes docs/policy.md: the path of each INT8 operation on each class of GPU, by the policy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ck_patch import settings
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.route import Backend, DevicePath, device_path
from ck_patch.stock_paths import OPERATIONS, SOURCE, Operation, stock_path

TARGET = Path(__file__).resolve().parent.parent / "docs" / "policy.md"

HEAD = f"""\
# Which path each GPU takes

What every INT8 operation of comfy_kitchen does with ck_patch under `{settings.INT8.name}=auto`,
and what it does without ({SOURCE}). [settings.md](settings.md) says what the other
values change, `python -m ck_patch info` what the GPUs of one machine get, shape by shape: a GEMM
that our kernels cannot take, or that stock does as fast, is stock's on every GPU.

ComfyUI uses the CUDA backend where torch was built for CUDA 13, the Triton backend under
`--enable-triton-backend`, and else the eager one.

| path | what runs |
|---|---|
| `stock` | what stock does; in the Triton backend in chunks of rows, from 2^31 elements on |
| `triton` | our Triton kernels, rounding as the operation they replace |
| `tuned` | stock's GEMM, until another candidate was measured to be faster at such a shape |
| `float16`, `bfloat16` | the weight dequantized piece by piece, the activation not quantized |
| `eager` | the eager backend, with the path that it has on that GPU |

On sm_86 `tuned` starts, at some M, with a configuration of stock's that is reported to be faster.
"""
TITLES: dict[Operation, str] = {
    "int8_linear": "`int8_linear`",
    "cutlass_int8_dequant": "`_C.cutlass_int8_dequant` and its residual form, the GEMM alone",
    "quantize_int8_rowwise": "`quantize_int8_rowwise`",
    "quantize_int8_rowwise_convrot64": (
        "`quantize_int8_rowwise_convrot64`, which rotates groups of 256 values first"
    ),
}
COLUMNS = "\n| | GPUs | path | why | without ck_patch |\n|---|---|---|---|---|\n"
FOOT = """
This page is written by `python scripts/document_policy.py` from `ck_patch/route.py` and
`ck_patch/stock_paths.py`.
"""


def text() -> str:
    """The whole page."""
    return HEAD + "".join(_section(*operation) for operation in OPERATIONS) + FOOT


def _section(backend: Backend, operation: Operation) -> str:
    name = {"cuda": "CUDA", "triton": "Triton", "eager": "Eager"}[backend]
    rows = "".join(_row(*group, backend, operation) for group in _groups())
    return f"\n## {name} backend: {TITLES[operation]}\n{COLUMNS}{rows}"


def _groups() -> Iterator[tuple[DeviceProfile, str]]:
    """One GPU of each compute capability, and the names of all that are known of it."""
    for capability in sorted({gpu.capability for gpu in KNOWN}):
        gpus = [gpu for gpu in KNOWN if gpu.capability == capability]
        yield gpus[0], ", ".join(gpu.name for gpu in gpus)


def _row(gpu: DeviceProfile, names: str, backend: Backend, operation: Operation) -> str:
    found = _path(gpu, backend, operation)
    why = f"{found.reason}; faster: {found.advice}" if found.advice else found.reason
    stock = stock_path(backend, operation, gpu.capability)
    return f"| {gpu.architecture} | {names} | `{found.path}` | {why} | {stock} |\n"


def _path(gpu: DeviceProfile, backend: Backend, operation: Operation) -> DevicePath:
    """The path of the backend, as far as the operation follows it."""
    linear = device_path(gpu, settings.INT8.default, backend)
    if operation == "int8_linear":
        return linear
    if operation == "cutlass_int8_dequant":
        if gpu.capability < (8, 0):
            return DevicePath("stock", "no linear comes here on this GPU")
        return linear
    if linear.path in ("float16", "bfloat16"):
        return DevicePath("stock", "the linears of this GPU do not quantize")
    if linear.path == "eager":
        if operation == "quantize_int8_rowwise_convrot64":
            return DevicePath("stock", "the eager backend has no such function")
        return linear
    if linear.path == "tuned":
        return DevicePath("stock", f"nothing is known of our kernels on {gpu.architecture}")
    return DevicePath(linear.path, "as `int8_linear`")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(text(), encoding="utf-8")
    print(f"wrote {TARGET}")
