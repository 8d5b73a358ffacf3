"""What breaks in the quantizers of the CUDA backend, on the GPU of `test_linear_failures`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ck_patch.breaker import Breaker
from ck_patch.context import OpContext, op_of
from ck_patch.kernels.input_acts import InputAct, columns
from ck_patch.kernels.quantize_rows import RowQuantizer
from ck_patch.kernels.quantize_rows_convrot import ConvrotRowQuantizer
from ck_patch.ops import quantize_rotated_rows, quantize_rows
from ck_patch.releases import RELEASES
from ck_patch.settings import Settings
from tests.kernels import test_quantize_rows as plain
from tests.kernels import test_quantize_rows_convrot as rotating
from tests.ops.memory import at
from tests.ops.test_linear_failures import ADA, DEVICE, MEMORY, STICKY, gpu, raising

pytestmark = pytest.mark.interpreter

__all__ = ["gpu"]


class Quantizer:
    """One op around a numpy quantizer for stock; `rows` has the rows of each call of that."""

    def __init__(self, rotates: bool, breaker: Breaker) -> None:
        self.operation = "cuda_quantize_rowwise" + ("_convrot64" if rotates else "")
        self.rows: list[int] = []
        self._group = (256,) if rotates else ()

        def stock(x: torch.Tensor, *group: int) -> Any:
            assert group == self._group
            self.rows.append(len(x))
            return self.exact(x)

        def stock_convrot(
            weight_2d: torch.Tensor, group_size: int, stochastic_rounding: int | None = 0
        ) -> Any:
            return stock(weight_2d, group_size)

        context = OpContext(
            Settings(int8="triton", assume=ADA), breaker, RELEASES[-1], check_first=False
        )
        if rotates:
            op = quantize_rotated_rows.build(stock_convrot, context)
        else:
            op = quantize_rows.build_cuda(stock, context)
        self.op: Any = op
        self._function = op.function
        self._rotates = rotates

    def exact(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, scale = rotating.expected(x) if self._rotates else plain.expected(x, "cuda")
        return q, scale[:, None]

    def is_exact(self, m: int = 5, k: int = 256) -> bool:
        x = torch.randn(m, k)
        found = self._function(x, *self._group)
        return all(map(torch.equal, found, self.exact(x)))


@pytest.fixture(params=[False, True], ids=["plain", "rotating"])
def quantizer(
    request: pytest.FixtureRequest, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> Quantizer:
    # The interpreter takes its time over each row.
    monkeypatch.setattr(quantize_rows, "_CHECKED_ROWS", 16)
    return Quantizer(request.param, breaker)


def plant(fault: Callable[[Any], None], patch: pytest.MonkeyPatch) -> list[int]:
    """Have `fault` follow each run of the kernel; returns the rows of each."""
    good, rows = RowQuantizer.run, []

    def run(self: RowQuantizer, *args: Any) -> None:
        good(self, *args)
        rows.append(len(args[0]))
        fault(args)

    patch.setattr(RowQuantizer, "run", run)
    return rows


def test_the_first_use_is_compared_with_stock_at_both_ends_and_later_ones_are_not(
    quantizer: Quantizer, breaker: Breaker
) -> None:
    assert quantizer.is_exact(50)
    assert quantizer.rows == [16, 18]
    quantizer.rows.clear()
    for m in (6, 5, 5):
        assert quantizer.is_exact(m)
    assert quantizer.rows == []
    assert quantizer.is_exact(5, 512)
    assert quantizer.rows == [5, 5]
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("row", [0, 15, 32, 49])
@pytest.mark.parametrize("which", [1, 2], ids=["q", "scale"])
def test_a_kernel_that_is_wrong_once_is_never_used(
    quantizer: Quantizer, breaker: Breaker, monkeypatch: pytest.MonkeyPatch, which: int, row: int
) -> None:
    def fault(args: Any) -> None:
        if which == 1:
            args[1][row, 17] += 1
        else:
            args[2].view(-1)[row] *= 1.0000002

    ran = plant(fault, monkeypatch)
    for _ in range(2):
        assert quantizer.is_exact(50)
    assert ran == [50]
    (opened,) = breaker.snapshot()
    assert (opened.operation, opened.device) == (quantizer.operation, str(DEVICE))
    assert opened.reason == "differs from stock"


def test_a_kernel_that_raises_is_not_tried_again(
    quantizer: Quantizer,
    breaker: Breaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = plant(raising(RuntimeError("planted")), monkeypatch)
    with caplog.at_level(logging.WARNING, "ck_patch"):
        assert quantizer.is_exact()
        assert quantizer.is_exact()
    assert ran == [5]
    (line,) = caplog.messages
    assert f"{quantizer.operation} stays on stock on device 0 (RuntimeError: planted)" in line


def test_out_of_memory_goes_to_stock_and_ours_is_tried_again(
    quantizer: Quantizer, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ran = plant(raising(MEMORY), patch)
        assert quantizer.is_exact()
        assert quantizer.is_exact()
        assert ran == [5, 5]
    assert breaker.snapshot() == ()
    assert quantizer.is_exact()
    quantizer.rows.clear()
    assert quantizer.is_exact()
    assert quantizer.rows == []


def launched(quantizer: Quantizer, x: torch.Tensor) -> bool:
    """Whether there is a launch for x, which then is right."""
    launch = quantizer.op.launch(DEVICE, x.dtype, *x.shape)
    if launch is None:
        return False
    q, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0], 1)
    launch((x.data_ptr(), q.data_ptr(), scale.data_ptr()), 0)
    assert all(map(torch.equal, (q, scale), quantizer.exact(x)))
    return True


def test_other_ops_get_the_launch_of_what_the_function_has_proven_and_nothing_else(
    quantizer: Quantizer, breaker: Breaker
) -> None:
    x = torch.randn(5, 256)
    for expected in (False, False, True):  # It proves the kernel, then binds the launch.
        assert launched(quantizer, x) is expected
        assert quantizer.is_exact(5)
    op: Any = quantizer.op
    assert op_of(op.function) is op
    for other in (x[:4], x.half(), torch.randn(5, 512)):
        assert not launched(quantizer, other)
    quantizer.op.failed(MEMORY, DEVICE)
    assert launched(quantizer, x)
    quantizer.op.failed(RuntimeError("planted"), DEVICE)
    assert not launched(quantizer, x)
    (opened,) = breaker.snapshot()
    assert "planted" in opened.reason


def test_an_activation_is_proven_and_launched_by_itself(
    breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with stock's answer to that activation; that of rms_norm takes the weight and eps."""
    asked: list[tuple[Any, ...]] = []

    def stock(
        weight_2d: torch.Tensor,
        group_size: int,
        stochastic_rounding: int | None = 0,
        input_act: Any = None,
        input_act_weight: Any = None,
        input_act_eps: float = 0.0,
    ) -> Any:
        asked.append((input_act, input_act_eps))
        if input_act is None:
            q, scale = rotating.expected(weight_2d)
        else:
            q, scale = rotating.run_act(input_act, weight_2d, input_act_weight)
        return q, scale[:, None]

    def bind(self: RowQuantizer, x: torch.Tensor) -> Callable[..., None]:
        m, wide = x.shape

        def launch(values: Any, stream: int) -> None:
            shapes = (m, wide), (m, 256), (m, 1), (256,)
            dtypes = torch.float32, torch.int8, torch.float32, torch.float32
            self.run(*map(at, values[:4], shapes, dtypes), *values[4:])

        return launch

    monkeypatch.setattr(RowQuantizer, "bind", bind)
    codes = SimpleNamespace(_input_act_code=lambda act: 0)
    monkeypatch.setitem(sys.modules, "a_host", codes)
    stock.__module__ = "a_host"
    context = OpContext(
        Settings(int8="triton", assume=ADA), breaker, RELEASES[-1], check_first=False
    )
    op = quantize_rotated_rows.build(stock, context)
    weight = torch.randn(256)
    acts: tuple[InputAct | None, ...] = (None, "rms_norm", "swiglu")
    for act in acts:
        asked.clear()
        x = torch.randn(5, 256 * columns(act))
        norm = (weight, rotating.EPS) if act == "rms_norm" else ()
        for launched in (False, False, True):
            launch = op.launch(DEVICE, x.dtype, 5, 256, act)
            assert (launch is not None) is launched
            q, scale = op.function(x, 256, 0, act, *norm)
            right = stock(x, 256, 0, act, *norm)
            assert torch.equal(q, right[0])
            assert torch.equal(scale, right[1])
        more = (weight.data_ptr(), rotating.EPS) if norm else ()
        launch = op.launch(DEVICE, x.dtype, 5, 256, act)
        assert launch is not None
        q.zero_()
        launch((x.data_ptr(), q.data_ptr(), scale.data_ptr(), *more), 0)
        assert torch.equal(q, right[0])
        # Two slices of the first use, and what the test asks three times.
        assert asked == [(act, norm[1] if norm else 0.0)] * 5
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("how", ["wrong", "raising"])
def test_an_activation_that_fails_takes_nothing_else_along(
    breaker: Breaker, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    good = RowQuantizer.run
    ran: list[InputAct | None] = []

    def stock(
        weight_2d: torch.Tensor,
        group_size: int,
        stochastic_rounding: int | None = 0,
        input_act: Any = None,
    ) -> Any:
        m, k = len(weight_2d), weight_2d.shape[1] // columns(input_act)
        q, scale = torch.empty(m, k, dtype=torch.int8), torch.empty(m, 1)
        good(ConvrotRowQuantizer(input_act), weight_2d, q, scale)
        return q, scale

    codes = SimpleNamespace(_input_act_code=lambda act: 0)
    monkeypatch.setitem(sys.modules, "a_host", codes)
    stock.__module__ = "a_host"
    context = OpContext(
        Settings(int8="triton", assume=ADA), breaker, RELEASES[-1], check_first=False
    )
    op = quantize_rotated_rows.build(stock, context)

    def run(self: Any, *args: Any) -> None:
        good(self, *args)
        ran.append(self.act)
        if self.act == "swiglu" and how == "raising":
            raise RuntimeError("planted")
        if self.act == "swiglu":
            args[1][2, 17] += 1

    monkeypatch.setattr(RowQuantizer, "run", run)
    for k in (256, 512):
        for act in ("swiglu", "gelu_tanh", None):
            x = torch.randn(5, k * columns(act))
            for _ in range(2):
                found = op.function(x, 256, 0, act)
                assert all(map(torch.equal, found, stock(x, 256, 0, act)))
    assert ran.count("swiglu") == 1
    assert min(ran.count("gelu_tanh"), ran.count(None)) >= 2
    (opened,) = breaker.snapshot()
    assert opened.operation == "cuda_quantize_rowwise_convrot64 by swiglu"


def test_a_deactivated_quantizer_has_no_launch(quantizer: Quantizer) -> None:
    for _ in range(2):
        assert quantizer.is_exact(5)
    assert launched(quantizer, torch.randn(5, 256))
    quantizer.op.deactivate()
    assert not launched(quantizer, torch.randn(5, 256))


@pytest.mark.parametrize("error", [STICKY, KeyboardInterrupt()], ids=["sticky", "interrupt"])
def test_what_stock_cannot_help_is_the_callers(
    quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    plant(raising(error), monkeypatch)
    with pytest.raises(type(error)) as caught:
        quantizer.is_exact()
    assert caught.value is error
    assert quantizer.rows == []


def test_nothing_is_launched_before_a_graph_has_been_captured(
    quantizer: Quantizer, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = plant(lambda args: None, monkeypatch)
    gpu.capturing = True
    assert quantizer.is_exact()
    assert (ran, quantizer.rows) == ([], [5])
    gpu.capturing = False
    assert quantizer.is_exact()
    gpu.capturing = True
    quantizer.rows.clear()
    assert quantizer.is_exact()
    assert (ran, quantizer.rows) == ([5, 5], [])
