"""The contest of one call, with stand-ins for the GPU and the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from ck_patch import candidates, measure
from ck_patch.candidates import Candidate
from ck_patch.demo.slot import Inputs
from ck_patch.device import KNOWN
from ck_patch.kernels.launch import Operands
from ck_patch.measure import Captured
from ck_patch.ops import references
from ck_patch.route import GemmCall
from ck_patch.tune import contest
from ck_patch.tune.contest import GpuContest
from ck_patch.tune.sweeping import Declined, Wrong
from tests.ops.memory import operands_at

H200 = next(gpu for gpu in KNOWN if gpu.name == "H200")
CALL = GemmCall(5, 16, 32, "bfloat16", "float32", residual=True)
OURS = candidates.every(CALL, H200)[-1]
assert OURS.config is not None
FAMILY = OURS.config.family


def compute(call: Operands, stream: int = 0) -> bool:
    result = call.a.float() @ call.b.float().T
    if call.residual is not None:
        result = result + call.residual.float()
    call.d.copy_(result)
    return True


class FakeGemm:
    """Of ours; `spoil` gets what a bound launch wrote."""

    def __init__(self, spoil: Callable[[Any], object], *given: Any) -> None:
        self._spoil = spoil
        self._compiled = False

    def run(self, call: Operands) -> None:
        self._compiled = True
        compute(call)

    def bind(self, call: Operands) -> Any:
        assert self._compiled

        def launch(addresses: list[int], stream: int) -> None:
            given = operands_at(addresses, call)
            compute(given)
            self._spoil(given.d)

        return launch


class Recorder:
    """Calls what it is to capture three times."""

    def __init__(self, span: float) -> None:
        assert span > 0

    def capture(self, function: Callable[[], object]) -> Captured:
        for _ in range(3):
            function()
        graph: Any = function
        return Captured(graph, 3)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins; stock's function and the spoiler of ours can be changed."""
    made = SimpleNamespace(stock=compute, spoil=lambda d: None, times=[])
    on_cpu: Any = Inputs.random

    def eager_time(function: Callable[[], object], calls: int) -> float:
        assert calls == 1
        function()
        return 0.25

    def replay_times(graphs: Any, rounds: int) -> Any:
        made.times.append((list(graphs), rounds))
        return dict.fromkeys(graphs, 0.125)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=700)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(Inputs, "random", lambda *given: on_cpu(*given[:3], "cpu"))
    monkeypatch.setattr(contest, "Recorder", Recorder)
    monkeypatch.setattr(measure, "eager_time", eager_time)
    monkeypatch.setattr(measure, "replay_times", replay_times)
    monkeypatch.setattr(
        contest, "_reference", lambda backend, residual: lambda *given: made.stock(*given)
    )
    monkeypatch.setattr(
        contest, "GEMMS", {FAMILY: lambda: partial(FakeGemm, lambda d: made.spoil(d))}
    )
    return made


def test_stock_and_ours_are_timed_and_each_graph_goes_through_all_weights(
    gpu: SimpleNamespace,
) -> None:
    seen = []

    def stock(call: Operands, stream: int) -> bool:
        seen.append(call.b.data_ptr())
        assert call.residual is not None
        assert call.residual_scale is not None
        assert call.bias is not None
        return compute(call)

    gpu.stock = stock
    made = GpuContest(CALL, H200)
    assert made.attempt(Candidate()) == made.attempt(OURS) == 250.0
    assert len(set(seen)) == 1
    seen.clear()
    assert made.times(["stock", OURS.name], 2) == {"stock": 125.0, OURS.name: 125.0}
    # 512 bytes of weight, 700 of L2: three of them are more than twice as large.
    assert len(seen) == len(set(seen)) == 3
    made.times([OURS.name], 7)
    assert gpu.times == [(["stock", OURS.name], 2), ([OURS.name], 7)]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d[-1, -1].fill_(torch.inf),
        # What was not written shows.
        lambda d: d.fill_(torch.nan),
    ],
)
def test_a_launch_that_differs_in_one_element_is_wrong(
    gpu: SimpleNamespace, spoil: Callable[[Any], object]
) -> None:
    made = GpuContest(CALL, H200)
    gpu.spoil = spoil
    with pytest.raises(Wrong, match="differs from stock"):
        made.attempt(OURS)


def test_what_stock_declines_is_declined(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GemmCall(5, 16, 32, "float16")
    monkeypatch.setattr(references, "cutlass_config", lambda number: lambda *given: number == 2)
    made = GpuContest(plain, H200)
    with pytest.raises(Declined, match="cfg3"):
        made.attempt(Candidate(stock_config=3))
    with pytest.raises(Wrong):  # It has written nothing.
        made.attempt(Candidate(stock_config=2))
    gpu.stock = lambda *given: False
    with pytest.raises(Declined, match="cuBLAS"):
        GpuContest(plain, H200)
