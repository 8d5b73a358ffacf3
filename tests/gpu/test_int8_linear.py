"""`int8_linear` of the eager and the Triton backend on a GPU: equal to stock's, bit for bit, right
where 32-bit offsets end, and what it costs beside stock's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ck_patch import chunks, shapes
from ck_patch.measure import graph_times, replayed
from tests.gpu.conftest import Record
from tests.gpu.test_triton_backend import Canaries, bf16, int8, layer, windows

pytestmark = pytest.mark.gpu

BACKENDS = ("eager", "triton")
QUANTIZERS = {"eager": "quantize_int8_rowwise", "triton": "triton_quantize_rowwise"}
SETS = ("minimax_h3", "qwen_image_2_1", "qwen_image", "ltx_2_5")
BF16 = torch.bfloat16
FLOATS = (torch.float32, torch.float16, BF16)


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def host(backend: str) -> Any:
    __import__("comfy_kitchen")
    return sys.modules[f"comfy_kitchen.backends.{backend}.quantization"]


def ours(backend: str) -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = host(backend).int8_linear
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return function


@contextlib.contextmanager
def stock(backend: str) -> Iterator[Callable[..., torch.Tensor]]:
    """The stock function, with the stock quantizer, which is a slot too, in its module."""
    module, name = host(backend), QUANTIZERS[backend]
    patched = getattr(module, name)
    setattr(module, name, patched.__wrapped__)
    try:
        yield module.int8_linear.__wrapped__
    finally:
        setattr(module, name, patched)


def equal_to_stock(backend: str, x: torch.Tensor, **given: Any) -> bool:
    out = ours(backend)(x, **given)
    with stock(backend) as function:
        expected = function(x, **given)
    return (
        out.dtype == expected.dtype
        and out.shape == expected.shape
        and torch.equal(out.nan_to_num(0.5), expected.nan_to_num(0.5))
        and torch.equal(out.isnan(), expected.isnan())
    )


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CK_PATCH_LOG=path would write."""
    from ck_patch import log

    lines: list[str] = []
    monkeypatch.setattr(log, "paths_wanted", lambda: True)
    monkeypatch.setattr(log, "path", lines.append)
    return lines


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_number_of_rows_equals_stock(backend: str, record: Record) -> None:
    given = layer(2048, 2048)
    x = bf16(260, 2048)
    # Stock's Triton kernel is tuned anew for each of them.
    rows = range(261) if backend == "eager" else (0, 1, 16, 17, 77, 129, 260)
    for m in rows:
        if m > 0:
            assert equal_to_stock(backend, x[:m], **given), m
            continue
        # Stock fails on CUDA: cuBLAS wants rows, a grid wants blocks.
        empty = ours(backend)(x[:0].view(2, 0, 2048), **given)
        assert (empty.shape, empty.dtype) == ((2, 0, 2048), BF16)
    record.add(f"{backend}_int8_linear", what="rows 0 to 260", n=2048, k=2048, equal=True)


def _forms() -> Iterator[tuple[str, dict[str, Any]]]:
    base = layer(1024, 1024)
    x = bf16(300, 1024)
    n = 1024
    yield "no bias", {**base, "x": x, "bias": None}
    yield "1-D", {**base, "x": x[0]}
    yield "3-D", {**base, "x": bf16(2, 77, 1024)}
    yield "4-D", {**base, "x": bf16(1, 4, 77, 1024)}
    yield "bias as a parameter", {**base, "x": x, "bias": torch.nn.Parameter(base["bias"])}
    yield "scale of one value", {**base, "x": x, "weight_scale": base["weight_scale"][:1]}
    yield "scale as a scalar", {**base, "x": x, "weight_scale": base["weight_scale"][0]}
    yield "scale as a column", {**base, "x": x, "weight_scale": base["weight_scale"].view(n, 1)}
    for dtype in FLOATS:
        for out_dtype in FLOATS:
            for bias_dtype in FLOATS:
                given = {**base, "x": x.to(dtype), "bias": base["bias"].to(bias_dtype)}
                yield f"{dtype} {bias_dtype} to {out_dtype}", {**given, "out_dtype": out_dtype}
    for group in (16, 64, 256):
        yield f"rotated by {group}", {**base, "x": x, "convrot": True, "convrot_groupsize": group}
    yield "gelu", {**base, "x": x, "input_act": "gelu_tanh"}
    yield "swiglu", {**base, "x": bf16(300, 2048), "input_act": "swiglu"}
    poisoned = x.clone()
    poisoned[3, 7] = torch.nan
    yield "one NaN", {**base, "x": poisoned}
    yield "zeros", {**base, "x": torch.zeros_like(x)}
    yield "tiny", {**base, "x": x * 1e-30}
    yield "huge", {**base, "x": x * 1e30}
    yield "N in no alignment", {**layer(1020, 1024), "x": x}
    yield "K in no alignment", {**layer(1024, 1032), "x": bf16(300, 1032)}


def _residual_forms() -> Iterator[tuple[str, dict[str, Any]]]:
    base = layer(1024, 1024)
    for dtype in FLOATS:
        residual = {"residual": bf16(300, 1024).to(dtype), "residual_scale": bf16(1024)}
        yield f"residual in {dtype}", {**base, "x": bf16(300, 1024), **residual}
    weight = {"input_act_weight": bf16(1024), "input_act_eps": 1e-6}
    yield "rms_norm", {**base, "x": bf16(300, 1024), "input_act": "rms_norm", **weight}
    yield "situ", {**base, "x": bf16(300, 2048), "input_act": "situ"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_call_equals_stock(backend: str, record: Record, paths: list[str]) -> None:
    import inspect

    forms = dict(_forms())
    if "residual" in inspect.signature(ours(backend)).parameters:
        forms |= dict(_residual_forms())
    if backend == "triton":
        del forms["1-D"]  # Stock's takes it, and its quantizer needs two dimensions.
        # Stock compiles six kernels for each set of dtypes.
        kept = {f"{BF16} {dtype} to {dtype}" for dtype in FLOATS}
        forms = {name: given for name, given in forms.items() if " to " not in name or name in kept}
    different = [name for name, given in forms.items() if not equal_to_stock(backend, **given)]
    assert different == []
    assert any(": triton " in line for line in paths if line.startswith(f"{backend}_int8_linear"))
    record.add(f"{backend}_int8_linear", what="forms of a call", forms=len(forms), equal=True)


def test_a_gradient_is_stocks_affair() -> None:
    x = bf16(300, 1024).requires_grad_()
    given = layer(1024, 1024)
    out = ours("eager")(x, **given)
    with stock("eager") as function:
        assert out.requires_grad == function(x, **given).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(99_865, 21_504, 5376), (100_352, 21_504, 5376), (74_899, 28_672, 512)],
    ids=lambda value: str(value),
)
def test_an_output_beyond_32_bits_is_right_and_nothing_around_it_changes(
    backend: str, m: int, n: int, k: int, record: Record
) -> None:
    x, given = bf16(m, k), layer(n, k)
    function = ours(backend)
    function(x, **given)  # Compiled and proven, with all that this allocates.
    torch.cuda.empty_cache()
    size = m * n * 2
    canaries = Canaries(size)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(x, **given)
    peak = torch.cuda.max_memory_allocated() - before
    canaries.assert_untouched()
    step = chunks.rows_per_chunk(n) * 8
    with stock(backend) as alone:
        for rows in (*chunks.chunks(m, step), *windows(m, n)):
            assert torch.equal(out[rows], alone(x[rows], **given)), rows
    above = peak - size
    assert above <= m * (k + 4) + 2**26
    row = {"m": m, "n": n, "k": k, "equal": True, "above_output": above}
    record.add(f"{backend}_int8_linear", what="output beyond 2^31", **row)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_activation_beyond_32_bits_is_right(backend: str, record: Record) -> None:
    m, n, k = 149_798, 128, 14_336
    x, given = bf16(m, k), layer(n, k)
    out = ours(backend)(x, **given)
    with stock(backend) as alone:
        for rows in (*chunks.chunks(m, m // 3), *windows(m, k)):
            assert torch.equal(out[rows], alone(x[rows], **given)), rows
    record.add(f"{backend}_int8_linear", what="activation beyond 2^31", m=m, n=n, k=k, equal=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_w4a8_beyond_32_bits_is_right(backend: str, record: Record) -> None:
    __import__("comfy_kitchen")
    module = sys.modules[f"comfy_kitchen.backends.{backend}"]
    m, n, k = 100_352, 21_504, 256
    x = bf16(m, k)
    scales = torch.rand(n, k // 16, device="cuda") * 8 + 8, torch.rand(n, device="cuda") * 0.01
    weight = int8(n, k // 2), *scales
    given: dict[str, Any] = {"bias": bf16(n), "group_size": 16, "convrot_groupsize": 256}
    out = module.w4a8_int8_linear(x, *weight, **given)
    # Rotating is torch's matmul on all rows at once; what follows depends on each row alone.
    h = host(backend)._build_hadamard(256, device="cuda", dtype=BF16)
    rotated = host(backend)._rotate_activation(x, h, 256)
    bound = sys.modules[f"comfy_kitchen.backends.{backend}.w4a8_int8"]
    dense = bound._dequant_int4_grouped_to_int8(weight[0], weight[1], None, 16)
    plain = {"weight": dense, "weight_scale": weight[2], "bias": given["bias"]}
    with stock(backend) as alone:
        for rows in (*chunks.chunks(m, m // 4), *windows(m, n)):
            assert torch.equal(out[rows], alone(rotated[rows], **plain)), rows
    record.add(f"{backend}_int8_linear", what="W4A8 beyond 2^31", m=m, n=n, k=k, equal=True)


def _peak(function: Callable[[], object]) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_faster_than_stock_on_every_model_shape(backend: str, record: Record) -> None:
    sets = shapes.load()
    found = sorted({shape for name in SETS for shape in sets[name]})
    if backend == "triton":
        # Stock tunes each of them; beyond the limit it cannot run at all.
        found = [shape for shape in found if shape[0] * shape[1] < chunks.LIMIT][::3]
    slower = []
    for m, n, k in found:
        x, given = bf16(m, k), layer(n, k)

        def mine(x: torch.Tensor = x, given: dict[str, Any] = given) -> torch.Tensor:
            return ours(backend)(x, **given)

        def theirs(x: torch.Tensor = x, given: dict[str, Any] = given) -> torch.Tensor:
            with stock(backend) as function:
                return function(x, **given)

        assert torch.equal(mine(), theirs()), (m, n, k)
        peaks = _peak(mine), _peak(theirs)
        times = graph_times({"stock": theirs, "ours": mine}, rounds=3, span=1e-3)
        torch.cuda.empty_cache()
        record.add(
            f"{backend}_speed",
            op="int8_linear",
            m=m,
            n=n,
            k=k,
            timing="graph",
            stock_ms=round(times["stock"], 4),
            ours_ms=round(times["ours"], 4),
            times=round(times["stock"] / times["ours"], 3),
            stock_peak_mib=peaks[1] >> 20,
            ours_peak_mib=peaks[0] >> 20,
            equal=True,
        )
        if times["ours"] > 1.02 * times["stock"] or peaks[0] > peaks[1]:
            slower.append(((m, n, k), times, peaks))
    assert slower == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_replays_what_eager_computes(backend: str) -> None:
    x, given = bf16(512, 1024), layer(1024, 1024)
    function = ours(backend)
    expected = function(x, **given)
    assert torch.equal(replayed(lambda: function(x, **given)), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_capture_of_an_unseen_shape_is_right(backend: str) -> None:
    """In a graph nothing can be compiled: what was not proven before is stock's."""
    x, given = bf16(520, 1040), layer(1048, 1040)
    function = ours(backend)
    with stock(backend) as theirs:
        expected = theirs(x, **given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = function(x, **given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
