"""The slots: which stock functions may be replaced, where they are bound, and by which op."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal

SignatureKind = Literal["nanobind", "python"]


@dataclass(frozen=True)
class Binding:
    """One place where the host looks a function up: an attribute of a loaded module (`owner` is
    empty) or of an object in it."""

    module: str
    owner: str
    attribute: str

    def __str__(self) -> str:
        return ".".join(filter(None, (self.module, self.owner, self.attribute)))

    def find_owner(self) -> object | None:
        """The object that holds the attribute now, or None; imports nothing."""
        module = sys.modules.get(self.module)
        return getattr(module, self.owner, None) if self.owner else module


@dataclass(frozen=True)
class Slot:
    """One stock function, patched at all of its bindings or at none.

    `signature` says how the text to compare with the release table is read: the first line of a
    nanobind docstring, or `inspect.signature`. `factory` is a `context.Factory` as `module:name`,
    imported when the slot is about to be patched.
    """

    name: str
    bindings: tuple[Binding, ...]
    signature: SignatureKind
    factory: str


SLOTS = (
    Slot(
        name="cutlass_int8_dequant",
        # The host reads `_C` as a module global at each call and binds the function nowhere else.
        bindings=(Binding("comfy_kitchen.backends.cuda", "_C", "cutlass_int8_dequant"),),
        signature="nanobind",
        factory="ck_patch.ops.cutlass_int8_dequant:build",
    ),
    Slot(
        name="cutlass_int8_dequant_residual",
        bindings=(Binding("comfy_kitchen.backends.cuda", "_C", "cutlass_int8_dequant_residual"),),
        signature="nanobind",
        factory="ck_patch.ops.cutlass_int8_dequant:build_residual",
    ),
    Slot(
        name="cuda_int8_linear",
        # The registry asks the backend module for it at each call.
        bindings=(Binding("comfy_kitchen.backends.cuda", "", "int8_linear"),),
        signature="python",
        factory="ck_patch.ops.cuda_int8_linear:build",
    ),
    Slot(
        name="cuda_quantize_rowwise",
        bindings=(Binding("comfy_kitchen.backends.cuda", "", "quantize_int8_rowwise"),),
        signature="python",
        factory="ck_patch.ops.quantize_rows:build_cuda",
    ),
    Slot(
        name="cuda_quantize_rowwise_convrot64",
        bindings=(Binding("comfy_kitchen.backends.cuda", "", "quantize_int8_rowwise_convrot64"),),
        signature="python",
        factory="ck_patch.ops.quantize_rotated_rows:build",
    ),
    Slot(
        name="wrap_for_dlpack",
        # int8_decode binds it once more by from-import, for calls that are rare: it keeps stock's.
        bindings=(Binding("comfy_kitchen.backends.cuda", "", "_wrap_for_dlpack"),),
        signature="python",
        factory="ck_patch.ops.wrap_for_dlpack:build",
    ),
    Slot(
        name="triton_int8_linear",
        bindings=(
            Binding("comfy_kitchen.backends.triton.quantization", "", "int8_linear"),
            Binding("comfy_kitchen.backends.triton", "", "int8_linear"),
            Binding("comfy_kitchen.backends.triton.w4a8_int8", "", "int8_linear"),
        ),
        signature="python",
        factory="ck_patch.ops.int8_linear:build_triton",
    ),
    Slot(
        name="triton_quantize_rowwise",
        bindings=(
            Binding("comfy_kitchen.backends.triton.quantization", "", "triton_quantize_rowwise"),
            Binding("comfy_kitchen.backends.triton", "", "_triton_quantize_int8_rowwise"),
        ),
        signature="python",
        factory="ck_patch.ops.quantize_rows:build_triton",
    ),
    Slot(
        name="eager_int8_linear",
        bindings=(
            Binding("comfy_kitchen.backends.eager.quantization", "", "int8_linear"),
            Binding("comfy_kitchen.backends.eager", "", "int8_linear"),
            Binding("comfy_kitchen.backends.eager.w4a8_int8", "", "int8_linear"),
        ),
        signature="python",
        factory="ck_patch.ops.int8_linear:build_eager",
    ),
    Slot(
        name="eager_quantize_rowwise",
        bindings=(
            Binding("comfy_kitchen.backends.eager.quantization", "", "quantize_int8_rowwise"),
            Binding("comfy_kitchen.backends.eager", "", "quantize_int8_rowwise"),
        ),
        signature="python",
        factory="ck_patch.ops.quantize_rows:build_eager",
    ),
)
