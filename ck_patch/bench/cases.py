"""The operands of one layer on the GPU, and every contender's call on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from ck_patch.demo.slot import Inputs
from ck_patch.measure import Function
from ck_patch.shapes import Shape

BF16 = torch.bfloat16
Fp8 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""a float8_e4m3fn [M, K], b [N, K] and their scales, float32 [M, 1] and [1, N]."""

_GROUP = 256
# As many calls as a captured graph has at the most.
_MOST_COPIES = 50


@dataclass(frozen=True)
class Layer:
    """Random operands of a linear layer with bias and bfloat16 output, in the dtypes of all
    contenders; `copied` and `target` are what a copy that moves as many bytes as the quantizer
    reads and writes."""

    shape: Shape
    inputs: Inputs
    d: torch.Tensor
    x: torch.Tensor
    bias: torch.Tensor
    plain: torch.Tensor
    fp8: Fp8 | None
    copied: torch.Tensor
    target: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, bias_dtype: torch.dtype, beside: Layer | None = None) -> Layer:
        """New operands; the GEMM's output and the target of the copy are those of `beside`."""
        m, n, k = shape
        inputs = Inputs.random(shape, BF16, bias_dtype, "cuda")
        assert inputs.bias is not None
        copied = torch.empty(max(1, m * k * 3 // 2), dtype=torch.int8, device="cuda")
        return cls(
            shape,
            inputs,
            inputs.output() if beside is None else beside.d,
            torch.randn(m, k, dtype=BF16, device="cuda"),
            inputs.bias.to(BF16),
            torch.randn(n, k, dtype=BF16, device="cuda"),
            fp8_operands(shape),
            copied,
            torch.empty_like(copied) if beside is None else beside.target,
        )


def fp8_operands(shape: Shape) -> Fp8 | None:
    """What `torch._scaled_mm` takes, where it takes such a shape on this device."""
    m, n, k = shape
    if torch.cuda.get_device_capability() < (8, 9) or m < 16 or k % 16 or n % 16:
        return None
    a, b = (
        torch.randn(rows, k, dtype=BF16, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n)
    )
    return a, b, torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")


def fp8_mm(operands: Fp8) -> torch.Tensor:
    """cuBLAS FP8: at the same width of the operands, the most that the chip does in practice."""
    a, b, x_scale, w_scale = operands
    return torch._scaled_mm(a, b.T, x_scale, w_scale, out_dtype=BF16)


class Declined(Exception):
    """A contender does not do this shape."""


def gemm(layer: Layer) -> torch.Tensor:
    """The entry as it stands in the host's module, called as comfy_kitchen does: with capsules by
    the function that stands there too."""
    from comfy_kitchen.backends import cuda

    # Asked for at each call: capture runs on a stream of its own.
    stream = torch.cuda.current_stream().cuda_stream
    entry = cuda._C.cutlass_int8_dequant
    if not layer.inputs.call(entry, layer.d, stream, cuda._wrap_for_dlpack):
        raise Declined
    return layer.d


def int8_linear(layer: Layer, **rotation: Any) -> torch.Tensor:
    """Through comfy_kitchen's registry."""
    import comfy_kitchen

    inputs = layer.inputs
    given = (layer.x, inputs.b, inputs.w_scale, layer.bias, BF16)
    found: torch.Tensor = comfy_kitchen.int8_linear(*given, **rotation)
    return found


def int8_linear_convrot(layer: Layer) -> torch.Tensor:
    return int8_linear(layer, convrot=True, convrot_groupsize=_GROUP)


def registered_int8_linear(layer: Layer) -> torch.Tensor:
    """Through torch's dispatcher, as torch.compile leaves it."""
    operation: Any = torch.ops.comfy_kitchen.int8_linear
    inputs = layer.inputs
    found: torch.Tensor = operation(layer.x, inputs.b, inputs.w_scale, layer.bias, 2, False, _GROUP)
    return found


def quantize(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    from comfy_kitchen.backends import cuda

    found: tuple[torch.Tensor, torch.Tensor] = cuda.quantize_int8_rowwise(layer.x)
    return found


def quantize_convrot(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    from comfy_kitchen.backends import cuda

    found: tuple[torch.Tensor, torch.Tensor]
    found = cuda.quantize_int8_rowwise_convrot64(layer.x, _GROUP)
    return found


def bf16(layer: Layer) -> torch.Tensor:
    return F.linear(layer.x, layer.plain, layer.bias)


def int_mm(layer: Layer) -> torch.Tensor:
    return torch._int_mm(layer.inputs.a, layer.inputs.b.T)


def fp8(layer: Layer) -> torch.Tensor:
    if layer.fp8 is None:
        raise Declined
    return fp8_mm(layer.fp8)


def copy(layer: Layer) -> torch.Tensor:
    return layer.target.copy_(layer.copied)


Call = Callable[[Layer], Any]

OURS: Mapping[str, Call] = MappingProxyType(
    {
        "gemm": gemm,
        "int8_linear": int8_linear,
        "int8_linear_convrot": int8_linear_convrot,
        "quantize": quantize,
        "quantize_convrot": quantize_convrot,
    }
)
"""Operations of comfy_kitchen, which are stock's or ours as the patcher has it at the call."""

HOST: Mapping[str, Call] = MappingProxyType(
    {
        "int8_linear": int8_linear,
        "int8_linear_convrot": int8_linear_convrot,
        "torch.ops": registered_int8_linear,
        "gemm": gemm,
    }
)
"""Calls whose host time counts: the linear, plain, rotated and by torch's dispatcher; the entry."""

OTHERS: Mapping[str, Call] = MappingProxyType(
    {"bf16": bf16, "int_mm": int_mm, "fp8": fp8, "copy": copy}
)


def applies(op: str, layer: Layer) -> bool:
    """Whether stock does this operation on such a layer in the kernel that the name means."""
    _, _, k = layer.shape
    if op == "int8_linear_convrot":
        return k % _GROUP == 0
    if op == "quantize_convrot":
        from comfy_kitchen.backends import cuda

        fits = cuda._convrot_fused_shared_memory_fits
        return bool(k % _GROUP == 0 and k <= cuda._CONVROT_FUSED_MAX_K and fits(layer.x, k, _GROUP))
    return True


def operand_bytes(contender: str, shape: Shape) -> int:
    """Bytes that one call reads at the least, scales and bias aside."""
    m, n, k = shape
    return {
        "gemm": (m + n) * k,
        "int8_linear": (2 * m + n) * k,
        "int8_linear_convrot": (2 * m + n) * k,
        "quantize": 2 * m * k,
        "quantize_convrot": 2 * m * k,
        "bf16": 2 * (m + n) * k,
        "int_mm": (m + n) * k,
        "fp8": (m + n) * k,
        "copy": m * k * 3 // 2,
    }[contender]


def copies(contender: str, shape: Shape, l2: int) -> int:
    """How many copies of the operands to rotate through so that none is left in the L2 when its
    turn comes again: together twice its size. 1 where the operands are that large themselves, 0
    where it would take more than a graph has calls."""
    needed = math.ceil(2 * l2 / operand_bytes(contender, shape))
    return needed if needed <= _MOST_COPIES else 0


def on(call: Call, layers: Sequence[Layer]) -> Function:
    """`call` on the layers in turn."""
    turn = itertools.cycle(layers)
    return lambda: call(next(turn))


def tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a call returned."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def spoil(result: Any) -> None:
    """Poison what a replay is to write."""
    for tensor in tensors(result):
        tensor.fill_(torch.nan if tensor.is_floating_point() else -77)


def same(found: Any, expected: Any) -> bool:
    """Whether two results are equal, bit for bit."""
    pairs = zip(tensors(found), tensors(expected), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
