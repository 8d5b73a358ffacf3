"""The linear over a dequantized weight, by our kernels where they are faster than plain torch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Hashable

import torch

from ck_patch import half_ways, log
from ck_patch.breaker import Breaker, classify, describe
from ck_patch.device import interpreting, profile
from ck_patch.half_ways import HalfCall, Means, Way
from ck_patch.ops.dequantized_linear import dequantized_linear, has_out_dtype, rows_in_place
from ck_patch.ops.first_use import FirstUse
from ck_patch.ops.folded_linear import folded_linear

_Run = Callable[[bool], torch.Tensor]
"""Runs a way; with True, what a kernel has to write is NaN before."""

# The first use of a kernel is compared with plain torch on so many rows at either end.
_CHECKED_ROWS = 128


class HalfLinear:
    """`dequantized_linear`, to its callers, by the way that `half_ways` names.

    A kernel is compared with plain torch at its first use. From a failure on plain torch has the
    device to itself.
    """

    def __init__(self, operation: str, breaker: Breaker) -> None:
        self._operation = f"{operation} kernels"
        self._breaker = breaker
        self._first_use = FirstUse()
        self._proven: set[Hashable] = set()

    @torch.no_grad()
    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        compute: torch.dtype = torch.float16,
        hadamard: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `dequantized_linear`, and `folded_linear` for the range of weight_scale.

        weight, weight_scale, which is float32, and bias are contiguous.
        """
        call = _Call(x, weight, weight_scale, bias, out_dtype, compute, hadamard)
        device = x.get_device()
        way = call.way()
        if way == "torch" or self._breaker.reason(self._operation, device) is not None:
            return call.plain()
        try:
            # Autocast would round what is to stay float32.
            with _current(device), torch.autocast(x.device.type, enabled=False):
                out = self._run(call, way, device)
        except Exception as error:
            if classify(error) != "other":
                raise
            self._give_up(device, describe(error))
            out = None
        return call.plain() if out is None else out

    def _run(self, call: _Call, way: Way, device: int) -> torch.Tensor | None:
        run, binary = call.gemv() if way == "gemv" else call.folded(way == "folded")
        key = (device, way, *binary)
        if key in self._proven:
            return run(False)
        if not self._first_use.possible(device):
            return None
        outs: list[torch.Tensor] = []
        stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
        ran, fault = self._first_use.prove(
            device, stream, lambda: outs.append(run(True)), lambda: call.fault(outs[0])
        )
        if fault is not None:
            self._give_up(device, fault)
            return None
        if not ran:
            return None
        self._proven.add(key)
        return outs[0]

    def _give_up(self, device: int, reason: str) -> None:
        if self._breaker.open(self._operation, device, reason):
            log.warn(
                f"{self._operation} {device}",
                f"{self._operation}: plain torch takes over on device {device} ({reason})",
            )


class _Call:
    """The operands of one linear, and each way to run it."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        compute: torch.dtype,
        hadamard: torch.Tensor | None,
    ) -> None:
        self.x, self.weight, self.weight_scale, self.bias = x, weight, weight_scale, bias
        self.out_dtype, self.compute, self.hadamard = out_dtype, compute, hadamard

    def way(self) -> Way:
        (m, k), n = self.x.shape, self.weight.shape[0]
        if m == 0 or n == 0:
            return "torch"
        call = HalfCall(
            m,
            n,
            k,
            _name(self.x.dtype),
            _name(self.out_dtype),
            None if self.bias is None else _name(self.bias.dtype),
            _name(self.compute),
            rows_in_place(self.x) if self.hadamard is None else self.x.is_contiguous(),
            self.hadamard is not None,
            torch.backends.cuda.matmul.allow_fp16_accumulation,
        )
        return half_ways.way(call, _means(self.x.device))

    def plain(self, rows: slice = slice(None)) -> torch.Tensor:
        """The result for these rows by plain torch."""
        return dequantized_linear(
            self.x[rows],
            self.weight,
            self.weight_scale,
            self.bias,
            self.out_dtype,
            self.compute,
            self.hadamard,
        )

    def gemv(self) -> tuple[_Run, tuple[Hashable, ...]]:
        """A launch of the GEMV, and what selects its binary."""
        from ck_patch.kernels import gemv

        x, scale, bias = self.x, self.weight_scale, self.bias
        if self.hadamard is None:
            x = x.contiguous()
        else:
            # Divided by the root of G, a power of two, no rotated value overflows.
            root = math.sqrt(self.hadamard.shape[0])
            groups = x.float().reshape(-1, self.hadamard.shape[0])
            x = (groups @ (self.hadamard.t().float() / root)).view(x.shape)
            scale = scale * root
        out = torch.empty((x.shape[0], self.weight.shape[0]), dtype=self.out_dtype, device=x.device)

        def run(poisoned: bool) -> torch.Tensor:
            if poisoned:
                out.fill_(math.nan)
            gemv.gemv(x, self.weight, scale, bias, out)
            return out

        operands = [x, self.weight, scale, out, *([] if bias is None else [bias])]
        return run, (gemv.constants(x, scale, bias), *map(_kind, operands))

    def folded(self, direct: bool) -> tuple[_Run, tuple[Hashable, ...]]:
        """The folded linear, and what selects the binaries of its kernels."""
        from ck_patch.kernels import dequantize, gemv

        def fold(
            weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, factor: float
        ) -> None:
            dequantize.dequantize(weight, scale, out.fill_(math.nan), factor)

        def run(poisoned: bool) -> torch.Tensor:
            return folded_linear(
                self.x,
                self.weight,
                self.weight_scale,
                self.bias,
                self.out_dtype,
                fold if poisoned else dequantize.dequantize,
                gemv.unfit_columns,
                direct,
                self.hadamard,
            )

        operands = [self.x, self.weight, *([] if self.bias is None else [self.bias])]
        binary = dequantize.constants(self.weight, self.weight_scale)
        return run, (binary, self.out_dtype, *map(_kind, operands))

    def fault(self, out: torch.Tensor) -> str | None:
        """What is wrong with the first and the last rows of a result, or None."""
        for rows in (slice(0, _CHECKED_ROWS), slice(-_CHECKED_ROWS, None)):
            expected, found = (
                result.float().clamp(*_bounds(self.out_dtype))
                for result in (self.plain(rows), out[rows])
            )
            # What rounding the operands and the result may make of it, an outlier in x included.
            length = torch.linalg.vector_norm(
                self.x[rows], dim=1, keepdim=True, dtype=torch.float32
            )
            largest = expected.abs().amax(dim=1, keepdim=True)
            room = length * self.weight_scale.reshape(1, -1).abs() * 128 + largest
            room = room * (2.0**-7 if self.out_dtype == torch.bfloat16 else 2.0**-9)
            right = ((found - expected).abs() <= room) | ~expected.isfinite()
            if not bool(right.all()):
                return "differs from plain torch"
        return None


def _bounds(dtype: torch.dtype) -> tuple[float, float]:
    return torch.finfo(dtype).min, torch.finfo(dtype).max


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind(tensor: torch.Tensor) -> Hashable:
    """What Triton's dispatcher compiles for."""
    return tensor.dtype, tensor.data_ptr() % 16 == 0


def _current(device: int) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    if device < 0 or torch.cuda.current_device() == device:
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _means(device: torch.device) -> Means:
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        kernels = not interpreting() and profile(device.index).compiles
        return Means(kernels, sms, has_out_dtype())
    return Means(interpreting(), 1, True)
