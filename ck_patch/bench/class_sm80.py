"""Kernels compiled for sm_80, to run on a newer GPU what the whole `mma.sync` class runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ck_patch.kernels.int8_gemm import PointerGemm
from ck_patch.tiles import KIB

TARGET = GPUTarget("cuda", 80, 32)
TIGHT = 100 * KIB
"""Bytes of shared memory that an SM of sm_86, 89, 120 and 121 has for all its programs."""
TYPES = {
    torch.int8: "i8",
    torch.int32: "i32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


class Sm80Kernel:
    """Stands in for a `@triton.jit` kernel and is launched like one: `kernel[grid](...)`.

    A cubin for sm_80 does not load on sm_90 and newer, its PTX does: the driver compiles that for
    the GPU, and the instructions stay `mma.sync`. What a launch returns launches again, as Triton's
    own compiled kernel does.

    With `sm_shared`, bytes, each program asks for so much shared memory that no more of them share
    an SM than would on a GPU that has only that much for each.
    """

    def __init__(self, kernel: Any, sm_shared: int | None = None) -> None:
        self._kernel = kernel
        self._sm_shared = sm_shared
        self._compiled: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        def launch(*args: Any, **named: Any) -> Any:
            compiled = self.compile(*args, **named)
            compiled[grid](*self._bind(args, named)[0].values())
            return compiled

        return launch

    def compile(self, *args: Any, **named: Any) -> Any:
        """The compiled kernel for such arguments, tensors of any device; nothing is loaded yet."""
        values, options = self._bind(args, named)
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        divisible: dict[tuple[int, ...], list[list[object]]] = {}
        # What Triton's dispatcher would specialise on.
        for position, parameter in enumerate(self._kernel.params):
            value, at = values[parameter.name], (position,)
            specialize = not parameter.do_not_specialize
            unit = type(value) is int and value == 1 and specialize
            if parameter.is_constexpr or value is None or unit:
                signature[parameter.name], constants[at] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPES[value.dtype]
                multiple = value.data_ptr() % 16 == 0
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                multiple = isinstance(value, int) and value % 16 == 0
            if multiple and specialize:
                divisible[at] = [["tt.divisibility", 16]]
        key = repr((signature, constants, divisible, options))
        if key not in self._compiled:
            source = ASTSource(self._kernel, signature, constants, divisible)
            compiled = triton.compile(source, target=TARGET, options=options)
            # Handed as it is to the driver, which tells PTX from a cubin by itself.
            compiled.kernel = compiled.asm["ptx"].encode() + b"\0"
            if self._sm_shared is not None:
                self._take_turns(compiled, self._sm_shared)
            self._compiled[key] = compiled
        return self._compiled[key]

    @staticmethod
    def _take_turns(compiled: Any, sm_shared: int) -> None:
        own = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
        # A block costs the SM 1 KiB of its own.
        programs = max(1, sm_shared // (compiled.metadata.shared + KIB))
        shared = max(compiled.metadata.shared, (own // programs // KIB - 1) * KIB)
        compiled.metadata = compiled.metadata._replace(shared=shared)
        warps, clusters, _ = compiled.packed_metadata
        compiled.packed_metadata = (warps, clusters, shared)

    def _bind(
        self, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The value of each parameter in their order, and the options of the compiler."""
        names = list(self._kernel.arg_names)
        given = dict(zip(names, args, strict=False))
        given |= {name: value for name, value in named.items() if name in names}
        options = {name: value for name, value in named.items() if name not in names}
        return {name: given[name] for name in names}, options


class ClassGemm(PointerGemm):
    """The GEMM as every GPU of the class runs it."""

    kernel: ClassVar[Any] = Sm80Kernel(PointerGemm.kernel)


class TightClassGemm(PointerGemm):
    """The same with as many programs to an SM as fit into the shared memory of the smaller GPUs."""

    kernel: ClassVar[Any] = Sm80Kernel(PointerGemm.kernel, sm_shared=TIGHT)
