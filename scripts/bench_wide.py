"""Times the GEMM and the row quantizer against copies of them whose offsets have 32 bits.

Usage, from a checkout with the package installed, on a GPU:
python -m scripts.bench_wide [--json FILE]

The copies are the kernels' own source without its conversions to int64, so that they are right up
to 2^31 elements. The shapes are those of models that stay below that, with the configurations of
sm_90's rule.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ck_patch.kernels
from ck_patch import tables, tiles
from ck_patch.kernels.launch import Gemm, Operands
from ck_patch.kernels.quantize_rows import RowQuantizer
from ck_patch.kernels.registry import GEMMS
from ck_patch.measure import graph_times
from ck_patch.shapes import Shape
from ck_patch.stamp import stamp

COPIED = ("_blocks", "int8_gemm", "int8_gemm_tma", "quantize_rows")
SHAPES: tuple[Shape, ...] = (
    (77, 3072, 3072),
    (274, 2048, 2048),
    (512, 5120, 5120),
    (1024, 4096, 4096),
    (4096, 12288, 3072),
    (4608, 4096, 12288),
    (8192, 16384, 4096),
    (25900, 4096, 4096),
    (37296, 21504, 5376),
)
Run = Callable[[], object]


def narrow_modules(folder: Path) -> dict[str, Any]:
    """Copies of the kernels' modules without int64, by the names of the modules."""
    source = Path(ck_patch.kernels.__path__[0])
    for name in COPIED:
        text = (source / f"{name}.py").read_text(encoding="utf-8").replace(".to(tl.int64)", "")
        for other in COPIED:
            text = text.replace(f"ck_patch.kernels.{other} import", f"narrow_{other} import")
        (folder / f"narrow_{name}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    return {name: importlib.import_module(f"narrow_{name}") for name in COPIED}


def gemms(shape: Shape, narrow: dict[str, Any]) -> tuple[str, Run, Run]:
    """The configuration, and launches of the wide and of the narrow kernel, both proven equal."""
    m, n, k = shape
    sms = torch.cuda.get_device_properties().multi_processor_count
    config = tiles.hopper_order(m, n, k, sms)[0]
    kernel = narrow["int8_gemm" if config.family == "pointer" else "int8_gemm_tma"]
    family = GEMMS[config.family]()
    changed = getattr(kernel, family.kernel.fn.__name__)
    wide, thin = family(config), type("Narrow", (family,), {"kernel": changed})(config)
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
    b = torch.randint(-128, 128, (n, k), dtype=torch.int8, device="cuda")
    scales = torch.rand(m, device="cuda") * 0.01, torch.rand(n, device="cuda") * 0.01
    outs = [torch.full((m, n), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    bias = torch.randn(n, device="cuda").bfloat16()

    def bound(gemm: Gemm, d: torch.Tensor) -> Run:
        call = Operands(a, b, *scales, bias, d)
        gemm.run(call)
        tensors = (a, b, *scales, bias, d)
        launch, addresses = gemm.bind(call), [tensor.data_ptr() for tensor in tensors]
        return lambda: launch(addresses, torch.cuda.current_stream().cuda_stream)

    runs = bound(wide, outs[0]), bound(thin, outs[1])
    assert torch.equal(*outs)
    return config.name, *runs


def quantizers(m: int, k: int, narrow: dict[str, Any]) -> tuple[Run, Run]:
    """The same for the row quantizer."""
    changed = narrow["quantize_rows"]._quantize_rows_kernel
    x = torch.randn(m, k, device="cuda").bfloat16()
    runs, results = [], []
    for kind in (RowQuantizer, type("Narrow", (RowQuantizer,), {"kernel": changed})):
        q = torch.full((m, k), -77, dtype=torch.int8, device="cuda")
        scale = torch.full((m,), math.nan, device="cuda")
        runs.append(partial(kind("cuda").run, x, q, scale))
        runs[-1]()
        results.append((q, scale))
    (q, scale), (other_q, other_scale) = results
    assert torch.equal(q, other_q)
    assert torch.equal(scale, other_scale)
    return runs[0], runs[1]


def rows(narrow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each shape of the GEMM, and for each input of the quantizer."""
    for m, n, k in SHAPES:
        config, wide, thin = gemms((m, n, k), narrow)
        times = graph_times({"wide": wide, "narrow": thin}, rounds=15)
        yield {"op": "gemm", "m": m, "n": n, "k": k, "config": config, **_times(times)}
    for m, k in dict.fromkeys((m, k) for m, _, k in SHAPES):
        wide, thin = quantizers(m, k, narrow)
        times = graph_times({"wide": wide, "narrow": thin}, rounds=15)
        yield {"op": "quantize", "m": m, "n": None, "k": k, "config": None, **_times(times)}


def _times(milliseconds: dict[str, float]) -> dict[str, float]:
    wide, thin = milliseconds["wide"], milliseconds["narrow"]
    return {"wide_ms": wide, "narrow_ms": thin, "cost": round(wide / thin - 1, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = list(rows(narrow_modules(Path(folder))))
    cells = [
        [row["op"], *(str(row[name] or "-") for name in ("m", "n", "k")), f"{row['cost']:+.2%}"]
        for row in found
    ]
    tables.show("What 64-bit offsets cost", ("op", "M", "N", "K", "cost"), cells)
    for op in ("gemm", "quantize"):
        costs = [1 + row["cost"] for row in found if row["op"] == op]
        print(f"{op}: {math.prod(costs) ** (1 / len(costs)) - 1:+.2%} (geometric mean)")
    if given.json is not None:
        document = {"stamp": stamp(), "rows": found}
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
