"""The table of comfy-kitchen releases: which were tested and what each supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from packaging.version import Version

BiasDtype = Literal["float32", "output"]


@dataclass(frozen=True)
class Release:
    """Facts that hold from release `first` up to the next row of the table.

    `signatures` maps the name of each supported slot to the signature text its stock function has;
    a slot that is not in it stays on stock. `bias_dtype` is what the host passes as bias of
    `_C.cutlass_int8_dequant`: float32, or the dtype of the output.
    """

    first: str
    bias_dtype: BiasDtype
    signatures: Mapping[str, str]


# Read from the docstring of each wheel from 0.2.12 on: the text never changed, though the dtype of
# the bias did.
_CUTLASS_INT8_DEQUANT = (
    "cutlass_int8_dequant("
    "a: ndarray[dtype=int8, shape=(*, *), device='cuda'], "
    "b: ndarray[dtype=int8, shape=(*, *), device='cuda'], "
    "xs: ndarray[dtype=float32, device='cuda'], "
    "ws: ndarray[dtype=float32, device='cuda'], "
    "bias: ndarray[device='cuda'], "
    "d: ndarray[shape=(*, *), device='cuda'], "
    "out_dtype_code: int, stream_ptr: int) -> bool"
)

# From 0.2.34 on; the same text in each wheel up to 0.2.40.
_CUTLASS_INT8_DEQUANT_RESIDUAL = _CUTLASS_INT8_DEQUANT.replace(
    "_dequant(", "_dequant_residual("
).replace(
    "d: ndarray[shape",
    "rscale: ndarray[device='cuda'], resid: ndarray[shape=(*, *), device='cuda'], d: ndarray[shape",
)

# The Python functions', read from each wheel of the tested range.
_X_AND_WEIGHT = "x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor"
_CUDA = f"({_X_AND_WEIGHT}, bias: torch.Tensor = None, out_dtype: torch.dtype = None"
_TRITON = (
    f"({_X_AND_WEIGHT}, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16"
)
_ROTATION = ", convrot: bool = False, convrot_groupsize: int = 256, input_act: str | None = None"
_NORM = ", input_act_weight: torch.Tensor | None = None, input_act_eps: float = 0.0"
_RESIDUAL = ", residual: torch.Tensor | None = None, residual_scale: torch.Tensor | None = None"
_QUANTIZED = " -> tuple[torch.Tensor, torch.Tensor]"
_QUANTIZE = f"(x: torch.Tensor, stochastic_rounding: int | None = 0){_QUANTIZED}"
_QUANTIZE_CONVROT = (
    "(weight_2d: torch.Tensor, group_size: int, stochastic_rounding: int | None = 0, "
    "input_act: str | None = None"
)


def _signatures(linear: str, quantize_convrot: str, **more: str) -> Mapping[str, str]:
    """By slot; `linear` is how the parameters of each int8_linear go on after the output dtype,
    `quantize_convrot` how those of the quantizer that rotates do after its activation."""
    return MappingProxyType(
        {
            **more,
            "cutlass_int8_dequant": _CUTLASS_INT8_DEQUANT,
            "cuda_int8_linear": f"{_CUDA}{linear}) -> torch.Tensor",
            "wrap_for_dlpack": "(tensor: torch.Tensor)",
            "triton_int8_linear": f"{_TRITON}{linear}) -> torch.Tensor",
            "triton_quantize_rowwise": "(x: torch.Tensor)",
            "eager_int8_linear": f"{_TRITON}{linear}) -> torch.Tensor",
            "eager_quantize_rowwise": _QUANTIZE,
            "cuda_quantize_rowwise": _QUANTIZE,
            "cuda_quantize_rowwise_convrot64": (
                f"{_QUANTIZE_CONVROT}{quantize_convrot}){_QUANTIZED}"
            ),
        }
    )


RELEASES = (
    Release("0.2.31", bias_dtype="float32", signatures=_signatures(_ROTATION, "")),
    Release(
        "0.2.34",
        bias_dtype="output",
        signatures=_signatures(
            _ROTATION + _NORM + _RESIDUAL,
            _NORM,
            cutlass_int8_dequant_residual=_CUTLASS_INT8_DEQUANT_RESIDUAL,
        ),
    ),
)

OLDEST = "0.2.31"
"""First release of the tested range."""
NEWEST = "0.2.40"
"""Last release of the tested range."""
MEASURED = ("0.2.31", "0.2.40")
"""The releases that ran on a GPU; those between them share signatures and meaning with one."""


def release_for(version: Version) -> Release | None:
    """The facts that hold for `version`; of the newest row when newer, None when too old."""
    known = [release for release in RELEASES if Version(release.first) <= version]
    return known[-1] if known else None


def is_newer_than_tested(version: Version) -> bool:
    """Whether `version` lies beyond the tested range; a local build of the last one does too."""
    return version > Version(NEWEST)
