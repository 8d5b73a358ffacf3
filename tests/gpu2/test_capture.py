"""CUDA-graph capture on one GPU while the other runs eagerly and tunes, from two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import Record
from tests.gpu import test_int8_linear
from tests.gpu.slot import entry, random_call, stock, stock_bias_dtype
from tests.gpu.test_cases import untuned  # noqa: F401
from tests.gpu2.devices import CALLS, K, N, on, same, synchronize

pytestmark = pytest.mark.gpu2

BF16 = torch.bfloat16
Call = Callable[[], torch.Tensor]
GRAPHS = 20
TUNED = 40


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Thread and GPU of every event that is recorded. torch itself refuses one event on two."""
    found: list[tuple[str, int]] = []

    class Noting(torch.cuda.Event):
        def record(self, stream: Any = None) -> None:
            stream = torch.cuda.current_stream() if stream is None else stream
            found.append((threading.current_thread().name, stream.device.index))
            super().record(stream)

    monkeypatch.setattr(torch.cuda, "Event", Noting)
    return found


def _calls(device: int, m: int) -> tuple[list[Call], list[torch.Tensor]]:
    """The entry and the linears of all backends on that GPU, and what stock makes of the same."""
    from comfy_kitchen.backends import cuda

    gemm = on(device, random_call(m, N, K, BF16, stock_bias_dtype(BF16)))
    weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    given: dict[str, Any] = on(
        device,
        {
            "x": torch.randn(m, K, device="cuda", dtype=BF16),
            "weight": weight,
            "weight_scale": torch.rand(N, device="cuda") * 0.01 + 1e-3,
            "bias": torch.randn(N, device="cuda", dtype=BF16),
        },
    )
    eager, triton = test_int8_linear.ours("eager"), test_int8_linear.ours("triton")

    def raw() -> torch.Tensor:
        d = torch.empty((m, N), dtype=BF16, device=gemm.a.device)
        assert gemm.into(entry(), d)
        return d

    with torch.cuda.device(device):
        expected = [
            gemm.run(stock())[1],
            cuda.int8_linear.__wrapped__(**given),
            eager.__wrapped__(**given),  # type: ignore[attr-defined]
            triton.__wrapped__(**given),  # type: ignore[attr-defined]
        ]
    calls: list[Call] = [
        raw,
        lambda: cuda.int8_linear(**given),
        lambda: eager(**given),
        lambda: triton(**given),
    ]
    return calls, expected


@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_on_one_gpu_while_the_other_tunes(
    capturing: int, recorded: list[tuple[str, int]], record: Record
) -> None:
    tuning = 1 - capturing
    ready, expected = _calls(capturing, 1024)
    with torch.cuda.device(capturing):
        for call, result in zip(ready, expected, strict=True):
            assert all(same(call(), result) for _ in range(CALLS))
    # Drawn before: torch's generator refuses to work in one thread while another captures. Shapes
    # of its own for each run: nothing is known of them.
    unseen = [_calls(tuning, m) for m in (256 + 64 * capturing, 2048 + 128 * capturing)]
    synchronize()
    recorded.clear()
    errors: list[BaseException] = []
    graphs: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]] = []
    barrier = threading.Barrier(2)

    def guarded(work: Callable[[], None], device: int) -> Callable[[], None]:
        def run() -> None:
            try:
                torch.cuda.set_device(device)
                barrier.wait()
                work()
                assert torch.cuda.current_device() == device
            except BaseException as error:
                errors.append(error)

        return run

    def capture() -> None:
        stream = torch.cuda.Stream()
        for _ in range(GRAPHS):
            graph = torch.cuda.CUDAGraph()
            # In the default mode an allocation of the other thread would fail, stock's too.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outs = [call() for call in ready]
            graphs.append((graph, outs))

    def tune() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for calls, results in unseen:
                for call, result in zip(calls, results, strict=True):
                    torch.cuda._sleep(20_000_000)  # What is timed must not wait for the host.
                    outs = [call() for _ in range(TUNED)]
                    assert all(torch.equal(out, result) for out in outs)

    threads = [
        threading.Thread(target=guarded(capture, capturing), name="capturing"),
        threading.Thread(target=guarded(tune, tuning), name="tuning"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    # None under capture, and those of the trials on their own GPU.
    assert set(recorded) <= {("tuning", tuning)}
    with torch.cuda.device(capturing):
        for graph, outs in graphs:
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(same(*pair) for pair in zip(outs, expected, strict=True))
    record.add(
        "capture_and_tune",
        capturing=capturing,
        tuning=tuning,
        graphs=len(graphs),
        eager_calls=TUNED * sum(len(calls) for calls, _ in unseen),
        events=len(recorded),
        equal=True,
    )
