"""Times the GEMM of the `mma.sync` class (Ampere, Ada, RTX Blackwell, GB10) on a newer GPU.

Usage, from a checkout with the package installed: python -m scripts.bench_class [--json FILE]

The kernels are compiled for sm_80 and their PTX runs on the GPU that is there: the instructions and
the schedule are those of the class, clocks, caches and the number of SMs are not. Each
configuration is timed twice, the second time with as many programs to an SM as 100 KiB of shared
memory let there be. The Triton backend of comfy_kitchen is compiled likewise; the best of its six
configurations is what its autotuner would find.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ck_patch import shapes, tiles
from ck_patch.bench.class_sm80 import TIGHT, ClassGemm, Sm80Kernel, TightClassGemm
from ck_patch.kernels.int8_gemm import PointerGemm
from ck_patch.kernels.launch import Operands
from ck_patch.measure import graph_times
from ck_patch.shapes import Shape
from ck_patch.stamp import stamp
from ck_patch.tiles import TileConfig
from tests.gpu.slot import Call, random_call, stock, stock_bias_dtype

BF16 = torch.bfloat16
SHAPES: tuple[Shape, ...] = (
    (2, 16384, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (77, 3072, 3072),
    (274, 2048, 2048),
    (512, 5120, 5120),
    (1024, 4096, 4096),
    (4096, 3072, 3072),
    (4096, 12288, 3072),
    (4608, 4096, 12288),
    (8192, 16384, 4096),
    (14430, 21504, 5376),
)
LARGE = 1024
CHOSEN = (tiles.EIGHT_WARPS, *(cost.config for cost in tiles.MMA_SYNC_COSTS))


def policy(m: int, n: int, k: int) -> TileConfig:
    """What the policy chooses for a GPU of the class that has as many SMs as this one."""
    sm_count = torch.cuda.get_device_properties().multi_processor_count
    return tiles.mma_sync(m, n, k, sm_count)


def _pointer(*numbers: int) -> TileConfig:
    return TileConfig("pointer", *numbers)


CONFIGS = (
    tiles.EIGHT_WARPS,
    tiles.MMA_SYNC,
    _pointer(128, 128, 64, 4, 3, 8),
    _pointer(128, 128, 128, 8, 3, 8),
    _pointer(128, 128, 32, 4, 4, 8),
    _pointer(128, 256, 64, 8, 3, 8),
    _pointer(128, 256, 64, 8, 4, 8),
    _pointer(256, 128, 64, 8, 3, 8),
    _pointer(256, 128, 64, 8, 4, 8),
    _pointer(64, 256, 64, 4, 4, 8),
    _pointer(64, 128, 64, 4, 4, 8),
    _pointer(64, 128, 128, 4, 3, 8),
    _pointer(128, 64, 128, 4, 3, 8),
    _pointer(64, 64, 128, 4, 4, 8),
    _pointer(32, 64, 128, 4, 4, 8),
    _pointer(32, 64, 256, 4, 3, 8),
    _pointer(16, 64, 128, 4, 4, 8),
    _pointer(16, 64, 256, 4, 4, 8),
    _pointer(16, 32, 256, 4, 4, 8),
    _pointer(16, 32, 512, 4, 3, 8),
)
"""Within 99 KiB of shared memory, which is what a block of most of the class may have."""

# Each output dtype, a bias or none and even K or not meet at least once; every one is a binary.
VARIANTS = (
    (torch.float32, True, False),
    (torch.float32, False, True),
    (torch.float16, True, True),
    (torch.float16, False, False),
    (BF16, True, False),
    (BF16, True, True),
)


def suits(config: TileConfig, m: int) -> bool:
    """Whether the rows of a tile are neither far more nor far fewer than there are."""
    return config.block_m <= max(16, 2 * m) and (config.block_m > 16 or m <= 128)


class _CompiledOnly(Sm80Kernel):
    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        return self.compile


class _CompiledGemm(PointerGemm):
    kernel: ClassVar[Any] = _CompiledOnly(PointerGemm.kernel)


def operands(call: Call, d: torch.Tensor) -> Operands:
    """Those of the call, written to d."""
    bias = call.bias if call.bias.numel() else None
    return Operands(a=call.a, b=call.b, x_scale=call.xs, w_scale=call.ws, bias=bias, d=d)


def _unfilled(
    m: int, n: int, k: int, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tuple[Call, torch.Tensor]:
    """A call on the CPU, to compile for."""
    a, b = torch.empty(m, k, dtype=torch.int8), torch.empty(n, k, dtype=torch.int8)
    bias = torch.empty(n if bias_dtype else 0, dtype=bias_dtype or out_dtype)
    d = torch.empty(m, n, dtype=out_dtype)
    return Call(a, b, torch.empty(m, 1), torch.empty(n), bias, out_dtype), d


@dataclass(frozen=True)
class TritonStock:
    """The per-channel GEMM kernel of comfy_kitchen's Triton backend and its configurations."""

    free: Any
    tight: Any
    compiled: Any
    configs: list[Any]

    @classmethod
    def load(cls) -> TritonStock:
        from comfy_kitchen.backends.triton import quantization

        tuned = quantization._int8_matmul_dequant_per_row_kernel
        kernels = (Sm80Kernel(tuned.fn), Sm80Kernel(tuned.fn, TIGHT), _CompiledOnly(tuned.fn))
        return cls(*kernels, tuned.configs)

    def run(self, kernel: Any, config: Any, call: Call, d: torch.Tensor) -> object:
        """As its `int8_linear` calls it."""
        (m, k), n = call.a.shape, call.b.shape[0]
        tile_count = -(-m // config.kwargs["block_m"]) * -(-n // config.kwargs["block_n"])
        tensors = (call.a, call.b, d, call.xs, call.ws, call.bias)
        launched: object = kernel[tile_count, 1, 1](
            *tensors,
            *(m, n, k, k, 1, 1, k, n, 1),
            **config.kwargs,
            has_bias=True,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return launched


def compile_all(theirs: TritonStock) -> None:
    """Fill Triton's cache, in threads: the compiler leaves Python to others for most of its time.
    Nothing here touches the GPU."""
    bias = stock_bias_dtype(BF16)
    jobs: dict[object, Callable[[], object]] = {}
    for m, _, k in SHAPES:
        for config in CONFIGS:
            if suits(config, m):
                even = k % config.block_k == 0
                jobs[config, even, BF16, True] = partial(_compile, config, even, BF16, bias)
        call, d = _unfilled(16 if m % 16 == 0 else 18, 64, 64, BF16, bias)
        for number, config in enumerate(theirs.configs):
            jobs[number, m % 16 == 0] = partial(theirs.run, theirs.compiled, config, call, d)
    for config in CHOSEN:
        for out_dtype, biased, even in VARIANTS:
            bias_dtype = stock_bias_dtype(out_dtype) if biased else None
            job = partial(_compile, config, even, out_dtype, bias_dtype)
            jobs[config, even, out_dtype, biased] = job
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: job(), jobs.values()))
    print(f"{len(jobs)} binaries", flush=True)


def _compile(
    config: TileConfig, even: bool, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> None:
    k = config.block_k + (0 if even else 16)
    call, d = _unfilled(16, 16, k, out_dtype, bias_dtype)
    _CompiledGemm(config).run(operands(call, d))


def is_equal(call: Call, gemm: PointerGemm) -> bool:
    """Whether the kernel and stock write the same bits into poisoned outputs."""
    done, expected = call.run(stock())
    assert done
    d = torch.full_like(expected, torch.nan)
    gemm.run(operands(call, d))
    return torch.equal(d, expected)


def model_shapes() -> Iterator[dict[str, Any]]:
    """Equality on every shape of every model, with the configuration of the policy."""
    for m, n, k in shapes.unique():
        config = policy(m, n, k)
        call = random_call(m, n, k, BF16, stock_bias_dtype(BF16))
        equal = is_equal(call, ClassGemm(config))
        yield {"op": "class_sm80", "m": m, "n": n, "k": k, "config": config.name, "equal": equal}


def random_shapes(count: int = 20) -> Iterator[dict[str, Any]]:
    """Equality on random sizes, ragged ones among them, in the variants of the kernel."""
    for out_dtype, biased, even in VARIANTS:
        for number in range(count):
            m = random.randint(1, 16) if number % 2 else random.randint(17, 3000)
            n = 8 * random.randint(1, 500)
            config = random.choice(CHOSEN)
            step = config.block_k
            k = step * random.randint(1, 60) - (
                0 if even else 16 * random.randint(1, step // 16 - 1)
            )
            call = random_call(m, n, k, out_dtype, stock_bias_dtype(out_dtype) if biased else None)
            yield {
                "op": "class_sm80",
                "m": m,
                "n": n,
                "k": k,
                "out_dtype": str(out_dtype).removeprefix("torch."),
                "bias": biased,
                "config": config.name,
                "equal": is_equal(call, ClassGemm(config)),
            }


def timings(shape: Shape, theirs: TritonStock) -> Iterator[dict[str, Any]]:
    """One row for each configuration, free and tight."""
    m, n, k = shape
    call = random_call(m, n, k, BF16, stock_bias_dtype(BF16))
    _, expected = call.run(stock())
    d = torch.empty_like(expected)
    gemms: dict[str, tuple[bool, PointerGemm]] = {}
    functions: dict[str, Callable[[], object]] = {"stock": partial(call.into, stock(), d)}
    launchers: dict[bool, type[PointerGemm]] = {False: ClassGemm, True: TightClassGemm}
    for tight, launcher in launchers.items():
        for config in CONFIGS:
            if suits(config, m):
                name, gemm = f"{config.name} {tight}", launcher(config)
                gemms[name] = tight, gemm
                functions[name] = partial(gemm.run, operands(call, d))
        kernel = theirs.tight if tight else theirs.free
        for number, config in enumerate(theirs.configs):
            run = functions[f"{number} {tight}"] = partial(theirs.run, kernel, config, call, d)
            d.fill_(torch.nan)
            run()
            error = (d.float() - expected.float()).norm() / expected.float().norm()
            assert error < 1e-3, (number, error)  # Its order of rounding is another.
    equal = {name: is_equal(call, gemm) for name, (_, gemm) in gemms.items()}
    times = graph_times(functions, rounds=5, span=1e-3)
    for name, (tight, gemm) in gemms.items():
        triton_times = [times[f"{number} {tight}"] for number in range(len(theirs.configs))]
        yield {
            "op": "class_sm80",
            "m": m,
            "n": n,
            "k": k,
            "timing": "graph",
            "config": gemm.config.name,
            "policy": gemm.config == policy(m, n, k),
            "tight": tight,
            "registers": gemm._compiled.n_regs,
            "spills": gemm._compiled.n_spills,
            "stock_ms": round(times["stock"], 5),
            "ours_ms": round(times[name], 5),
            "triton_stock_ms": round(min(triton_times), 5),
            "triton_stock_config": triton_times.index(min(triton_times)),
            "equal": equal[name],
        }


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def show(rows: list[dict[str, Any]]) -> None:
    """The configurations, then the shapes, geometric means last."""
    large = [row for row in rows if row["m"] >= LARGE]
    print(f"\nTOPS, geometric mean over the shapes with M >= {LARGE}")
    print(f"{'configuration':32} {'free':>6} {'tight':>6}  registers  spills")
    for name in dict.fromkeys(row["config"] for row in large):
        mine = [row for row in large if row["config"] == name]
        free, tight = (
            geometric_mean(_tops(row) for row in mine if row["tight"] is wanted)
            for wanted in (False, True)
        )
        registers = f"{mine[0]['registers']:10} {mine[0]['spills']:7}"
        print(f"{name:32} {free:6.0f} {tight:6.0f} {registers}")
    for tight in (False, True):
        print(f"\n{'tight' if tight else 'free'}; ms; ratios are stock's time over the kernel's")
        print(
            f"{'M x N x K':20} {'CUTLASS':>8} {'Triton':>8} {'ratio':>5} {'':2} "
            f"{'policy':>8} {'ratio':>5} {'best':>8} {'ratio':>5}  configuration"
        )
        ratios: dict[str, list[float]] = {"Triton": [], "policy": [], "best": []}
        at_large: dict[str, list[float]] = {name: [] for name in ratios}
        for shape in SHAPES:
            mine = [row for row in rows if (row["m"], row["n"], row["k"]) == shape]
            mine = [row for row in mine if row["tight"] is tight]
            if not mine:
                continue
            best = min(mine, key=lambda row: float(row["ours_ms"]))
            policy = next(row for row in mine if row["policy"])
            line = f"{'x'.join(map(str, shape)):20} {best['stock_ms']:8.4f}"
            for name, taken, label in (
                ("Triton", best["triton_stock_ms"], f" #{best['triton_stock_config']}"),
                ("policy", policy["ours_ms"], ""),
                ("best", best["ours_ms"], f"  {best['config']}"),
            ):
                ratio = best["stock_ms"] / taken
                ratios[name].append(ratio)
                if shape[0] >= LARGE:
                    at_large[name].append(ratio)
                line += f" {taken:8.4f} {ratio:5.2f}{label}"
            print(line)
        for label, columns in (("all", ratios), (f"M >= {LARGE}", at_large)):
            means = [f"{name} {geometric_mean(values):.3f}" for name, values in columns.items()]
            print(f"geometric mean over CUTLASS, {label}: " + ", ".join(means))


def _tops(row: dict[str, Any]) -> float:
    return float(2e-9 * row["m"] * row["n"] * row["k"] / row["ours_ms"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
    target: Path | None = parser.parse_args().json
    begin = time.perf_counter()
    theirs = TritonStock.load()
    compile_all(theirs)
    parts: dict[str, list[dict[str, Any]]] = {}
    failed = 0
    sources: list[tuple[str, Callable[[], Iterator[dict[str, Any]]]]] = [
        ("model_shapes", model_shapes),
        ("random_shapes", random_shapes),
        *(("rows", partial(timings, shape, theirs)) for shape in SHAPES),
    ]
    for name, source in sources:
        try:
            parts.setdefault(name, []).extend(source())
        except Exception:
            failed += 1
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{time.perf_counter() - begin:6.1f} s  {name}", flush=True)
    if target is not None:
        document = {"stamp": stamp(), "command": "python -m scripts.bench_class", **parts}
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(parts["rows"])
    for name, rows in parts.items():
        unequal = [row for row in rows if not row["equal"]]
        print(f"{name}: {len(rows) - len(unequal)} of {len(rows)} equal to stock", *unequal[:5])
        failed += len(unequal)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
