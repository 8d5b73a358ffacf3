"""What a ComfyUI process does around a GEMM: streams, threads, capture, failures, little memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch.breaker import Breaker
from ck_patch.context import OpContext
from ck_patch.kernels.launch import Gemm, Operands
from ck_patch.ops import cutlass_int8_dequant as op
from ck_patch.ops.gemm import Int8Gemm
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings
from tests.gpu.slot import entry, random_call, stock, stock_bias_dtype

pytestmark = pytest.mark.gpu

# A shape of its own per test: what one test proved or planned must not help another.
BF16 = torch.bfloat16


def fresh_op(int8: str = "triton") -> tuple[Any, Breaker]:
    """An op around the real stock function that has not met this GPU yet.

    It takes our kernels at every size, in eager calls too.
    """
    release = RELEASES[-1 if stock_bias_dtype(BF16) == BF16 else 0]
    breaker = Breaker()
    context = OpContext(Settings(int8=int8), breaker, release, check_first=False)
    return op.build(stock(), context), breaker


def test_the_start_file_alone_has_patched_this_process() -> None:
    states = {slot.name: slot.state for slot in ck_patch.status().slots}
    assert set(states.values()) == {"patched"}


def test_int8_linear_runs_our_kernel_and_compare(caplog: pytest.LogCaptureFixture) -> None:
    import comfy_kitchen

    x = torch.randn(3, 700, 3072, device="cuda", dtype=BF16)
    weight = torch.randint(-127, 128, (4096, 3072), dtype=torch.int8, device="cuda")
    scale = torch.rand(4096, device="cuda") * 0.01
    bias = torch.nn.Parameter(torch.randn(4096, device="cuda", dtype=BF16))

    def both(**options: Any) -> None:
        ck_patch.enable()
        ours = comfy_kitchen.int8_linear(x, weight, scale, bias, BF16, **options)
        ck_patch.disable()
        theirs = comfy_kitchen.int8_linear(x, weight, scale, bias, BF16, **options)
        ck_patch.enable()
        assert torch.equal(ours, theirs)

    both()
    both(convrot=True)


def test_a_capture_before_first_use_records_stock_and_later_ones_record_us() -> None:
    replacement, _ = fresh_op()
    call = random_call(1024, 1536, 2048, BF16, stock_bias_dtype(BF16))
    _, expected = call.run(stock())
    d = torch.empty_like(expected)

    def captured() -> int:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            assert call.into(replacement.function, d)
        d.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(d, expected)
        return sum(kernel.proven for kernel in replacement._gemm._planner._kernels.values())

    assert captured() == 0
    assert call.into(replacement.function, d)
    assert torch.equal(d, expected)
    assert captured() == 1
    call.a.random_(-128, 128)
    _, expected = call.run(stock())
    assert captured() == 1


def test_capture_in_a_thread_while_another_thread_compiles_first_uses() -> None:
    replacement, breaker = fresh_op()
    ready = random_call(512, 2048, 1024, BF16)
    _, expected = ready.run(stock())
    ready.run(replacement.function)
    # Drawn before: torch's generator refuses to work in one thread while another captures.
    unseen = [random_call(m, 1024, 512, torch.float16) for m in (8, 100, 400)]
    errors: list[BaseException] = []

    def compile_new() -> None:
        try:
            for call in unseen:
                with torch.cuda.stream(torch.cuda.Stream()):
                    _, ours = call.run(replacement.function)
                    _, theirs = call.run(stock())
                    assert torch.equal(ours, theirs)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compile_new)
    d = torch.empty_like(expected)
    thread.start()
    graphs = []
    for _ in range(30):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ready.into(replacement.function, d)
        graphs.append(graph)
    thread.join()
    for graph in graphs:
        d.fill_(torch.nan)
        graph.replay()
        assert torch.equal(d, expected)
    assert errors == []
    assert breaker.snapshot() == ()


def test_a_side_stream_needs_no_synchronization() -> None:
    replacement, _ = fresh_op()
    call = random_call(2048, 2048, 2048, BF16)
    call.run(replacement.function)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # The producer is still busy when the GEMM is launched.
        call.a.random_(-128, 128)
        _, ours = call.run(replacement.function)
        _, theirs = call.run(stock())
    side.synchronize()
    assert torch.equal(ours, theirs)


def test_a_given_stream_that_is_not_current_is_the_one_used() -> None:
    replacement, _ = fresh_op()
    side = torch.cuda.Stream()
    for _ in range(3):  # First use, then launches of the compiled kernel.
        call = random_call(300, 1024, 1024, BF16)
        _, expected = call.run(stock())
        d = torch.full_like(expected, torch.nan)
        torch.cuda.synchronize()
        from torch.utils.dlpack import to_dlpack

        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
        tensors = (call.a, call.b, call.xs, call.ws, call.bias, d)
        assert replacement.function(*map(to_dlpack, tensors), 2, side.cuda_stream)
        side.synchronize()
        assert torch.equal(d, expected)


def test_four_threads_may_meet_one_new_shape_at_once() -> None:
    replacement, breaker = fresh_op()
    call = random_call(700, 1024, 1024, BF16)
    _, expected = call.run(stock())
    barrier = threading.Barrier(4)
    wrong: list[object] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                for _ in range(20):
                    if not torch.equal(call.run(replacement.function)[1], expected):
                        wrong.append("differs")
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert breaker.snapshot() == ()
    assert sum(kernel.proven for kernel in replacement._gemm._planner._kernels.values()) == 1


class _Wrong(Gemm):
    """Right everywhere but in one element of one row, the last."""

    where = -1

    def run(self, call: Operands) -> None:
        from torch.utils.dlpack import to_dlpack

        tensors = (call.a, call.b, call.x_scale, call.w_scale, call.d.new_empty(0), call.d)
        stock()(*map(to_dlpack, tensors), 2, torch.cuda.current_stream().cuda_stream)
        call.d[self.where, -1] += 1


class _Crashing(Gemm):
    def run(self, call: Operands) -> None:
        call.d.fill_(7)
        raise OSError("planted")


@pytest.mark.parametrize(
    ("planted", "reason"), [(_Wrong, "differs from stock"), (_Crashing, "OSError: planted")]
)
def test_a_bad_kernel_is_caught_at_its_first_use_and_the_caller_gets_stocks_result(
    planted: type[Gemm],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ck_patch.kernels import registry

    monkeypatch.setattr(registry, "GEMMS", dict.fromkeys(registry.GEMMS, lambda: planted))
    replacement, breaker = fresh_op()
    call = random_call(900, 1024, 1024, BF16)
    _, expected = call.run(stock())
    for _ in range(3):
        done, d = call.run(replacement.function)
        assert done
        assert torch.equal(d, expected)
    # Of wrong ones each candidate has its own.
    assert {opened.reason for opened in breaker.snapshot()} == {reason}


def test_nan_and_infinite_scales_are_no_difference_to_stock() -> None:
    replacement, breaker = fresh_op()
    call = random_call(200, 1024, 1024, BF16)
    call.xs[3], call.xs[5], call.ws[7] = torch.nan, torch.inf, -torch.inf
    _, ours = call.run(replacement.function)
    _, theirs = call.run(stock())
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(1.0), theirs.nan_to_num(1.0))
    assert breaker.snapshot() == ()


def test_no_memory_is_kept() -> None:
    replacement, _ = fresh_op()

    def work() -> None:
        for m in range(100, 150):
            for _ in range(2):
                with torch.cuda.stream(torch.cuda.Stream()):
                    random_call(m, 1024, 512, BF16).run(replacement.function)

    work()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_the_path_itself_allocates_nothing_once_proven() -> None:
    call = random_call(1024, 4096, 4096, BF16)
    _, d = call.run(entry())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call.into(entry(), d)
    assert torch.cuda.max_memory_allocated() == before


def test_out_of_memory_in_our_path_goes_to_stock_and_closes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replacement, breaker = fresh_op()
    call = random_call(1100, 1024, 1024, BF16)
    _, expected = call.run(stock())
    real = Int8Gemm._compare

    def exhausted(self: Any, *args: Any) -> Any:
        torch.empty(2**50, dtype=torch.int8, device="cuda")

    monkeypatch.setattr(Int8Gemm, "_compare", exhausted)
    assert torch.equal(call.run(replacement.function)[1], expected)
    assert breaker.snapshot() == ()
    monkeypatch.setattr(Int8Gemm, "_compare", real)
    assert torch.equal(call.run(replacement.function)[1], expected)
    assert sum(kernel.proven for kernel in replacement._gemm._planner._kernels.values()) == 1


SCRIPT_STICKY = """
    import torch, comfy_kitchen
    from tests.gpu.slot import entry, random_call
    call = random_call(900, 1024, 1024)
    call.run(entry())
    index = torch.full((4,), 10**9, device="cuda")
    torch.zeros(4, device="cuda")[index]  # An assertion on the device: the context is dead.
    try:
        for _ in range(50):
            call.run(entry())
            torch.cuda.synchronize()
        print("no error")
    except Exception as error:
        print(type(error).__name__, "ck_patch" in str(error).lower())
    import ck_patch
    print(len(ck_patch.status().breakers))
"""

SCRIPT_NO_COMPILER = """
    import logging, torch
    logging.basicConfig(level="INFO", format="%(name)s: %(message)s")
    import comfy_kitchen
    from tests.gpu.slot import entry, random_call, stock
    call = random_call(900, 1024, 1024)
    for _ in range(3):
        assert torch.equal(call.run(entry())[1], call.run(stock())[1])
    print("equal")
"""


def run_script(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={name: text for name, text in {**os.environ, **env}.items() if name != "CC"},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_a_sticky_error_of_somebody_else_passes_through_and_closes_nothing() -> None:
    done = run_script(SCRIPT_STICKY)
    kind, breakers = done.stdout.split("\n")[:2]
    assert kind in {"AcceleratorError False", "RuntimeError False"}, done.stdout + done.stderr
    assert breakers == "0"


@pytest.fixture
def empty_cache(tmp_path: Any) -> str:
    return str(tmp_path / "triton")


def test_without_a_c_compiler_the_result_is_stocks_and_one_line_says_why(empty_cache: str) -> None:
    done = run_script(SCRIPT_NO_COMPILER, PATH="/nonexistent", TRITON_CACHE_DIR=empty_cache)
    assert done.stdout.strip() == "equal", done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "stays on stock" in line]
    assert len(lines) == 1
    assert "compiler" in lines[0]
    assert "CK_PATCH" in lines[0]


def test_a_read_only_triton_cache_is_no_worse_than_stock(tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    done = run_script(SCRIPT_NO_COMPILER, TRITON_CACHE_DIR=str(blocked / "cache"))
    assert done.stdout.strip() == "equal", done.stdout + done.stderr
    assert sum("stays on stock" in line for line in done.stderr.splitlines()) == 1


def test_capsules_are_stocks_capsules() -> None:
    from comfy_kitchen.backends import cuda
    from torch.utils.dlpack import from_dlpack

    ours = cuda._wrap_for_dlpack
    theirs = ours.__wrapped__
    base = torch.arange(64, device="cuda", dtype=BF16)
    samples = (
        base,
        base.view(8, 8).t(),
        base[3:17],
        base[:0],
        base.to(torch.int8),
        torch.nn.Parameter(base),
        base.float().requires_grad_(),
    )
    for tensor in samples:
        a, b = from_dlpack(ours(tensor)), from_dlpack(theirs(tensor))
        assert (a.data_ptr(), a.shape, a.stride(), a.dtype, a.device) == (
            b.data_ptr(),
            b.shape,
            b.stride(),
            b.dtype,
            b.device,
        )
    for wrong in (torch.zeros(4).to_sparse().cuda(), base.to(torch.complex64).conj(), 7, None):
        with pytest.raises((BufferError, AttributeError)) as stocks:
            theirs(wrong)
        with pytest.raises(stocks.type):
            ours(wrong)
