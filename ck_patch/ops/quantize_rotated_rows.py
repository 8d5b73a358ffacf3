"""Drop-in for the CUDA backend's row quantizer that rotates (ConvRot), activations included."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ck_patch.context import Function, OpContext
from ck_patch.kernels.input_acts import INPUT_ACTS, InputAct
from ck_patch.ops import quantize_rows
from ck_patch.ops.quantize_rows import (
    NO_PROLOGUE,
    PLAIN,
    Prologue,
    Quantized,
    QuantizeRows,
    rounds_to_nearest,
)
from ck_patch.route import Backend

# As far as stock's kernel goes.
_MAX_K = 16_384


class QuantizeRotatedRows(QuantizeRows):
    """`QuantizeRows` for the CUDA backend's quantizer that rotates rows in groups of 256 values.

    It takes x [M, K], or [M, 2 K] with an activation that takes pairs, and returns q [M, K], K a
    multiple of 256 up to 16384. Activations are ours as far as stock's release has them; with
    rms_norm, M is 2 at least and the weight has K values on the device of x. Other groups and seeds
    are stock's, and so is everything on a device that the kernels of the CUDA backend cannot run
    on.
    """

    _operation = "quantize_rowwise_convrot64"
    _eager_has_it = False
    _any_strides = False

    def __init__(
        self, backend: Backend, stock: Function, fallback: Function, context: OpContext
    ) -> None:
        super().__init__(backend, stock, fallback, context)
        self._acts: Mapping[object, Prologue] = {
            None: NO_PROLOGUE,
            "none": NO_PROLOGUE,
            **{act: Prologue(act) for act in _acts_of(stock)},
        }

    def _prologue(
        self, x: torch.Tensor, others: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Prologue | None:
        if len(others) == 1 and not kwargs:  # As the host calls it.
            return NO_PROLOGUE if _is_group_of_256(others[0]) else None
        given: dict[str, Any] = {**dict(zip(self._names, others, strict=False)), **kwargs}
        act = given.get("input_act")
        # What is given twice or has no name is missing here.
        if (
            len(given) < len(others) + len(kwargs)
            or given.keys() - self._names
            or not _is_group_of_256(given.get("group_size"))
            or not rounds_to_nearest(given.get("stochastic_rounding"))
            or type(act) not in (str, type(None))
        ):
            return None
        weight: Any = given.get("input_act_weight")
        prologue = self._acts.get(act)
        if act != "rms_norm":
            return prologue if weight is None else None
        eps = given.get("input_act_eps", 0.0)
        if (
            prologue is None
            or type(weight) not in PLAIN
            or type(eps) not in (float, int)
            or weight.requires_grad
            or weight.is_neg()
            or weight._is_zerotensor()
            or weight.device != x.device
            or weight.numel() != x.shape[-1]
            or weight.dim() != 1
        ):
            return None
        weight = weight.to(x.dtype).contiguous()  # As stock does.
        return None if weight.data_ptr() % 16 else Prologue("rms_norm", weight, float(eps))

    def _takes(self, shape: torch.Size, prologue: Prologue) -> bool:
        return (
            len(shape) == 2
            and shape[1] % (256 * prologue.columns) == 0
            and shape[1] <= _MAX_K * prologue.columns
            and (prologue.act != "rms_norm" or shape[0] > 1)
        )

    def _new_quantizer(self, act: InputAct | None) -> Any:
        from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer

        return ConvrotRowQuantizer(act)

    def _quantize_by_stock(self, x: torch.Tensor, prologue: Prologue) -> Quantized:
        act = () if prologue.act is None else (0, prologue.act, *prologue.norm)
        quantized: Quantized = self._stock(x, 256, *act)
        return quantized


def _acts_of(stock: Function) -> list[InputAct]:
    """The activations of ours that stock's release has, which says of others that it has none."""
    code: Any = getattr(sys.modules.get(stock.__module__), "_input_act_code", None)
    if code is None:
        return []
    found: list[InputAct] = []
    for act in INPUT_ACTS:
        try:
            code(act)
        except ValueError:
            continue
        found.append(act)
    return found


def _is_group_of_256(size: object) -> bool:
    return type(size) is int and size == 256


def build(stock: Function, context: OpContext) -> QuantizeRows:
    """Make the op that replaces the CUDA backend's `quantize_int8_rowwise_convrot64`."""
    return quantize_rows.build("cuda", stock, context, QuantizeRotatedRows)
