"""What breaks in the eager and Triton linears and their quantizers, on a GPU that is made up.

CPU tensors say that they are on device 0, and the interpreter runs the kernels: so the first use is
compared with stock, and a proven kernel is launched by its addresses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ck_patch import tiles
from ck_patch.breaker import Breaker
from ck_patch.kernels.launch import Operands
from tests.ops.linear import Bench, Form, K, form
from tests.ops.memory import at, operands_at

pytestmark = pytest.mark.interpreter

DEVICE = 0
ADA = ((DEVICE, (8, 9)),)
VOLTA = ((DEVICE, (7, 0)),)
STICKY = RuntimeError("CUDA error: an illegal memory access was encountered")
MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Device 0; `capturing` says whether its stream is being captured."""
    from ck_patch.kernels.launch import Gemm
    from ck_patch.kernels.quantize_rows import RowQuantizer
    from ck_patch.ops import first_use

    state = SimpleNamespace(capturing=False)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: DEVICE)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    # torch.cuda.stream(None) changes nothing.
    monkeypatch.setattr(first_use, "stream_of", lambda pointer, device: None)
    # The tiles of a GPU take the interpreter long.
    monkeypatch.setattr(tiles, "mma_sync", lambda *size: tiles.INTERPRETER)

    def bind_gemm(self: Gemm, call: Operands) -> Callable[..., None]:
        return lambda pointers, stream: self.run(operands_at(pointers, call))

    def bind_quantizer(self: RowQuantizer, x: torch.Tensor) -> Callable[..., None]:
        (m, k), dtype = x.shape, x.dtype

        def launch(pointers: Sequence[int], stream: int) -> None:
            shapes = ((m, k), (m, k), (m, 1))
            dtypes = (dtype, torch.int8, torch.float32)
            self.run(*map(at, pointers, shapes, dtypes))

        return launch

    monkeypatch.setattr(Gemm, "bind", bind_gemm)
    monkeypatch.setattr(RowQuantizer, "bind", bind_quantizer)
    return state


@pytest.fixture(params=["eager", "triton"])
def bench(request: pytest.FixtureRequest, breaker: Breaker) -> Bench:
    host = request.getfixturevalue(f"{request.param}_host")
    return Bench(request.param, host, breaker, assume=ADA)


def exact_form(m: int = 20) -> Form:
    """A call whose row scales are 2^-e: there the CPU's division by 127 gives what a GPU gets."""
    x = torch.randn(m, K)
    x[:, 5] = 127 * 2.0 ** torch.randint(-4, 0, (m,))
    return form(x)


def plant(bench: Bench, what: str, fault: Callable[[Any], None], patch: pytest.MonkeyPatch) -> None:
    """Have `fault` follow each run of the kernel, with what the kernel was given last."""
    from ck_patch.kernels.int8_gemm import PointerGemm
    from ck_patch.kernels.quantize_rows import RowQuantizer

    kernel: Any = {"gemm": PointerGemm, "quantizer": RowQuantizer}[what]
    good = kernel.run

    def run(self: Any, *args: Any) -> None:
        good(self, *args)
        fault(args)

    patch.setattr(kernel, "run", run)


def raising(error: BaseException) -> Callable[[Any], None]:
    def fault(args: Any) -> None:
        raise error

    return fault


def _last_element(args: Any) -> None:
    args[0].d[-1, -1] += 1


def _not_written(args: Any) -> None:
    args[0].d[3] = torch.nan


def _one_step(args: Any) -> None:
    args[1][-1, 0] += 1


def _scale_of_another_row(args: Any) -> None:
    args[2].copy_(args[2].roll(1, 0) * 0.5)


def operation(bench: Bench, what: str) -> str:
    name = {"gemm": "int8_linear", "quantizer": "quantize_rowwise"}[what]
    return f"{bench.backend}_{name}"


def test_a_kernel_that_equals_stock_is_proven_and_launched_from_then_on(
    bench: Bench, breaker: Breaker
) -> None:
    for m in (20, 20, 37, 140):
        given = exact_form(m)
        assert torch.equal(bench.ours(**given), bench.stock(**given))
    assert bench.calls == []
    assert bench.launches == ["quantizer", "gemm"] * 4
    assert breaker.snapshot() == ()


@pytest.mark.parametrize("what", ["gemm", "quantizer"])
@pytest.mark.parametrize(
    "error", [RuntimeError("planted\nand more"), OSError("DLL load failed")], ids=["run", "load"]
)
def test_a_kernel_that_raises_is_not_tried_again_on_that_device(
    bench: Bench,
    breaker: Breaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
    error: Exception,
) -> None:
    plant(bench, what, raising(error), monkeypatch)
    with caplog.at_level(logging.WARNING, "ck_patch"):
        for m in (20, 20, 21):
            given = exact_form(m)
            assert torch.equal(bench.ours(**given), bench.stock(**given))
    (opened,) = breaker.snapshot()
    assert (opened.operation, opened.device) == (operation(bench, what), str(DEVICE))
    assert opened.reason == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert bench.launches.count(what) == 1
    # A quantizer of stock's serves our GEMM as well.
    assert len(bench.calls) == (3 if what == "gemm" else 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert opened.operation in line
    assert opened.reason in line
    assert "CK_PATCH=0" in line
    assert breaker.reason(opened.operation, DEVICE + 1) is None


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        pytest.param("gemm", _last_element, id="last element of d"),
        pytest.param("gemm", _not_written, id="a row of d not written"),
        pytest.param("quantizer", _one_step, id="one value of q"),
        pytest.param("quantizer", _scale_of_another_row, id="scales of other rows"),
    ],
)
def test_a_kernel_that_is_wrong_once_is_never_used(
    bench: Bench,
    breaker: Breaker,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    fault: Callable[[Any], None],
) -> None:
    plant(bench, what, fault, monkeypatch)
    for _ in range(6):
        given = exact_form(140 if bench.backend == "eager" else 40)
        assert torch.equal(bench.ours(**given), bench.stock(**given))
    found = breaker.snapshot()
    # All candidates of the GEMM are wrong here, each of them once.
    assert len({opened.operation for opened in found}) == bench.launches.count(what)
    assert len(found) == 1 or what == "gemm"
    for opened in found:
        assert opened.operation.split(" by ")[0] == operation(bench, what)
        assert opened.device == str(DEVICE)
        assert opened.reason.endswith("differs from stock")


def test_the_triton_quantizer_may_differ_from_stock_in_rows_with_an_infinity(
    triton_host: Any, breaker: Breaker
) -> None:
    """Stock's kernel spoils such a row, ours cuts the infinity off."""
    bench = Bench("triton", triton_host, breaker, assume=ADA)
    given = exact_form()
    given["x"][3, 7], given["x"][4, 8] = torch.inf, -torch.inf
    out = bench.ours(**given)
    bench.assert_ours()
    assert breaker.snapshot() == ()
    assert not out.isnan().any()
    given["x"] = given["x"][5:]
    assert torch.equal(out[5:], bench.stock(**given))


@pytest.mark.parametrize("what", ["gemm", "quantizer"])
def test_out_of_memory_goes_to_stock_and_ours_is_tried_again(
    bench: Bench,
    breaker: Breaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    given = exact_form()
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "ck_patch"):
        plant(bench, what, raising(MEMORY), patch)
        caplog.clear()
        for _ in range(2):
            assert torch.equal(bench.ours(**given), bench.stock(**given))
    assert breaker.snapshot() == ()
    assert bench.launches.count(what) == 2
    said = [line for line in caplog.messages if "out of memory" in line]
    assert said == [f"{operation(bench, what)}: out of memory, this call goes to stock"]
    bench.calls.clear()
    bench.launches.clear()
    bench.ours(**given)
    bench.assert_ours()


@pytest.mark.parametrize("what", ["gemm", "quantizer"])
@pytest.mark.parametrize("error", [STICKY, KeyboardInterrupt()], ids=["sticky", "interrupt"])
def test_what_stock_cannot_help_is_the_callers(
    bench: Bench,
    breaker: Breaker,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    error: BaseException,
) -> None:
    plant(bench, what, raising(error), monkeypatch)
    with pytest.raises(type(error)) as caught:
        bench.ours(**exact_form())
    assert caught.value is error
    assert bench.calls == []
    assert breaker.snapshot() == ()


def test_nothing_is_launched_before_a_graph_has_been_captured(
    bench: Bench, breaker: Breaker, gpu: SimpleNamespace
) -> None:
    given = exact_form()
    gpu.capturing = True
    assert torch.equal(bench.ours(**given), bench.stock(**given))
    assert bench.launches == []
    bench.assert_given_to_stock(given)
    gpu.capturing = False
    bench.calls.clear()
    bench.ours(**given)
    gpu.capturing = True
    assert torch.equal(bench.ours(**given), bench.stock(**given))
    assert bench.calls == []
    assert breaker.snapshot() == ()


@pytest.fixture
def volta(eager_host: Any, breaker: Breaker) -> Bench:
    """The eager backend on a GPU that takes the FP16 path."""
    return Bench("eager", eager_host, breaker, assume=VOLTA)


def test_a_dequantized_linear_that_fails_is_not_tried_again(
    volta: Bench, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.ops import half_linear

    tries: list[int] = []

    def broken(*args: Any) -> None:
        tries.append(1)
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(half_linear.HalfLinear, "__call__", broken)
    for _ in range(3):
        given = form()
        assert torch.equal(volta.ours(**given), volta.stock(**given))
    assert (len(tries), len(volta.calls)) == (1, 3)
    (opened,) = breaker.snapshot()
    assert (opened.operation, opened.device) == ("eager_int8_linear", str(DEVICE))
    assert "NOT_SUPPORTED" in opened.reason


def test_memory_and_a_dead_context_mean_the_same_on_the_dequantized_path(
    volta: Bench, breaker: Breaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ck_patch.ops import half_linear

    given = form()

    def broken(*args: Any) -> None:
        raise error

    monkeypatch.setattr(half_linear.HalfLinear, "__call__", broken)
    error: Exception = MEMORY
    for _ in range(2):
        assert torch.equal(volta.ours(**given), volta.stock(**given))
    assert breaker.snapshot() == ()
    error = STICKY
    with pytest.raises(RuntimeError) as caught:
        volta.ours(**given)
    assert caught.value is STICKY
    assert len(volta.calls) == 2
