"""Speed on a GPU: CUDA graph timing of the entry and of stock, interleaved, on the same inputs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from ck_patch import shapes
from ck_patch.bench.cases import fp8_mm, fp8_operands
from ck_patch.measure import graph_times, host_times
from tests.gpu.conftest import Record
from tests.gpu.slot import entry, random_call, stock, stock_bias_dtype
from tests.gpu.test_equal import path_of

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SMALL = [(m, n, k) for n, k in ((4096, 4096), (3072, 3072)) for m in (8, 17, 40, 64, 77, 128, 200)]
EDGES = [(129, 3072, 3072), (256, 3072, 12288), (700, 2048, 2048), (1024, 1032, 2064)]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def test_the_gemm_is_faster_than_stock_on_every_model_shape(record: Record) -> None:
    speedups: dict[shapes.Shape, float] = {}
    limits = []
    for m, n, k in [*shapes.unique(), *SMALL, *EDGES]:
        call = random_call(m, n, k, BF16, stock_bias_dtype(BF16))
        _, theirs = call.run(stock())
        _, d = call.run(entry())
        equal = torch.equal(d, theirs)
        functions: dict[str, Any] = {
            "stock": lambda call=call, d=d: call.into(stock(), d),
            "ours": lambda call=call, d=d: call.into(entry(), d),
        }
        operands = fp8_operands((m, n, k))
        if operands is not None:
            functions["fp8"] = partial(fp8_mm, operands)
        times = graph_times(functions, rounds=5)
        speedups[m, n, k] = times["stock"] / times["ours"]
        fp8 = times.get("fp8")
        if m >= 1024 and fp8:
            limits.append(fp8 / times["ours"])
        record.add(
            "gemm",
            op="gemm",
            m=m,
            n=n,
            k=k,
            timing="graph",
            path=path_of(m, n, k, BF16),
            stock_ms=round(times["stock"], 5),
            ours_ms=round(times["ours"], 5),
            fp8_ms=None if fp8 is None else round(fp8, 5),
            tops=round(2e-9 * m * n * k / times["ours"], 1),
            speedup=round(speedups[m, n, k], 3),
            equal=equal,
        )
        assert equal
    large = geometric_mean([s for (m, _, _), s in speedups.items() if m >= 1024])
    worst = min(speedups, key=lambda shape: speedups[shape])
    record.add(
        "summary",
        geometric_mean_over_stock_m_1024=round(large, 3),
        geometric_mean_over_fp8_m_1024=round(geometric_mean(limits), 3) if limits else None,
        worst_over_stock=round(speedups[worst], 3),
        worst_shape=worst,
    )
    assert large >= 1.35
    assert speedups[worst] >= 0.98


def test_the_host_time_of_linear_and_entry_is_not_above_stocks(
    record: Record,
) -> None:
    import comfy_kitchen
    from comfy_kitchen.backends import cuda

    import ck_patch

    call = random_call(64, 256, 256, BF16, stock_bias_dtype(BF16))
    x = torch.randn(64, 256, device="cuda", dtype=BF16)
    bias = call.bias.to(BF16)
    _, d = call.run(entry())
    ours, theirs = cuda._wrap_for_dlpack, cuda._wrap_for_dlpack.__wrapped__
    functions = {
        # As the host calls it: with capsules that it makes itself.
        "slot": (lambda: call.into(stock(), d, theirs), lambda: call.into(entry(), d, ours)),
        "capsule": (lambda: theirs(call.a), lambda: ours(call.a)),
    }
    for op, (stocks, mine) in functions.items():
        times = host_times({"stock": stocks, "ours": mine})
        record.add("host_us", op=op, **{name: round(us, 2) for name, us in times.items()})
        assert times["ours"] <= times["stock"]

    def linear(convrot: bool) -> object:
        return comfy_kitchen.int8_linear(x, call.b, call.ws, bias, BF16, convrot=convrot)

    for convrot in (False, True):
        whole = {"linear": partial(linear, convrot)}
        samples: dict[str, list[float]] = {"ours": [], "stock": []}
        for _ in range(5):
            for name, switch in (("ours", ck_patch.enable), ("stock", ck_patch.disable)):
                switch()
                samples[name].append(host_times(whole, rounds=3)["linear"])
        ck_patch.enable()
        times = {name: sorted(values)[2] for name, values in samples.items()}
        op = "int8_linear_convrot" if convrot else "int8_linear"
        record.add("host_us", op=op, **{name: round(us, 1) for name, us in times.items()})
        assert times["ours"] <= times["stock"] * 1.02
