"""Every configuration that may be chosen, compiled without a GPU for the one that would run it."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ck_patch import device, tiles
from ck_patch.route import Backend
from ck_patch.tiles import TileConfig
from tests import choices
from tests.interpreter import interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets, it compiles nothing")

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
OUT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
ADD_HALF = re.compile(r"add\.(\w+\.)*f16(x2)?$")
TENSOR_MEMORY = (10, 0)
"""Where `tl.dot` may become a tcgen05 instruction instead of `mma.sync`, as newer Tritons do."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One binary: what a backend's dtypes, bias, residual and K make of a configuration."""

    gpu: device.DeviceProfile
    config: TileConfig
    out_dtype: str
    bias_dtype: str | None
    even_k: bool
    rounding: str
    residual: bool

    def __str__(self) -> str:
        bias = self.bias_dtype or "no"
        k = "even" if self.even_k else "ragged"
        gpu = self.gpu.architecture
        residual = "-residual" if self.residual else ""
        name = f"{gpu}-{self.config.name}-{self.out_dtype}-{bias} bias-{k} K"
        return f"{name}-{self.rounding}{residual}"

    @property
    def promise(self) -> int:
        """Bytes of shared memory that the policy reckons with."""
        return self.config.shared_memory(OUT_BYTES[self.out_dtype])


# Each output dtype, each bias dtype, bias or none, even K or not, each rounding and a residual, at
# least once.
VARIANTS = (
    ("float16", "float16", False, "cutlass", True),
    ("float32", "float32", False, "cutlass", False),
    ("bfloat16", "bfloat16", True, "cutlass", False),
    ("bfloat16", "bfloat16", True, "triton", False),
    ("float16", "float16", False, "eager", False),
    ("bfloat16", None, False, "cutlass", False),
)
EVEN_K = {cost.config for cost in (*tiles.HOPPER_SMALL, *tiles.MMA_SYNC_COSTS)} - {tiles.MMA_SYNC}
"""Chosen only where their BLOCK_K divides K."""
BACKENDS: Mapping[str, Backend] = {"cutlass": "cuda", "triton": "triton", "eager": "eager"}


def _cases() -> Iterator[Case]:
    seen: set[object] = set()
    for gpu in device.KNOWN:
        for config, uses in choices.chosen(gpu).items():
            # All variants for the first GPU of a configuration, and for the first configuration of
            # a family on a major version; elsewhere the one that needs the most registers.
            new = {config, (config.family, gpu.capability[0])}
            variants = VARIANTS if new - seen else VARIANTS[:1]
            seen |= new
            for out_dtype, bias_dtype, even_k, rounding, residual in variants:
                if choices.Use(out_dtype, BACKENDS[rounding], residual) in uses:
                    even_k = even_k or config in EVEN_K
                    yield Case(gpu, config, out_dtype, bias_dtype, even_k, rounding, residual)


CASES = sorted(_cases(), key=str)


def parameters(case: Case) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constexpr values of the kernel's parameters, as `Gemm.run` would pass them."""
    config, out = case.config, SHORT[case.out_dtype]
    types = {"x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    types["bias_ptr"] = "*" + SHORT[case.bias_dtype or "float32"]
    types |= {"residual_ptr": "*" + out, "residual_scale_ptr": "*" + out}
    if config.family == "pointer":
        types |= {"a_ptr": "*i8", "b_ptr": "*i8"}
    else:
        types["a_desc"] = f"tensordesc<i8[{config.block_m},{config.block_k}]>"
        types["b_desc"] = f"tensordesc<i8[{config.block_n},{config.block_k}]>"
    types |= {"d_ptr": "*" + out, "M": "i32", "N8": "i32", "K16": "i32"}
    values: dict[str, Any] = {
        "ROUNDING": case.rounding,
        "HAS_BIAS": case.bias_dtype is not None,
        "HAS_RESIDUAL": case.residual,
    }
    if config.family == "pointer":
        values |= {"EVEN_K": case.even_k, "SCALES_FIRST": config.scales_first}
    values |= zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"), config.blocks, strict=True)
    return types, values


@functools.cache
def compiled(case: Case) -> Any:
    """Triton's compiled kernel: `asm` by stage, and `metadata`."""
    pytest.importorskip("triton")
    from ck_patch.kernels.registry import GEMMS

    return compiled_as(GEMMS[case.config.family]().kernel, case)


def compiled_as(kernel: Any, case: Case) -> Any:
    """The same of another kernel with the parameters of the GEMM's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, values = parameters(case)
    names = list(kernel.arg_names)
    assert {*types, *values} == {*names}
    # What Triton's dispatcher says of the operands: every pointer is a multiple of 16, no integer
    # is specialised on.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, text in types.items()
        if text.startswith("*")
    }
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in values.items()}
    major, minor = case.gpu.capability
    return triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options={
            "num_warps": case.config.num_warps,
            "num_stages": case.config.num_stages,
            "enable_fp_fusion": False,
        },
    )


def tool(name: str) -> str:
    """The path of one of the CUDA tools that Triton brings."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton brings no {name}")
    return str(path)


def resource_usage(cubin: bytes, folder: Path) -> Mapping[str, int]:
    """What cuobjdump reports of the one kernel in a binary: REG, STACK, SHARED, LOCAL, ..."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [tool("cuobjdump"), "-res-usage", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    assert {"REG", "STACK", "LOCAL"} <= found.keys(), text
    return found


def instructions(case: Case) -> Counter[str]:
    """How often each PTX instruction occurs in the kernel, by its full name."""
    lines = re.findall(r"^\s*(?:@!?%p\d+ )?\{?\s*([a-z][\w.:]+)", compiled(case).asm["ptx"], re.M)
    return Counter(lines)


def test_every_architecture_that_may_run_ours_is_compiled_for() -> None:
    architectures = {case.gpu.architecture for case in CASES}
    expected = {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121"}
    assert architectures == expected


@pytest.mark.parametrize("case", CASES, ids=str)
class TestBinary:
    def test_shared_memory_fits_the_device_and_the_promise(self, case: Case) -> None:
        used = compiled(case).metadata.shared
        assert used <= case.promise
        assert used <= case.gpu.shared_memory

    def test_nothing_spills(self, case: Case, tmp_path: Path) -> None:
        usage = resource_usage(compiled(case).asm["cubin"], tmp_path)
        assert (usage["STACK"], usage["LOCAL"]) == (0, 0), dict(usage)
        # A block must be able to start at all: 64 Ki registers an SM.
        assert usage["REG"] * 32 * case.config.num_warps <= 65536

    def test_products_run_on_the_int8_tensor_cores(self, case: Case) -> None:
        names = {name for name in instructions(case) if "mma" in name}
        wgmma = {name for name in names if name.startswith("wgmma.mma_async")}
        warp = {name for name in names if name.startswith("mma.sync")}
        if case.gpu.capability == (9, 0) and case.config.block_m >= 64:
            assert wgmma
            assert not warp
            assert all(name.endswith(".s32.s8.s8") for name in wgmma)
        elif case.gpu.capability == TENSOR_MEMORY and not warp:
            assert any(re.match(r"tcgen05\.mma\..*kind::i8", name) for name in names)
        else:
            assert warp
            assert all(name.endswith(".s32.s8.s8.s32") for name in warp)

    def test_no_operand_is_taken_apart(self, case: Case) -> None:
        # Triton 3.8 and newer did that with operands it carried from one step to the next: three
        # instructions for one, at a third of the speed.
        assert not [name for name in instructions(case) if name.startswith("prmt")]

    def test_only_what_stock_fuses_is_one_operation(self, case: Case) -> None:
        operations: Counter[str] = Counter()
        for name, count in instructions(case).items():
            # Blackwell has instructions for two float32 at a time.
            if found := re.fullmatch(r"(fma|mul|add|sub)\.(\w+\.)*f32(x2)?", name):
                operations[found[1]] += count * (2 if found[3] else 1)
        sums = (case.bias_dtype is not None) + case.residual
        if case.rounding == "eager":
            # The sum is an operation of its own: that of two halves is the same in float16.
            halves = sum(n for name, n in instructions(case).items() if ADD_HALF.match(name))
            assert operations.keys() == ({"mul"} if halves else {"mul", "add"})
        elif not sums:
            assert operations.keys() == {"mul"}
        else:
            assert operations.keys() == {"mul", "fma"}
            # One product for each sum over K, and each sum is fused: fewer products where a sum
            # over no K at all is peeled off.
            assert operations["mul"] * sums <= operations["fma"]

    def test_subnormal_numbers_are_flushed_where_stock_does(self, case: Case) -> None:
        # Every multiplication of stock's CUTLASS epilogues is .FTZ; neither torch nor Triton does.
        names = [name for name in instructions(case) if re.match(r"(fma|mul|add)\..*f32", name)]
        assert names
        assert {".ftz." in name for name in names} == {case.rounding == "cutlass"}

    def test_the_start_of_a_tile_is_64_bit(self, case: Case) -> None:
        source = compiled(case).asm["ttir"]
        pointers = {"pointer": ("a_ptr", "b_ptr", "d_ptr"), "tma": ("d_ptr",)}
        for name in (*pointers[case.config.family], *(("residual_ptr",) if case.residual else ())):
            bases = re.findall(rf"tt\.addptr %{name}, %\S+ : !tt\.ptr<\w+>, (\w+)", source)
            assert bases, f"{name} has no scalar offset"
            assert set(bases) == {"i64"}, name


@pytest.mark.parametrize("config", tiles.EVERY, ids=lambda config: config.name)
def test_the_promise_wastes_less_than_a_fifth_of_a_block(config: TileConfig) -> None:
    # A promise far above the need would keep a device from what it can run.
    case = next(
        case
        for case in CASES
        if case.config == config and case.out_dtype != "float32" and not case.residual
    )
    promise = config.shared_memory(2)
    assert promise - compiled(case).metadata.shared <= 0.2 * device.KIB * 227
    assert tiles.fits(config, promise, True, 2)
    assert not tiles.fits(config, promise - 1, True, 2)
