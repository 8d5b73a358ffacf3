"""Drop-ins for the Triton backend's `int8_linear` and row quantizer: stock, in chunks where needed.

The kernels of `comfy_kitchen.backends.triton.quantization` compute int32 offsets. From 2^31
elements on, in the output, the activation or the weight, they read and write outside of their
tensors: an illegal access that kills the process, or silent corruption of what lies before them.
Both functions work on each row alone (row-wise scales, an exact int32 accumulator) and the GEMM on
each column alone as well. So a call that reaches the limit is cut up, stock computes the pieces,
and they are put together in a fresh contiguous output. Below the limit stock gets the call as it
came.

What fails here does not go to stock, unlike everywhere else in this project: at these sizes stock
does not raise, it corrupts memory. The pieces make stock raise its own errors for wrong arguments,
and out of memory, and nothing catches them. The one call that goes to stock whole is the one whose
arguments do not fit its signature: it raises TypeError before any kernel runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ck_patch import chunks, log
from ck_patch.context import Function, Op, OpContext


class _Chunked(Protocol):
    """How the calls of one stock function are cut up."""

    def reaches_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether stock would compute offsets of 2^31 and more; cheap, asked at each call."""

    def run(self, stock: Function, arguments: Mapping[str, Any]) -> Any:
        """What stock would return, made of pieces."""


class RowChunks(Op):
    """The op behind both slots."""

    def __init__(self, stock: Function, chunked: _Chunked) -> None:
        signature = inspect.signature(stock)

        # Not a wrapt.FunctionWrapper: Dynamo traces through a plain function as it does stock's.
        @functools.wraps(stock)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not (self._active and chunked.reaches_limit(args, kwargs)):
                return stock(*args, **kwargs)
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return stock(*args, **kwargs)
            return chunked.run(stock, arguments)

        super().__init__(function)


class _Quantizer:
    """`triton_quantize_rowwise(x [M, K]) -> (int8 [M, K], float32 scales [M, 1])`."""

    def reaches_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        x = args[0] if args else kwargs.get("x")
        return isinstance(x, torch.Tensor) and x.numel() >= chunks.LIMIT

    def run(self, stock: Function, arguments: Mapping[str, Any]) -> Any:
        x = arguments["x"]
        m = x.shape[0]
        whole: tuple[torch.Tensor, ...] = ()
        for rows in _rows(m, x.shape[-1], "triton_quantize_rowwise", f"{m} x {x.shape[-1]}"):
            # Stock takes rows for contiguous that are not.
            parts = stock(x[rows].contiguous())
            whole = whole or tuple(_empty(part, m, part.shape[-1]) for part in parts)
            for target, part in zip(whole, parts, strict=True):
                target[rows].copy_(part)
            del part, parts  # Before stock makes the next ones.
        return whole


class _Linear:
    """`int8_linear(x [..., K or 2K], weight int8 [N, K], ...) -> [..., N]`."""

    def reaches_limit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        x = args[0] if args else kwargs.get("x")
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)):
            return False
        size = x.numel()
        if not (size and x.dim() and weight.dim()):
            return False
        return (
            size // x.size(-1) * weight.size(0) >= chunks.LIMIT
            or size >= chunks.LIMIT
            or weight.numel() >= chunks.LIMIT
            or (not weight.is_contiguous() and _extent(weight) >= chunks.LIMIT)
        )

    def run(self, stock: Function, arguments: Mapping[str, Any]) -> Any:
        x, weight = arguments["x"], arguments["weight"]
        lead, width = x.shape[:-1], x.shape[-1]
        x = x.reshape(-1, width)
        m, n, k = x.shape[0], weight.shape[0], weight.shape[-1]
        # What is added to the output, at stock's shapes: it may have every row of it, or one.
        addends = {
            name: _flat(value, lead)
            for name in ("residual", "residual_scale")
            if isinstance(value := arguments.get(name), torch.Tensor)
        }
        whole: torch.Tensor | None = None
        for columns in chunks.chunks(n, n if n * k < chunks.LIMIT else chunks.columns_per_chunk(k)):
            by_column = {
                # Stock takes any strides, and the offsets are what must stay small.
                "weight": weight[columns].contiguous(),
                **_per_channel(arguments, n, columns),
            }
            widest = max(width, columns.stop - columns.start)
            for rows in _rows(m, widest, "int8_linear", f"{m} x {n} x {k}"):
                part = stock(
                    **{
                        **arguments,
                        **by_column,
                        **{name: _cut(value, n, rows, columns) for name, value in addends.items()},
                        # Stock takes rows for contiguous that are not.
                        "x": x[rows].contiguous(),
                    }
                )
                # Stock's own result says what out_dtype means, and comes before the large output:
                # a call that it refuses costs nothing.
                whole = _empty(part, m, n) if whole is None else whole
                whole[rows, columns].copy_(part)
                del part  # Before stock makes the next one.
        assert whole is not None
        return whole.reshape(*lead, n)


def _extent(matrix: torch.Tensor) -> int:
    """Elements from the first to the last, those between that belong to others included."""
    return 1 + sum(
        (size - 1) * abs(stride) for size, stride in zip(matrix.shape, matrix.stride(), strict=True)
    )


def _rows(m: int, widest: int, name: str, shape: str) -> list[slice]:
    step = chunks.rows_per_chunk(widest)
    parts = chunks.chunks(m, step)
    log.once(
        f"triton {name}",
        f"triton {name} reaches 2^31 elements for the first time, at {shape}, where stock's 32-bit "
        "offsets fault: it is computed in chunks from there on",
    )
    if log.paths_wanted():
        log.path(f"triton {name} {shape}: stock in {len(parts)} chunks of {min(m, step)} rows")
    return parts


def _empty(part: torch.Tensor, m: int, n: int) -> torch.Tensor:
    return torch.empty((m, n), dtype=part.dtype, device=part.device)


def _per_channel(arguments: Mapping[str, Any], n: int, columns: slice) -> dict[str, torch.Tensor]:
    """The bias [N] and the weight's scales, unless there is one scale, of these columns."""
    found = {}
    bias, scale = arguments.get("bias"), arguments["weight_scale"]
    if isinstance(bias, torch.Tensor):
        found["bias"] = bias.reshape(-1)[columns]
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        found["weight_scale"] = scale.reshape(n)[columns]
    return found


def _flat(value: torch.Tensor, lead: torch.Size) -> torch.Tensor:
    """What broadcasts with an output of [*lead, N] as [M, N], [M, 1], [1, N] or [1, 1].

    Raises RuntimeError for what would give the output more dimensions or rows than x has.
    """
    last = value.shape[-1] if value.dim() else 1
    every_row = value.broadcast_to((*lead, last))
    if value.numel() == last:
        return value.reshape(1, last)
    return every_row.reshape(-1, last)


def _cut(value: torch.Tensor, n: int, rows: slice, columns: slice) -> torch.Tensor:
    """These rows and columns of a flat addend, where it has more than one."""
    value = value if value.shape[0] == 1 else value[rows]
    return value[:, columns] if value.shape[1] == n else value


def build_linear(stock: Function, context: OpContext) -> RowChunks:
    """Make the op that replaces `int8_linear`."""
    return RowChunks(stock, _Linear())


def build_quantizer(stock: Function, context: OpContext) -> RowChunks:
    """Make the op that replaces `triton_quantize_rowwise`."""
    return RowChunks(stock, _Quantizer())
