"""The operands of one GEMM call on the GPU, and every candidate at work on them."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from ck_patch import guard, measure, settings
from ck_patch.breaker import Breaker
from ck_patch.candidates import Candidate
from ck_patch.context import OpContext
from ck_patch.demo.slot import Inputs
from ck_patch.device import DeviceProfile
from ck_patch.kernels.launch import Rounding
from ck_patch.kernels.registry import GEMMS
from ck_patch.kernels.replay import Replay
from ck_patch.measure import Captured, Function, Recorder
from ck_patch.ops import references
from ck_patch.ops.gemm_contract import DTYPE_NAMES, operands
from ck_patch.ops.references import Reference
from ck_patch.route import Backend, GemmCall
from ck_patch.tune.sweeping import Declined, Wrong

# Seconds that the calls of one graph take.
_SPAN = 2e-3
# As many calls as a captured graph has at the most.
_MOST_WEIGHTS = 50

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class GpuContest:
    """A `sweeping.Contest` on the current device, with random operands.

    In a model every call has another weight. Those of the calls of a graph take turns, so that none
    is left in the L2 when its turn comes again; the other operands are the same, as what the
    quantizer has just written is in the L2.
    """

    def __init__(self, call: GemmCall, gpu: DeviceProfile) -> None:
        """Raises Declined where stock leaves the call to another library, and what torch raises
        where the operands do not fit."""
        torch.cuda.empty_cache()
        self._gpu = gpu
        self._call = call
        inputs = _inputs(call)
        d = inputs.output()
        bias = d.new_empty(0) if inputs.bias is None else inputs.bias
        residual = (torch.randn_like(d), torch.randn_like(d[0])) if call.residual else ()
        self._tensors = (inputs.a, inputs.b, inputs.x_scale, inputs.w_scale, bias, d, *residual)
        self._d = d
        self._reference = _reference(call.backend, call.residual)
        if not self._reference(operands(self._tensors), _stream()):
            raise Declined("stock leaves it to cuBLAS")
        self._expected = d.clone()
        self._launches: dict[str, Callable[..., Any]] = {}
        self._graphs: dict[str, Captured] = {}
        self._recorder = Recorder(_SPAN)
        weights = [inputs.b]
        while len(weights) < _weights(inputs.b):
            weights.append(torch.randint_like(inputs.b, -128, 128))
        self._turns = [
            (turn, [tensor.data_ptr() for tensor in turn])
            for weight in weights
            for turn in [(inputs.a, weight, *self._tensors[2:])]
        ]

    def attempt(self, candidate: Candidate) -> float:
        """As `sweeping.Contest` says; ours is compiled if need be."""
        call = operands(self._tensors)
        self._d.fill_(torch.nan)
        if candidate.config is None:
            number = candidate.stock_config
            run = self._reference if number is None else references.cutlass_config(number)
            assert run is not None  # The release was asked how many it has.
            launch = _by_tensors(run)
            if launch(*self._turns[0], _stream()) is False:
                raise Declined(f"stock does not run it in {candidate.name}")
        else:
            family = GEMMS[candidate.config.family]()
            gemm = family(candidate.config, _rounding(self._call.backend))
            gemm.run(call)
            launch = _by_addresses(gemm.bind(call))
        self._check()
        # The first call loaded the kernel, which takes longer than many a GEMM. And the launch that
        # `bind` returns is another one than that of `run`.
        self._d.fill_(torch.nan)
        milliseconds = measure.eager_time(partial(launch, *self._turns[0], _stream()), 1)
        self._check()
        self._launches[candidate.name] = launch
        return milliseconds * 1e3

    def times(self, names: Collection[str], rounds: int) -> dict[str, float]:
        """As `sweeping.Contest` says, by CUDA graph replay."""
        for name in names:
            if name not in self._graphs:
                self._graphs[name] = self._recorder.capture(self._in_turn(self._launches[name]))
        found = measure.replay_times({name: self._graphs[name] for name in names}, rounds)
        return {name: milliseconds * 1e3 for name, milliseconds in found.items()}

    def _in_turn(self, launch: Callable[..., Any]) -> Function:
        turns = itertools.cycle(self._turns)
        # Asked for at each call: capture runs on a stream of its own.
        return lambda: launch(*next(turns), _stream())

    def _check(self) -> None:
        if not torch.equal(self._d, self._expected):
            raise Wrong("differs from stock")


def bias_dtype() -> str:
    """The dtype in which comfy_kitchen passes a bias along with bfloat16 output."""
    return "float32" if _context().release.bias_dtype == "float32" else "bfloat16"


def _context() -> OpContext:
    release = guard.examine_host().release
    assert release is not None  # Or nothing would be patched.
    return OpContext(settings.load(), Breaker(), release, check_first=False)


def _inputs(call: GemmCall) -> Inputs:
    bias = None if call.bias_dtype is None else _DTYPES[call.bias_dtype]
    return Inputs.random((call.m, call.n, call.k), _DTYPES[call.out_dtype], bias, "cuda")


def _reference(backend: Backend, residual: bool) -> Reference:
    """Stock's GEMM, whether it is patched or not."""
    if backend != "cuda":
        host = importlib.import_module(f"comfy_kitchen.backends.{backend}.quantization")
        return references.eager(host) if backend == "eager" else references.triton(host)
    name = "cutlass_int8_dequant_residual" if residual else "cutlass_int8_dequant"
    entry = getattr(importlib.import_module("comfy_kitchen.backends.cuda")._C, name)
    return references.cutlass(getattr(entry, "__wrapped__", entry), _context())


def _rounding(backend: Backend) -> Rounding:
    return "cutlass" if backend == "cuda" else backend


def _weights(weight: torch.Tensor) -> int:
    """How many weights of that size are twice the size of the L2."""
    l2: int = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return min(_MOST_WEIGHTS, max(1, math.ceil(2 * l2 / weight.numel())))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _by_tensors(run: Reference) -> Callable[..., Any]:
    return lambda tensors, addresses, stream: run(operands(tensors), stream)


def _by_addresses(launch: Replay) -> Callable[..., Any]:
    return lambda tensors, addresses, stream: launch(addresses, stream)
