"""Every kernel on odd sizes, each tensor an allocation of its own, for `scripts/sanitize.py`.

Usage, under compute-sanitizer or without: python -m tests.gpu.sanitized [--part I/N | --plant]

No kernel of torch's runs here. Inputs are made on the CPU and copied, which initcheck follows, and
outputs are copied back, by which it tells whether all of them was written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from ck_patch import tiles
from ck_patch.device import DeviceProfile, profile
from ck_patch.kernels import dequantize, gemv
from ck_patch.kernels.input_acts import INPUT_ACTS, InputAct, columns
from ck_patch.kernels.launch import Gemm, Operands, Rounding
from ck_patch.kernels.quantize_rows import Rounding as RowRounding
from ck_patch.kernels.quantize_rows import RowQuantizer
from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer
from ck_patch.kernels.registry import GEMMS
from ck_patch.tiles import TileConfig

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOATS = (F32, F16, BF16)
Size = tuple[int, ...]

ROWS = (1, 3, 17, 129, 257)
# Multiples of no BLOCK_N; the fewer for the more rows, as each is a tile.
COLUMNS = (136, 264, 72, 40, 24)
# Multiples of no BLOCK_K, of fewer steps than the pipeline has stages and of more.
RAGGED = (16, 48, 1040, 528, 272)


class Case(Protocol):
    """One binary of one kernel, on several sizes."""

    @property
    def kernel(self) -> str:
        """The name of the kernel."""

    @property
    def sizes(self) -> Sequence[Size]:
        """One launch each."""

    def run(self, sizes: Sequence[Size], device: str = "cuda") -> None:
        """Launch it on these sizes, and read all that it wrote."""


def plan(gpu: DeviceProfile) -> list[Case]:
    """All cases that the GPU can run."""
    return [*_gemms(gpu), *_quantizers(), *_half_linears()]


@dataclass(frozen=True)
class Variant:
    """What besides the configuration selects a binary of the GEMM. `even`: BLOCK_K divides K."""

    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    rounding: Rounding
    residual: bool = False
    even: bool = False


VARIANTS = (
    Variant(F32, F32, "cutlass", residual=True, even=True),
    Variant(F32, None, "eager"),
    Variant(F16, F16, "cutlass", residual=True),
    Variant(F16, F16, "eager", even=True),
    Variant(BF16, BF16, "cutlass", even=True),
    Variant(BF16, None, "cutlass"),
    Variant(BF16, F32, "triton"),
    Variant(F16, None, "triton", even=True),
)
OF_THE_CLASS = VARIANTS[2], VARIANTS[4]
"""Those in which the kernel of the `mma.sync` class runs on a newer GPU."""


@dataclass(frozen=True)
class GemmCase:
    """SIZES are M, N and K."""

    family: type[Gemm]
    config: TileConfig
    variant: Variant

    @property
    def kernel(self) -> str:
        return _name(self.family.kernel)

    @property
    def sizes(self) -> Sequence[Size]:
        steps = [self.config.block_k * count for count in range(len(RAGGED), 0, -1)]
        return list(zip(ROWS, COLUMNS, steps if self.variant.even else RAGGED, strict=True))

    def run(self, sizes: Sequence[Size], device: str = "cuda") -> None:
        gemm = self.family(self.config, rounding=self.variant.rounding)
        for index, size in enumerate(sizes):
            call = self._operands(size, device)
            if index == 0 or device == "cpu":  # The interpreter compiles nothing to bind.
                gemm.run(call)
            else:
                bias = call.w_scale if call.bias is None else call.bias
                tensors = [call.a, call.b, call.x_scale, call.w_scale, bias, call.d]
                if call.residual is not None and call.residual_scale is not None:
                    tensors += [call.residual, call.residual_scale]
                gemm.bind(call)([tensor.data_ptr() for tensor in tensors], _stream())
            call.d.cpu()

    def _operands(self, size: Size, device: str) -> Operands:
        m, n, k = size
        out, bias = self.variant.out_dtype, self.variant.bias_dtype
        return Operands(
            _bytes(m, k).to(device),
            _bytes(n, k).to(device),
            (torch.rand(m, 1) * 0.01).to(device),
            (torch.rand(n) * 0.01).to(device),
            None if bias is None else torch.randn(n).to(bias).to(device),
            torch.empty(m, n, dtype=out, device=device),
            torch.randn(m, n).to(out).to(device) if self.variant.residual else None,
            torch.randn(n).to(out).to(device) if self.variant.residual else None,
        )


def _gemms(gpu: DeviceProfile) -> Iterator[GemmCase]:
    for config, variant in itertools.product(tiles.EVERY, VARIANTS):
        if tiles.fits(config, gpu.shared_memory, gpu.descriptors, variant.out_dtype.itemsize):
            yield GemmCase(GEMMS[config.family](), config, variant)
    if gpu.capability >= (9, 0):
        from ck_patch.bench.class_sm80 import ClassGemm

        for config in (tiles.EIGHT_WARPS, *(cost.config for cost in tiles.MMA_SYNC_COSTS)):
            yield from (GemmCase(ClassGemm, config, variant) for variant in OF_THE_CLASS)


@dataclass(frozen=True)
class QuantizerCase:
    """SIZES are M and K, of which K is always the same. Without a rounding: the rotating one, after
    `act`."""

    rounding: RowRounding | None
    dtype: torch.dtype
    sizes: Sequence[Size]
    act: InputAct | None = None

    @property
    def kernel(self) -> str:
        return _name((ConvrotRowQuantizer if self.rounding is None else RowQuantizer).kernel)

    def run(self, sizes: Sequence[Size], device: str = "cuda") -> None:
        rotating = ConvrotRowQuantizer(self.act)
        quantizer = rotating if self.rounding is None else RowQuantizer(self.rounding)
        for index, (m, k) in enumerate(sizes):
            x = torch.randn(m, k * columns(self.act)).to(self.dtype)
            if self.dtype != F16:
                x[0] *= 1e-12  # The rotating one takes such a row twice.
            x = x.to(device)
            more: tuple[Any, ...] = ()
            if self.act == "rms_norm":
                more = (torch.randn(k).to(self.dtype).to(device), 1e-6)
            q = torch.empty(m, k, dtype=torch.int8, device=device)
            scale = torch.empty(m, dtype=F32, device=device)
            if index == 0 or device == "cpu":
                quantizer.run(x, q, scale, *more)
            else:
                values = (x, q, scale, *more)
                quantizer.bind(x)([_address(value) for value in values], _stream())
            q.cpu()
            scale.cpu()


def _quantizers() -> Iterator[QuantizerCase]:
    # Below a block, a loop with a rest, a wider block, and rows that start anywhere.
    for k, dtype in itertools.product((16, 1040, 4112, 12_304, 4099), FLOATS):
        rows = ROWS if k < 4000 else ROWS[:3]
        roundings: tuple[RowRounding, ...] = ("cuda", "triton", "eager")
        yield from (
            QuantizerCase(rounding, dtype, [(m, k) for m in rows]) for rounding in roundings
        )
    # Half a piece, one and a half, three of which the last is not full, and such a half at the end.
    for k, dtype in itertools.product((256, 1536, 2816, 12_544), FLOATS):
        yield QuantizerCase(None, dtype, [(m, k) for m in (ROWS if k < 4000 else ROWS[:3])])
    for k, act in itertools.product((256, 2816), INPUT_ACTS):
        # One row is not normalized by ours.
        sizes = [(m, k) for m in ROWS if act != "rms_norm" or m > 1]
        yield QuantizerCase(None, BF16, sizes, act)


@dataclass(frozen=True)
class DequantizeCase:
    """SIZES are N and K."""

    dtype: torch.dtype
    per_channel: bool
    sizes: Sequence[Size]
    kernel = "_dequantize_kernel"

    def run(self, sizes: Sequence[Size], device: str = "cuda") -> None:
        for n, k in sizes:
            scale = torch.rand(n if self.per_channel else 1).to(device)
            out = torch.empty(n, k, dtype=self.dtype, device=device)
            dequantize.dequantize(_bytes(n, k).to(device), scale, out)
            out.cpu()


@dataclass(frozen=True)
class GemvCase:
    """SIZES are M, N and K. The columns of `unfit` are those with large scales, in rows of y that
    are part of longer ones."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    per_channel: bool
    unfit: bool
    sizes: Sequence[Size]

    @property
    def kernel(self) -> str:
        return "_unfit_columns_kernel" if self.unfit else "_gemv_kernel"

    def run(self, sizes: Sequence[Size], device: str = "cuda") -> None:
        for m, n, k in sizes:
            x = torch.randn(m, k).to(self.dtype).to(device)
            weight = _bytes(n, k).to(device)
            scale = torch.linspace(0.5, 1.5, n if self.per_channel else 1).to(device)
            bias = None
            if self.bias_dtype is not None:
                bias = torch.randn(n).to(self.bias_dtype).to(device)
            given = x, weight, scale, bias
            if self.unfit:
                # What it leaves as it is was written by another kernel.
                out = torch.zeros(m, n + 8).to(self.out_dtype).to(device)[:, 8:]
                gemv.unfit_columns(*given, out, 1.0, (0.0, 0.25, 0.75))
            else:
                out = torch.empty(m, n, dtype=self.out_dtype, device=device)
                gemv.gemv(*given, out)
                out.cpu()


def _half_linears() -> Iterator[DequantizeCase | GemvCase]:
    for dtype, per_channel, k in itertools.product((F16, BF16), (False, True), (17, 1040)):
        yield DequantizeCase(dtype, per_channel, [(n, k) for n in (1, 3, 17, 129)])
    # Widths of 4 and 8, a step with a rest, and rows that start anywhere.
    out_dtypes, bias_dtypes = itertools.cycle(FLOATS), itertools.cycle((None, F32, F16, BF16))
    for m, k, dtype in itertools.product((1, 2, 3, 17), (1032, 1027), FLOATS):
        sizes = [(m, n, k) for n in (8, 136, 13)]
        bias, per_channel = next(bias_dtypes), k == 1032
        yield GemvCase(dtype, next(out_dtypes), bias, per_channel, False, sizes)
        if dtype == F16:
            yield GemvCase(dtype, F16, bias, per_channel, True, sizes)


@triton.jit
def _planted_write_kernel(x_ptr, N):  # type: ignore[no-untyped-def]
    """One byte behind N of them."""
    tl.store(x_ptr + N, 1)


@triton.jit
def _planted_read_kernel(x_ptr, y_ptr):  # type: ignore[no-untyped-def]
    """What nobody has written."""
    tl.store(y_ptr, tl.load(x_ptr))


@triton.jit
def _planted_race_kernel(y_ptr):  # type: ignore[no-untyped-def]
    """All threads write one word of shared memory, and read it."""
    k = tl.arange(0, 128)
    word = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b32 word;
        st.volatile.shared.b32 [word], $1;
        ld.volatile.shared.b32 $0, [word];
        }""",
        "=r,r",
        [k],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(y_ptr + k, word)


def plant() -> None:
    """An error for each tool but synccheck: Triton has no way to lose a thread on the way."""
    y = torch.zeros(128, dtype=torch.int32).to("cuda")
    _planted_race_kernel[(1,)](y, num_warps=4)
    _planted_read_kernel[(1,)](torch.empty(1, dtype=torch.int32, device="cuda"), y)
    _planted_write_kernel[(1,)](torch.zeros(17, dtype=torch.int8).to("cuda"), 17)
    torch.cuda.synchronize()


def _name(kernel: Any) -> str:
    """Of a Triton kernel, or of what stands in for one."""
    name: str = getattr(kernel, "_kernel", kernel).fn.__name__
    return name


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _address(value: Any) -> Any:
    """What a bound launch takes for a tensor, or the number that it is."""
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", metavar="I/N", default="0/1", help="each Nth case from the Ith on"
    )
    parser.add_argument("--plant", action="store_true", help="the planted errors alone")
    arguments = parser.parse_args()
    # Then torch asks cudaMalloc for the bytes of each tensor, no more: its last byte is the last of
    # the allocation.
    assert os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
    if arguments.plant:
        plant()
        return
    first, step = map(int, arguments.part.split("/"))
    launches: Counter[str] = Counter()
    for case in plan(profile(torch.cuda.current_device()))[first::step]:
        try:
            case.run(case.sizes)
        except Exception as error:
            raise RuntimeError(f"{case} failed") from error
        launches[case.kernel] += len(case.sizes)
    print(json.dumps({"launches": launches}))


if __name__ == "__main__":
    main()
