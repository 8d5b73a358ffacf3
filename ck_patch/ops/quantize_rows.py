"""Drop-ins for the row quantizers of the three backends: our kernel where the policy says so."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ck_patch import notices
from ck_patch.context import Function, Op, OpContext, Refused
from ck_patch.device import interpreting, profile
from ck_patch.kernels.input_acts import InputAct, columns
from ck_patch.kernels.replay import Replay
from ck_patch.ops import eager_host, triton_rows
from ck_patch.ops.failures import Failures
from ck_patch.ops.first_use import FirstUse
from ck_patch.ops.gemm_contract import CODES
from ck_patch.ops.watched import watched
from ck_patch.route import Backend, device_path

# The first use of a kernel is compared with stock on so many rows at either end.
_CHECKED_ROWS = 128
# A process that meets more kernels, or shapes, than this proves, or binds, them anew.
_MAX_KERNELS = 4096
_MAX_LAUNCHES = 4096

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""The types of tensors that are taken as they are; a subclass may mean something else."""

Quantized = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Prologue:
    """What happens to rows before they are quantized: an input activation, of which rms_norm has a
    weight, K values in the dtype of x, and eps."""

    act: InputAct | None = None
    weight: torch.Tensor | None = None
    eps: float = 0.0

    @property
    def columns(self) -> int:
        return columns(self.act)

    @property
    def norm(self) -> tuple[torch.Tensor, float] | tuple[()]:
        """What the kernel takes after x, q and scale."""
        return () if self.weight is None else (self.weight, self.eps)


NO_PROLOGUE = Prologue()


@dataclass
class _Kernel:
    """A quantizer for one device, dtype, K and activation; whether its first result was right."""

    quantizer: Any
    proven: bool = False


class QuantizeRows(Op):
    """The op behind the slots.

    It takes x [..., K] float32, float16 or bfloat16, 16-byte aligned ([M, K] alone for the Triton
    backend), and returns q int8 of that shape and the scales, float32 [..., 1], both new and
    contiguous. Everything else, stochastic rounding above all, goes to `fallback`, which is stock
    or as good as stock.
    """

    _operation = "quantize_rowwise"
    # Whether the eager backend can take over where the CUDA one has no kernels.
    _eager_has_it = True
    # Whether rows that are not contiguous are copied first, as stock does.
    _any_strides = True

    def __init__(
        self, backend: Backend, stock: Function, fallback: Function, context: OpContext
    ) -> None:
        self._backend: Backend = backend
        self._stock = fallback
        self._settings = context.settings
        self._failures = Failures(f"{backend}_{self._operation}", context.breaker)
        self._first_use = FirstUse()
        self._paths: dict[int, str] = {}
        self._kernels: dict[tuple[int, torch.dtype, int, InputAct | None], _Kernel] = {}
        # Of kernels that are proven, by the same and the rows; none after a failure.
        self._launches: dict[tuple[int, torch.dtype, int, int, InputAct | None], Replay] = {}
        # The CPU has something to do only where somebody asks for it.
        self._on_cpu = interpreting() or context.settings.assumed(-1) is not None
        first, *others = inspect.signature(stock).parameters
        self._names = tuple(others)

        # Not a wrapt.FunctionWrapper: Dynamo traces through a plain function as it does stock's.
        @functools.wraps(stock)
        def function(*args: Any, **kwargs: Any) -> Any:
            if not args and first in kwargs:
                args = (kwargs.pop(first),)
            x: Any = args[0] if args else None
            if (
                not self._active
                or type(x) not in PLAIN
                or x.layout is not torch.strided
                or not (x.is_cuda or (self._on_cpu and x.device.type == "cpu"))
                or watched()
            ):
                return fallback(*args, **kwargs)
            path = self._path(x.get_device())
            if path == "eager" and self._eager_has_it:
                return eager_host.module().quantize_int8_rowwise(*args, **kwargs)
            if path != "triton" or type(x) is not torch.Tensor:
                return fallback(*args, **kwargs)
            prologue = self._prologue(x, args[1:], kwargs)
            if prologue is None:
                return fallback(*args, **kwargs)
            if self._any_strides:
                # Stock's Triton kernel takes rows for contiguous that are not.
                args = (x := x.contiguous(), *args[1:])
            quantized = self._quantize(x, prologue)
            return fallback(*args, **kwargs) if quantized is None else quantized

        super().__init__(function)

    def _prologue(
        self, x: torch.Tensor, others: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Prologue | None:
        """What follows x, if it is what stock takes, means to round to nearest and is ours."""
        if not (others or kwargs):
            return NO_PROLOGUE
        if len(others) + len(kwargs) > len(self._names) or kwargs.keys() - self._names:
            return None
        plain = all(map(rounds_to_nearest, (*others, *kwargs.values())))
        return NO_PROLOGUE if plain else None

    def _takes(self, shape: torch.Size, prologue: Prologue) -> bool:
        return len(shape) == 2 or (len(shape) > 0 and self._backend != "triton")

    def _new_quantizer(self, act: InputAct | None) -> Any:
        from ck_patch.kernels.quantize_rows import RowQuantizer

        return RowQuantizer(self._backend)

    def _quantize_by_stock(self, x: torch.Tensor, prologue: Prologue) -> Quantized:
        quantized: Quantized = self._stock(x)
        return quantized

    def launch(
        self,
        device: int,
        dtype: torch.dtype,
        m: int,
        k: int,
        input_act: InputAct | None = None,
    ) -> Replay | None:
        """What quantizes to [M, K] by the addresses of x, q and scale, and with rms_norm by that of
        the weight, and eps, once `function` has proven the kernel: for a caller that has made the
        checks, and reports what is raised to `failed`.

        x, and the weight in its dtype, are what `function` takes, to be rounded to nearest, of the
        current device.
        """
        return self._launches.get((device, dtype, m, k, input_act)) if self._active else None

    def failed(self, error: Exception, device: int) -> None:
        """Account for a failure of ours; raises it again if stock cannot help."""
        if self._failures.account(error, device):
            self._launches.clear()

    def _path(self, device: int) -> str:
        path = self._paths.get(device)
        if path is None:
            try:
                gpu = profile(device, self._settings.assumed(device))
            except Exception:
                return "stock"  # A driver that does not answer: stock will say.
            found = device_path(gpu, self._settings.int8, self._backend)
            notices.say(device, gpu, self._backend, found)
            path = self._paths[device] = found.path
        return path

    def _quantize(self, x: torch.Tensor, prologue: Prologue) -> Quantized | None:
        device = x.get_device()
        if (
            x.dtype not in CODES
            or x.requires_grad
            or x.is_neg()
            or x._is_zerotensor()
            or x.numel() == 0
            or not (x.is_contiguous() and self._takes(x.shape, prologue))
            or (device < 0 and not interpreting())
            or x.data_ptr() % 16
            or self._failures.reason(device) is not None
            # An activation that fails takes nothing else along.
            or (prologue.act is not None and self._failures.excluded(device, prologue.act))
        ):
            return None
        try:
            if device >= 0 and torch.cuda.current_device() != device:
                with torch.cuda.device(device):
                    return self._run(x, prologue, device)
            return self._run(x, prologue, device)
        except Exception as error:
            if self._failures.account(error, device, prologue.act):
                self._launches.clear()
            return None

    def _run(self, x: torch.Tensor, prologue: Prologue, device: int) -> Quantized | None:
        rows = x.view(-1, x.shape[-1])
        act, k = prologue.act, x.shape[-1] // prologue.columns
        kernel = self._kernels.get((device, x.dtype, k, act))
        if kernel is None:
            if len(self._kernels) >= _MAX_KERNELS:
                self._kernels.clear()
            made = _Kernel(self._new_quantizer(act))
            kernel = self._kernels.setdefault((device, x.dtype, k, act), made)
        if not kernel.proven and not self._first_use.possible(device):
            return None
        q = torch.empty((*x.shape[:-1], k), dtype=torch.int8, device=x.device)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        if not kernel.proven:
            right = self._prove(kernel, rows, prologue, q.view(-1, k), scale)
            return (q, scale) if right else None
        key = (device, x.dtype, rows.shape[0], k, act)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MAX_LAUNCHES:
                self._launches.clear()
            launch = self._launches[key] = kernel.quantizer.bind(rows)
        operands: tuple[Any, ...] = (x.data_ptr(), q.data_ptr(), scale.data_ptr())
        if prologue.weight is not None:
            operands += (prologue.weight.data_ptr(), prologue.eps)
        launch(operands, torch._C._cuda_getCurrentRawStream(device))
        return q, scale

    def _prove(
        self,
        kernel: _Kernel,
        x: torch.Tensor,
        prologue: Prologue,
        q: torch.Tensor,
        scale: torch.Tensor,
    ) -> bool:
        device = x.get_device()

        def run() -> None:
            # What is not written must not pass for right.
            q.fill_(-77)
            scale.fill_(torch.nan)
            kernel.quantizer.run(x, q, scale, *prologue.norm)

        def fault() -> str | None:
            return self._fault(x, prologue, q, scale.view(-1, 1))

        stream = torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0
        ran, found = self._first_use.prove(device, stream, run, fault)
        if found is not None:
            if prologue.act is None:
                self._failures.open(device, found)
            else:
                self._failures.exclude(device, prologue.act, found)
            self._launches.clear()
            return False
        # What the interpreter ran was not compared.
        kernel.proven = ran and device >= 0
        return ran

    def _fault(
        self, x: torch.Tensor, prologue: Prologue, q: torch.Tensor, scale: torch.Tensor
    ) -> str | None:
        """What is wrong with the first and last rows, measured by stock; None if nothing."""
        # Rows start on 16 bytes at each multiple of 16.
        tail = max(0, x.shape[0] - _CHECKED_ROWS) // 16 * 16
        for rows in (slice(0, _CHECKED_ROWS), slice(tail, None)):
            values, scales = self._quantize_by_stock(x[rows], prologue)
            same = (scale[rows] == scales) | (scale[rows].isnan() & scales.isnan())
            same &= (q[rows] == values).all(dim=1, keepdim=True)
            if self._backend == "triton":
                # An infinite value spoils its row in stock's kernel, and is cut off in ours.
                same |= scales.isinf()
            if not bool(same.all()):
                return "differs from stock"
        return None


def rounds_to_nearest(seed: object) -> bool:
    """Rounding is stochastic with a seed above zero."""
    return seed is None or (type(seed) is int and seed <= 0)


def build_cuda(stock: Function, context: OpContext) -> QuantizeRows:
    """Make the op that replaces the CUDA backend's `quantize_int8_rowwise`."""
    return build("cuda", stock, context)


def build_eager(stock: Function, context: OpContext) -> QuantizeRows:
    """Make the op that replaces the eager backend's `quantize_int8_rowwise`."""
    return build("eager", stock, context)


def build_triton(stock: Function, context: OpContext) -> QuantizeRows | triton_rows.RowChunks:
    """Make the op that replaces `triton_quantize_rowwise`, which fails at 2^31 elements: what is
    not ours goes to stock in chunks."""
    chunked = triton_rows.build_quantizer(stock, context)
    if context.check_first:
        return chunked
    return QuantizeRows("triton", stock, chunked.function, context)


def build(
    backend: Backend, stock: Function, context: OpContext, op: type[QuantizeRows] = QuantizeRows
) -> QuantizeRows:
    """Make an op whose fallback is stock as it is; Refused on a release that is not tested."""
    if context.check_first:
        raise Refused("a release newer than the tested ones may do other things in its quantizers")
    return op(backend, stock, stock, context)
