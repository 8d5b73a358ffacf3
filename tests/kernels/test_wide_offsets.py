"""What 64-bit offsets cost, counted in the binaries: beside copies of the kernels without them."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ck_patch import device, tiles
from tests.interpreter import interpreting
from tests.kernels.test_compile import Case, compiled, compiled_as, tool

pytestmark = pytest.mark.skipif(interpreting(), reason="Triton interprets, it compiles nothing")

COPIED = ("_blocks", "int8_gemm", "int8_gemm_tma")
SHALLOW = 2048
"""The smallest K of a model: the rest of a tile is done once for so much of the loop."""
GPUS = {gpu.architecture: gpu for gpu in device.KNOWN}
CASES = [
    Case(GPUS[architecture], config, "bfloat16", "bfloat16", True, "cutlass", False)
    for architecture, config in (
        ("sm_80", tiles.MMA_SYNC),
        ("sm_86", tiles.EIGHT_WARPS),
        ("sm_120", tiles.MMA_SYNC),
        ("sm_90", tiles.HOPPER),
        *(("sm_90", cost.config) for cost in tiles.HOPPER_SMALL[-3:]),
    )
]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The modules of the GEMM without a conversion to int64: right below 2^31 elements."""
    kernels = importlib.import_module("ck_patch.kernels")
    source, folder = Path(kernels.__path__[0]), tmp_path_factory.mktemp("narrow")
    for name in COPIED:
        text = (source / f"{name}.py").read_text(encoding="utf-8").replace(".to(tl.int64)", "")
        for other in COPIED:
            text = text.replace(f"ck_patch.kernels.{other} import", f"narrow_{other} import")
        (folder / f"narrow_{name}.py").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield {name: importlib.import_module(f"narrow_{name}") for name in COPIED}
    for name in COPIED:
        del sys.modules[f"narrow_{name}"]


def counted(cubin: bytes, folder: Path) -> tuple[int, int]:
    """Instructions of the whole kernel, and of its loop over K."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [tool("nvdisasm"), "-c", str(path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[int] = []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line) and ";" in line:
            lines.append(line)
            back = re.search(r"BRA\S*\s.*`\((\.L_\w+)\)", line)
            if back and back[1] in labels:
                body = lines[labels[back[1]] :]
                if any("MMA" in instruction for instruction in body):
                    loops.append(len(body))
    assert loops, "no loop with products"
    return len(lines), min(loops)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_64_bit_offsets_add_nothing_to_the_loop_and_hardly_anything_to_a_tile(
    case: Case, narrow: dict[str, Any], tmp_path: Path
) -> None:
    pointer = case.config.family == "pointer"
    module = narrow["int8_gemm" if pointer else "int8_gemm_tma"]
    kernel = module._int8_gemm_dequant_kernel if pointer else module._int8_gemm_dequant_tma_kernel
    copy = compiled_as(kernel, case)
    wide, wide_loop = counted(compiled(case).asm["cubin"], tmp_path)
    thin, thin_loop = counted(copy.asm["cubin"], tmp_path)
    assert copy.asm["ttir"].count("i64") < compiled(case).asm["ttir"].count("i64")
    steps = SHALLOW // case.config.block_k
    per_tile = wide - wide_loop + steps * wide_loop
    assert per_tile <= 1.03 * (thin - thin_loop + steps * thin_loop)
    assert wide_loop <= thin_loop
