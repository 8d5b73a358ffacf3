"""What stock comfy_kitchen does with INT8 linears on each GPU: facts for reports, not policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ck_patch.route import Backend

Operation = Literal[
    "int8_linear",
    "cutlass_int8_dequant",
    "quantize_int8_rowwise",
    "quantize_int8_rowwise_convrot64",
]
"""A function of a backend; the second is the GEMM entry of the CUDA extension, with its residual
form."""

OPERATIONS: tuple[tuple[Backend, Operation], ...] = (
    ("cuda", "int8_linear"),
    ("cuda", "cutlass_int8_dequant"),
    ("cuda", "quantize_int8_rowwise"),
    ("cuda", "quantize_int8_rowwise_convrot64"),
    ("triton", "int8_linear"),
    ("triton", "quantize_int8_rowwise"),
    ("eager", "int8_linear"),
    ("eager", "quantize_int8_rowwise"),
)
"""Which operation each backend has."""

Capability = tuple[int, int]

# Read from its Python sources (`min_compute_capability` in each backend's constraints, int8_linear
# in backends/cuda/__init__.py and in quantization.py of backends/triton and of backends/eager) and,
# by `cuobjdump --list-elf --list-ptx`, from `_C`: code for sm_75, 80, 89, 90a, 100f and 120f, PTX
# for sm_89, 100f and 120f, of which the first alone may be compiled for another major version.
SOURCE = "comfy-kitchen 0.2.40"


@dataclass(frozen=True)
class Fact:
    """What stock does on the compute capabilities from `first` on, up to the next fact's."""

    first: Capability
    does: str


_TURING = (
    "M <= 2: GEMV; M <= 128 or N >= 2K: fused Turing kernels (but not on GTX 16xx, told by name); "
    "else cuBLASLt to int32, then dequantized"
)
_NO_IMAGE = "raises: no kernel image is available"
_FROM_PTX = "CUTLASS, mma.sync, compiled by the driver from PTX for sm_89"
_INT_MM = "torch._int_mm on a transposed copy of the weight, all of the int32 output"

_FACTS: dict[tuple[Backend, Operation], tuple[Fact, ...]] = {
    ("cuda", "int8_linear"): (
        Fact((0, 0), f"not chosen by the registry, which asks for sm_75; if called, {_NO_IMAGE}"),
        Fact((7, 5), _TURING),
        Fact((8, 0), "M <= 2: GEMV; else the GEMM entry; cuBLASLt to int32 where that declines"),
    ),
    ("cuda", "cutlass_int8_dequant"): (
        Fact((0, 0), "not called: it needs sm_80"),
        Fact((8, 0), "CUTLASS, mma.sync, sm_80 code"),
        Fact((8, 9), "CUTLASS, mma.sync, sm_89 code"),
        Fact((9, 0), "CUTLASS, mma.sync, sm_90 code"),
        Fact((10, 0), "CUTLASS, mma.sync, sm_100 code"),
        Fact((11, 0), _FROM_PTX),
        Fact((12, 0), "CUTLASS, mma.sync, sm_120 code"),
        Fact((12, 1), "CUTLASS, mma.sync, sm_120 code: 72 of 196 TOPS (public report)"),
        Fact((13, 0), _FROM_PTX),
    ),
    ("cuda", "quantize_int8_rowwise"): (
        Fact((0, 0), _NO_IMAGE),
        Fact((7, 5), "a CUDA kernel"),
    ),
    ("cuda", "quantize_int8_rowwise_convrot64"): (
        Fact((0, 0), _NO_IMAGE),
        Fact((7, 5), "a CUDA kernel with the row in shared memory"),
    ),
    ("triton", "int8_linear"): (
        Fact(
            (0, 0),
            "not chosen by the registry, which asks for sm_80; if called, Triton does not compile "
            "it or uses scalar FMA (on sm_70 930 ms where FP16 took 1.43, public report)",
        ),
        Fact(
            (8, 0),
            "a Triton kernel with 32-bit offsets, which faults at M*N, M*K or N*K of 2^31, and is "
            "tuned for each exact M",
        ),
    ),
    ("triton", "quantize_int8_rowwise"): (
        Fact((0, 0), "a Triton kernel, where Triton compiles for this GPU"),
        Fact((8, 0), "a Triton kernel with 32-bit offsets, which faults at M*K of 2^31"),
    ),
    ("eager", "int8_linear"): (
        Fact((0, 0), f"{_INT_MM}, without dp4a"),
        Fact((6, 1), f"{_INT_MM}, by dp4a: 2.3 to 3.1 times as fast as FP16 (public report)"),
        Fact((6, 2), f"{_INT_MM}, by dp4a"),
        Fact((7, 0), f"{_INT_MM}: 0.52 times as fast as FP16 at 4096^3 (public report)"),
        Fact((7, 2), f"{_INT_MM}: not measured"),
        Fact((7, 5), f"{_INT_MM}, on INT8 tensor cores (GTX 16xx has none)"),
        Fact((8, 0), f"{_INT_MM}, on INT8 tensor cores"),
        Fact((10, 3), f"{_INT_MM}: 157 TOPS where BF16 has 1,976 TFLOPS (public report)"),
        Fact((11, 0), f"{_INT_MM}, on INT8 tensor cores"),
    ),
    ("eager", "quantize_int8_rowwise"): (Fact((0, 0), "several operations of torch"),),
}


def stock_path(backend: Backend, operation: Operation, capability: Capability) -> str:
    """What stock does there, in a few words; KeyError for an operation the backend does not have.

    A GPU that is not known is taken for the newest before it.
    """
    facts = _FACTS[backend, operation]
    return next(fact.does for fact in reversed(facts) if fact.first <= capability)
