"""Which launcher runs which family of tile configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ck_patch.kernels.int8_gemm import PointerGemm
from ck_patch.kernels.launch import Gemm
from ck_patch.tiles import Family


def _pointer() -> type[Gemm]:
    return PointerGemm


def _tma() -> type[Gemm]:
    # Descriptors made on the host came with Triton 3.4: imported by whoever uses one.
    from ck_patch.kernels.int8_gemm_tma import TmaGemm

    return TmaGemm


GEMMS: Mapping[Family, Callable[[], type[Gemm]]] = MappingProxyType(
    {"pointer": _pointer, "tma": _tma}
)
