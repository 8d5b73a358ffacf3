"""What runs of the `mma.sync` class on a newer GPU, as far as it goes without one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ck_patch import tiles
from ck_patch.kernels.int8_gemm import PointerGemm
from ck_patch.kernels.launch import Operands
from ck_patch.tiles import TileConfig
from tests.interpreter import interpreting
from tests.kernels.test_compile import tool

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets, it compiles nothing")


def compiled(config: TileConfig) -> Any:
    from ck_patch.bench.class_sm80 import Sm80Kernel

    class CompiledOnly(Sm80Kernel):
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
            return self.compile

    class CompiledGemm(PointerGemm):
        kernel: ClassVar[Any] = CompiledOnly(PointerGemm.kernel)

    int8 = torch.empty(64, config.block_k, dtype=torch.int8)
    scale, d = torch.empty(64), torch.empty(64, 64, dtype=torch.bfloat16)
    gemm = CompiledGemm(config)
    gemm.run(Operands(a=int8, b=int8, x_scale=scale, w_scale=scale, bias=d[0], d=d))
    return gemm._compiled


@pytest.mark.parametrize(
    "config",
    [tiles.EIGHT_WARPS, *(cost.config for cost in tiles.MMA_SYNC_COSTS)],
    ids=lambda config: config.name,
)
def test_what_the_driver_gets_is_ptx_that_hopper_accepts(
    config: TileConfig, tmp_path: Path
) -> None:
    text = compiled(config).kernel.removesuffix(b"\0")
    assert b".target sm_80" in text
    assert re.search(rb"mma\.sync\.aligned\.m16n8k32[\w.]*\.s32\.s8\.s8\.s32", text)
    assert b"wgmma" not in text
    source = tmp_path / "kernel.ptx"
    source.write_bytes(text)
    command = [tool("ptxas"), "--gpu-name=sm_90", str(source), "-o", str(tmp_path / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
