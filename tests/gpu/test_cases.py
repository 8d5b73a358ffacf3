"""Reported failures of INT8 linears on a GPU, as whole calls of the three backends."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ck_patch import chunks, patcher
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.measure import graph_times
from ck_patch.ops import int8_linear
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings
from ck_patch.slots import SLOTS
from tests.gpu.conftest import Record
from tests.gpu.slot import entry, random_call, stock, stock_bias_dtype
from tests.gpu.test_int8_linear import host
from tests.gpu.test_triton_backend import Canaries, bf16, layer, windows

pytestmark = pytest.mark.gpu

Linear = Callable[..., torch.Tensor]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ("cuda", "eager", "triton")
every_backend = pytest.mark.parametrize("backend", BACKENDS)
generic_backends = pytest.mark.parametrize("backend", ["eager", "triton"])


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's Triton kernels in one configuration: all compute the same, and tuning takes long."""
    module = host("triton")
    for name in ("_int8_matmul_dequant_kernel", "_int8_matmul_dequant_per_row_kernel"):
        tuner = getattr(module, name)
        monkeypatch.setattr(tuner, "configs", tuner.configs[-1:])


def module_of(backend: str) -> Any:
    if backend != "cuda":
        return host(backend)
    from comfy_kitchen.backends import cuda

    return cuda


def mine(backend: str) -> Linear:
    """Our function; that of the CUDA backend takes keywords only, as the registry calls it."""
    function = module_of(backend).int8_linear
    assert hasattr(function, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return lambda x, **given: function(x=x, **given)


def theirs(backend: str, x: torch.Tensor, **given: Any) -> torch.Tensor:
    """Stock's result, nothing of ours within it."""
    with pytest.MonkeyPatch.context() as patch:
        for slot in SLOTS:
            for binding in slot.bindings:
                owner = binding.find_owner()
                stock = getattr(getattr(owner, binding.attribute, None), "__wrapped__", None)
                if stock is not None:
                    patch.setattr(owner, binding.attribute, stock)
        found: torch.Tensor = module_of(backend).int8_linear(x=x, **given)
        return found


def agrees(backend: str, x: torch.Tensor, **given: Any) -> bool:
    """Whether ours is equal to stock's, or refused as stock refuses it."""
    try:
        expected = theirs(backend, x, **given)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            mine(backend)(x, **given)
        return True
    return same(mine(backend)(x, **given), expected)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, one NaN as another."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def quantized(backend: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the backend's own linear makes of x, by stock."""
    name = "triton_quantize_rowwise" if backend == "triton" else "quantize_int8_rowwise"
    q, scale = getattr(module_of(backend), name).__wrapped__(x)
    return q, scale


def assert_right(backend: str, out: torch.Tensor, x: torch.Tensor, **given: Any) -> None:
    """Within the rounding to the output dtype of the exact sums of what was quantized."""
    q, scale = quantized(backend, x)
    exact = q.double() @ given["weight"].double().t()
    exact = exact * scale.double() * given["weight_scale"].double() + given["bias"].double()
    size = exact.abs() + 2 * given["bias"].double().abs()
    assert ((out.double() - exact).abs() <= 2.0**-7 * size + 1e-6).all()


def check(backend: str, x: torch.Tensor, **given: Any) -> None:
    """Ours is right, or refused as stock refuses it; one or two rows are stock's own on CUDA."""
    try:
        out = mine(backend)(x, **given)
    except Exception as refusal:
        with pytest.raises(type(refusal)):
            theirs(backend, x, **given)
        return
    assert out.shape == (*x.shape[:-1], given["weight"].shape[0])
    if backend == "cuda" and x.shape[0] < 3:
        assert same(out, theirs(backend, x, **given))
    else:
        assert_right(backend, out, x, **given)


def volta() -> tuple[Linear, Breaker]:
    """The eager backend's op as a GPU of sm_70 has it: over a weight dequantized to FP16."""
    breaker = Breaker()
    settings = Settings(assume=((None, (7, 0)),))
    context = OpContext(settings, breaker, RELEASES[-1], check_first=False)
    return int8_linear.build_eager(host("eager").int8_linear.__wrapped__, context).function, breaker


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (74_898, 28_672, 64),
        (74_899, 28_672, 64),
        (32_769, 65_536, 16),
        (99_864, 21_504, 64),
        (99_865, 21_504, 64),
    ],
    ids=str,
)
@every_backend
def test_rows_on_either_side_of_2_31_elements_are_right(
    backend: str, m: int, n: int, k: int
) -> None:
    x, given = bf16(m, k), layer(n, k)
    out = mine(backend)(x, **given)
    for rows in windows(m, n):
        assert same(out[rows], theirs(backend, x[rows], **given)), rows
        assert_right(backend, out[rows], x[rows], **given)


@generic_backends
def test_a_gated_activation_beyond_2_31_elements_is_right(backend: str) -> None:
    m, k, n = 74_899, 14_336, 128
    x, given = bf16(m, 2 * k), {**layer(n, k), "input_act": "swiglu"}
    out = mine(backend)(x, **given)
    for rows in windows(m, 2 * k):
        assert same(out[rows], theirs(backend, x[rows], **given)), rows


@every_backend
@pytest.mark.parametrize("many", [65_535, 65_536, 65_537, 131_073])
def test_sizes_around_the_limit_of_a_grid_are_right_as_rows_and_as_columns(
    backend: str, many: int
) -> None:
    few, k = 128, 256
    x, given = bf16(many, k), layer(few, k)
    out = mine(backend)(x, **given)
    for rows in chunks.chunks(many, 30_000):
        assert same(out[rows], theirs(backend, x[rows], **given)), rows
    x = bf16(few, k)
    check(backend, x, **layer(many, k))
    # The next size that is ours, where that one is stock's.
    check(backend, x, **layer(-(-many // 16) * 16, k))


@every_backend
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_rows_with_an_infinity_or_a_nan_leave_other_rows_as_they_are(
    backend: str, dtype: torch.dtype
) -> None:
    # A K that no other test has: the kernels are compared with stock on these very rows.
    k = 5392
    x, given = torch.randn(8, k, device="cuda").to(dtype), layer(256, k)
    x[0, 7] = torch.finfo(dtype).max
    clean = theirs(backend, x, **given)
    x[1, 5], x[2, k - 1], x[3, 100] = torch.inf, -torch.inf, torch.nan
    first, second = mine(backend)(x, **given), mine(backend)(x, **given)
    others = [0, 4, 5, 6, 7]
    assert same(first[others], clean[others])
    assert same(first, second)
    if backend != "triton":  # Its quantizer spoils rows 1 and 2, and loses row 3 in its own way.
        assert same(first, theirs(backend, x, **given))
    else:
        largest = torch.finfo(dtype).max / 127 * 127
        sums = given["weight"][:, [5, k - 1]].double() * torch.tensor([1.0, -128 / 127]).cuda()
        exact = sums * largest * given["weight_scale"].double()[:, None]
        within = exact.abs() < torch.finfo(BF16).max * 0.99
        near = (first[1:3].double().t() - exact).abs() <= 0.02 * exact.abs() + 100
        assert (near | ~within).all()


@every_backend
def test_sums_beyond_float16_are_infinite_there_and_finite_in_bfloat16(backend: str) -> None:
    k, n = 5376, 256
    x = torch.full((300, k), 127.0, device="cuda", dtype=BF16)
    given = {
        "weight": torch.full((n, k), 127, dtype=torch.int8, device="cuda"),
        "weight_scale": torch.ones(n, device="cuda"),
    }
    for dtype in (F16, BF16, F32):
        out = mine(backend)(x, **given, out_dtype=dtype)
        assert same(out, theirs(backend, x, **given, out_dtype=dtype))
        assert not out.isnan().any()
        assert (out == torch.inf).all() == (dtype == F16)


@pytest.mark.parametrize("allowed", [False, True], ids=["float32 sums", "float16 sums allowed"])
def test_the_fp16_path_neither_heeds_nor_changes_torchs_switch(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_fp16_accumulation", allowed)
    linear, breaker = volta()
    weight = torch.ones(512, 16_384, dtype=torch.int8, device="cuda")
    weight[:, 8192:] = -1
    scale = torch.ones(1, device="cuda")
    for m in (1, 2, 16, 17, 64, 300, 4096):
        for dtype in (F16, BF16):
            x = torch.full((m, 16_384), 8.0, device="cuda", dtype=dtype)
            assert (linear(x, weight, scale, out_dtype=F16) == 0).all(), (m, dtype)
    assert matmul.allow_fp16_accumulation == allowed
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("backend", ["cuda", "eager"])
def test_a_seed_rounds_up_as_often_as_the_value_says(backend: str) -> None:
    quantize = module_of(backend).quantize_int8_rowwise
    assert hasattr(quantize, "__wrapped__")
    w = torch.full((256, 5376), 3.25, device="cuda", dtype=BF16)
    w[:, 0] = 127  # Makes the scale 1.
    q, scale = quantize(w, stochastic_rounding=1234)
    assert torch.equal(q, quantize(w, stochastic_rounding=1234)[0])
    assert not torch.equal(q, quantize(w, stochastic_rounding=1235)[0])
    mean = (q[:, 1:].double() * scale.double()).mean().item()
    assert abs(mean - 3.25) < 0.02
    assert (quantize(w)[0][:, 1:] == 3).all()


@every_backend
@pytest.mark.parametrize("n", [17, 24, 40, 6144])
def test_columns_that_fill_no_tile_leak_into_no_number_of_rows(backend: str, n: int) -> None:
    x, given = bf16(40, 2064), layer(n, 2064)
    for m in range(1, 41):
        check(backend, x[:m], **given)


@pytest.mark.parametrize(
    ("backend", "n", "k"), [("cuda", 2048, 2048), ("triton", 2048, 2048), ("eager", 896, 4864)]
)
def test_there_is_no_number_of_rows_that_does_not_work(backend: str, n: int, k: int) -> None:
    x, given = bf16(260, k), layer(n, k)
    q, scale = quantized(backend, x)
    exact = q.double() @ given["weight"].double().t() * scale.double()
    exact = exact * given["weight_scale"].double() + given["bias"].double()
    tolerance = 2.0**-7 * (exact.abs() + 2 * given["bias"].double().abs()) + 1e-6
    good = [
        ((mine(backend)(x[:m], **given).double() - exact[:m]).abs() <= tolerance[:m]).all()
        for m in range(3 if backend == "cuda" else 1, 261)
    ]
    assert torch.stack(good).all()


@every_backend
@pytest.mark.parametrize("n", [51_865, 51_866, 51_868])
def test_columns_in_no_alignment_are_right(backend: str, n: int) -> None:
    for m in (4, 300):
        check(backend, bf16(m, 1280), **layer(n, 1280))


@every_backend
def test_a_batch_without_rows_is_a_batch_without_rows(backend: str) -> None:
    given = {**layer(256, 512), "out_dtype": F16}
    for shape in ((0, 512), (0, 77, 512), (2, 0, 512)):
        x = torch.empty(shape, device="cuda", dtype=BF16)
        if backend == "cuda":
            assert agrees(backend, x, **given)
            continue
        # Stock fails: cuBLAS wants rows, a grid wants blocks.
        out = mine(backend)(x, **given)
        assert (out.shape, out.dtype) == ((*shape[:-1], 256), F16)


def at_the_end(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """A copy as near to the end of an allocation as a start on a multiple of `start` bytes is."""
    # Blocks beyond 10 MiB are allocated alone, in steps of 2 MiB: nothing of it is left over.
    block = torch.full((32 << 20,), -1, dtype=torch.int8, device="cuda")
    first = (block.numel() - tensor.nbytes) // start * start
    flat = block[first : first + tensor.nbytes].view(tensor.dtype)
    return flat.view(tensor.shape).copy_(tensor)


@every_backend
@pytest.mark.parametrize("k", [17, 20, 24, 48, 100, 2064])
def test_any_depth_is_right_at_the_end_of_an_allocation(backend: str, k: int) -> None:
    x, given = bf16(33, k), layer(64, k)
    start = 16 if backend == "cuda" else x.itemsize  # Stock's CUDA kernels read vectors.
    x, given["weight"] = at_the_end(x, start), at_the_end(given["weight"], start)
    for _ in range(2):  # First use, then a launch of the compiled kernels.
        check(backend, x, **given)
    linear, breaker = volta()
    halves = linear(x, **given)
    exact = x.double() @ given["weight"].double().t() * given["weight_scale"].double()
    exact += given["bias"].double()
    assert (halves.double() - exact).norm() <= 0.01 * exact.norm()
    assert breaker.snapshot() == ()
    torch.cuda.synchronize()


@every_backend
def test_a_scale_of_two_dimensions_is_no_worse_than_with_stock(backend: str) -> None:
    x, given = bf16(300, 512), layer(256, 512)
    given["weight_scale"] = given["weight_scale"][:1].view(1, 1)
    if backend == "cuda":
        assert agrees(backend, x, **given)  # Stock expands it, which a matrix refuses.
    else:
        out = mine(backend)(x, **given)
        assert same(out, mine(backend)(x, **{**given, "weight_scale": given["weight_scale"][0]}))
    for dtype in (F16, BF16):
        low = layer(256, 512)["weight_scale"].to(dtype)
        assert agrees(backend, x, **{**given, "weight_scale": low}), dtype


@every_backend
def test_tensors_made_for_inference_work_inside_and_outside(backend: str) -> None:
    with torch.inference_mode():
        x, given = bf16(300, 1024), layer(512, 1024)
        inside = mine(backend)(x, **given)
    with torch.no_grad():
        outside = mine(backend)(x, **given)
    assert torch.equal(mine(backend)(x, **given), outside)
    assert torch.equal(inside, outside)
    assert same(outside, theirs(backend, x, **given))


@every_backend
def test_the_shape_of_an_h3_layer_with_its_activation_equals_stock(backend: str) -> None:
    x, given = bf16(64, 28_672), {**layer(5376, 14_336), "input_act": "swiglu"}
    assert same(mine(backend)(x, **given), theirs(backend, x, **given))


@every_backend
@pytest.mark.parametrize("scale_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("m", [1, 2, 300])
def test_a_residual_is_never_dropped(backend: str, m: int, scale_dtype: torch.dtype) -> None:
    if "residual" not in inspect.signature(module_of(backend).int8_linear).parameters:
        pytest.skip("this release has no residual form")
    x, plain = bf16(m, 1024), layer(512, 1024)
    residual, scale = bf16(m, 512) * 100, bf16(512).to(scale_dtype)
    given = {**plain, "residual": residual, "residual_scale": scale}
    assert agrees(backend, x, **given)
    if (backend, scale_dtype) == ("cuda", F32):
        return  # Stock may refuse it.
    linear = theirs(backend, x, **plain).double()
    exact = residual.double() + scale.double() * linear
    out = mine(backend)(x, **given).double()
    assert ((out - exact).abs() <= 0.01 * (residual.abs() + (scale * linear).abs() + 1)).all()


@every_backend
@pytest.mark.parametrize(
    ("k", "rotated"), [(15_360, True), (16_384, True), (24_576, True), (22_473, False)], ids=str
)
def test_either_side_of_the_limit_of_the_fused_quantizer_equals_stock(
    backend: str, k: int, rotated: bool
) -> None:
    x, given = bf16(40, k), {**layer(256, k), "convrot": rotated}
    for _ in range(2):
        assert agrees(backend, x, **given)


@pytest.mark.parametrize("m", [274, 1024, 4096, 16_384])
@pytest.mark.parametrize(("n", "k"), [(1024, 2048), (2048, 2048), (1536, 6144)], ids=str)
def test_no_shallow_shape_is_slower_than_stock(m: int, n: int, k: int, record: Record) -> None:
    call = random_call(m, n, k, BF16, stock_bias_dtype(BF16))
    _, expected = call.run(stock())
    _, d = call.run(entry())
    assert torch.equal(d, expected)
    functions = {
        "stock": lambda: call.into(stock(), d),
        "ours": lambda: call.into(entry(), d),
    }
    times = graph_times(functions, rounds=5)
    row = {f"{name}_ms": round(value, 5) for name, value in times.items()}
    record.add("shallow", m=m, n=n, k=k, **row)
    assert times["ours"] <= 1.02 * times["stock"]


@generic_backends
def test_a_resolution_that_changes_compiles_nothing_once_its_tiles_are_known(backend: str) -> None:
    op: Any = patcher._PATCHER._patches[f"{backend}_int8_linear"].replacement
    given = layer(3072, 3072)
    sizes = [(side // 16) ** 2 + 77 for side in range(512, 1536, 112)]
    for m in sizes:
        mine(backend)(bf16(m, 3072), **given)
    known = set(op._gemm._planner._kernels)
    for m in sizes:
        for nearby in (m + 1, m + 16, m + 435):  # A prompt of 512 tokens in place of 77.
            mine(backend)(bf16(nearby, 3072), **given)
    assert set(op._gemm._planner._kernels) == known


@generic_backends
def test_no_memory_is_kept_after_many_shapes_on_many_streams(backend: str) -> None:
    given, streams = layer(1024, 512), [torch.cuda.Stream() for _ in range(3)]

    def work() -> None:
        for stream in streams:
            for m in range(100, 150):
                with torch.cuda.stream(stream):
                    mine(backend)(bf16(m, 512), **given)

    kept = []
    for _ in range(2):
        work()
        torch.cuda.synchronize()
        gc.collect()
        kept.append(torch.cuda.memory_allocated())
    assert kept[1] <= kept[0] + 2**20


@every_backend
def test_too_little_memory_is_the_callers_and_closes_nothing(backend: str) -> None:
    m, n, k = 8192, 32_768, 1024
    x, given = bf16(m, k), layer(n, k)
    expected = mine(backend)(x, **given)[:64].clone()
    linear, breaker = volta()
    linear(x[:64], **given)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + m * n  # Half of the output.
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            mine(backend)(x, **given)
        with pytest.raises(torch.OutOfMemoryError):
            linear(x, **given)
        # Enough for a call with fewer rows, at once.
        assert torch.equal(mine(backend)(x[:64], **given), expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(mine(backend)(x, **given)[:64], expected)
    assert breaker.snapshot() == ()


@generic_backends
@pytest.mark.parametrize("name", ["weight", "weight_scale", "bias"])
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_an_operand_on_the_cpu_is_stocks_affair(backend: str, name: str, pinned: bool) -> None:
    x, given = bf16(300, 1024), layer(512, 1024)
    good = mine(backend)(x, **given)
    offloaded = given[name].cpu()
    assert agrees(backend, x, **{**given, name: offloaded.pin_memory() if pinned else offloaded})
    assert torch.equal(mine(backend)(x, **given), good)


@every_backend
def test_a_side_stream_needs_no_synchronization(backend: str) -> None:
    x, given = bf16(1024, 2048), layer(1024, 2048)
    mine(backend)(x, **given)
    fresh = torch.randn_like(x)
    expected = theirs(backend, fresh, **given)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # The producer is still busy when ours is launched.
        x.copy_(fresh)
        out = mine(backend)(x, **given)
        assert not side.query(), "nothing waited for the producer"
    side.synchronize()
    assert torch.equal(out, expected)


@generic_backends
def test_four_threads_may_meet_one_new_shape_at_once(backend: str) -> None:
    x, given = bf16(700, 1328), layer(1064, 1328)
    expected = theirs(backend, x, **given)
    barrier = threading.Barrier(4)
    wrong: list[object] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for _ in range(10):
                    if not torch.equal(mine(backend)(x, **given), expected):
                        wrong.append("differs")
        except BaseException as error:
            wrong.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_memory_around_the_output_stays_as_it_is_beyond_2_31_in_fp16_too() -> None:
    m, n, k = 74_899, 28_672, 64
    x, given = bf16(m, k), layer(n, k)
    linear, breaker = volta()
    linear(x[:64], **given)
    canaries = Canaries(m * n * 2)
    out = linear(x, **given)
    canaries.assert_untouched()
    for rows in windows(m, n):
        exact = x[rows].double() @ given["weight"].double().t() * given["weight_scale"].double()
        exact += given["bias"].double()
        assert (out[rows].double() - exact).norm() <= 0.01 * exact.norm(), rows
    assert breaker.snapshot() == ()


ASYNC = """
    import os, torch
    import ck_patch
    assert not torch.cuda.is_initialized()
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert not torch.cuda.is_initialized()
        raise SystemExit(os.waitstatus_to_exitcode(status))
    # Not before: comfy_kitchen asks whether CUDA is there, after which no child can start it.
    from comfy_kitchen.backends import eager
    ck_patch.enable()
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    w = torch.randint(-127, 128, (512, 1024), dtype=torch.int8, device="cuda")
    scale = torch.rand(512, device="cuda")
    stock = eager.int8_linear.__wrapped__
    for _ in range(3):
        assert torch.equal(eager.int8_linear(x, w, scale), stock(x, w, scale))
    assert ck_patch.status().breakers == ()
    del x, w, scale
    torch.cuda.empty_cache()
    print("freed")
"""


def test_a_forked_child_with_the_asynchronous_allocator_starts_cuda_and_frees_everything() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ASYNC)],
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "freed"), done.stderr
    assert "invalid argument" not in done.stderr
