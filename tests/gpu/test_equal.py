"""Bit equality with stock on a GPU, on fresh random inputs into poisoned outputs."""

from __future__ import annotations

import random

import pytest
import torch

from ck_patch import shapes, tiles
from ck_patch.device import profile
from ck_patch.kernels.launch import Operands
from ck_patch.kernels.registry import GEMMS
from ck_patch.route import GemmCall, decide
from tests.gpu.conftest import Record
from tests.gpu.slot import entry, random_call, stock, stock_bias_dtype

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def path_of(m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
    return decide(GemmCall(m, n, k, str(out_dtype).removeprefix("torch.")), profile(0)).path


@pytest.mark.parametrize("shape", shapes.unique(), ids=lambda s: "x".join(map(str, s)))
def test_every_model_shape_is_bit_identical(shape: shapes.Shape, record: Record) -> None:
    m, n, k = shape
    call = random_call(m, n, k, torch.bfloat16, stock_bias_dtype(torch.bfloat16))
    done, ours = call.replay(entry())
    stock_done, theirs = call.run(stock())
    equal = torch.equal(ours, theirs) and torch.equal(call.run(entry())[1], theirs)
    record.add(
        "equal_model_shapes", m=m, n=n, k=k, path=path_of(m, n, k, torch.bfloat16), equal=equal
    )
    assert done is stock_done is True
    assert equal


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_dtypes_and_biases_are_bit_identical(seed: int, record: Record) -> None:
    rng = random.Random(f"{seed} {torch.initial_seed()}")
    ours_count = equal_count = 0
    for _ in range(60):
        m = rng.choice([rng.randint(1, 300), rng.randint(301, 9000)])
        n = rng.choice([8 * rng.randint(1, 700), rng.randint(1, 5000)])
        k = rng.choice([256 * rng.randint(1, 40), 16 * rng.randint(1, 400), rng.randint(1, 999)])
        out_dtype = rng.choice(DTYPES)
        # Other dtypes have a test of their own: some releases refuse them.
        bias_dtype = rng.choice([None, stock_bias_dtype(out_dtype)])
        call = random_call(m, n, k, out_dtype, bias_dtype)
        done, ours = call.replay(entry())
        stock_done, theirs = call.run(stock())
        assert done is stock_done, (m, n, k)
        if not done:
            continue
        assert torch.equal(ours, theirs), (m, n, k, out_dtype, bias_dtype)
        equal_count += 1
        ours_count += path_of(m, n, k, out_dtype) != "stock"
    assert ours_count > 0
    record.add("equal_random", seed=seed, compared=equal_count, by_our_kernels=ours_count)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_a_bias_of_any_dtype_is_read_as_what_it_is(
    out_dtype: torch.dtype, bias_dtype: torch.dtype, record: Record
) -> None:
    """Where stock refuses or misreads it, the exact reference decides; the op follows a refusal."""
    call = random_call(130, 256, 512, out_dtype, bias_dtype)
    call.bias *= 1e3
    takes = stock_bias_dtype(out_dtype)
    reads_only_the_output_dtype = stock_bias_dtype(torch.float16) == torch.float16
    if reads_only_the_output_dtype and takes != bias_dtype:
        with pytest.raises(RuntimeError, match="bias"):
            call.run(stock())
        with pytest.raises(RuntimeError, match="bias"):
            call.run(entry())
        return
    done, ours = call.replay(entry())
    assert done
    call.bias = call.bias.to(takes)
    _, theirs = call.run(stock())
    assert torch.equal(ours, theirs)
    record.add("equal_bias", out=str(out_dtype), bias=str(bias_dtype), equal=True)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_subnormal_numbers_vanish_where_they_do_in_stock(
    out_dtype: torch.dtype, record: Record
) -> None:
    """Bit by bit, the sign of zero too: stock's epilogue flushes them, on the way in and out."""
    for m, n, k in ((40, 512, 512), (700, 4096, 1024), (4096, 4096, 4608), (32_768, 1024, 4608)):
        call = random_call(m, n, k, out_dtype, stock_bias_dtype(out_dtype))
        # Down to 1e-38, where products and sums leave the normal range, in every combination.
        call.xs *= 10.0 ** -torch.randint(0, 37, call.xs.shape, device="cuda").float()
        call.ws *= 10.0 ** -torch.randint(0, 37, call.ws.shape, device="cuda").float()
        tiny = 10.0 ** -torch.randint(30, 45, (n,), device="cuda").float()
        call.bias = (call.bias.sign().float() * tiny).to(call.bias.dtype)
        call.a[::7] = 0
        _, theirs = call.run(stock())
        integers = torch.int32 if out_dtype == torch.float32 else torch.int16
        for _, ours in (call.run(entry()), call.replay(entry())):
            assert torch.equal(ours.view(integers), theirs.view(integers)), (m, n, k)
    record.add("equal_subnormal", out=str(out_dtype), equal=True)


def adversarial(m: int, n: int, k: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of int8 operands at the ends of their range."""

    def full(value: int, rows: int) -> torch.Tensor:
        return torch.full((rows, k), value, dtype=torch.int8, device="cuda")

    outlier = full(0, m)
    outlier[m // 2, k - 1] = -128
    return {
        "most negative": (full(-128, m), full(-128, n)),
        "most positive": (full(127, m), full(127, n)),
        "opposite": (full(127, m), full(-128, n)),
        "zeros": (full(0, m), full(127, n)),
        "one outlier": (outlier, full(127, n)),
    }


@pytest.mark.parametrize("config", tiles.EVERY, ids=lambda config: config.name)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_every_configuration_is_bit_identical_wherever_it_is_forced(
    config: tiles.TileConfig, out_dtype: torch.dtype, record: Record
) -> None:
    gpu = profile(0)
    if not tiles.fits(config, gpu.shared_memory, gpu.descriptors, out_dtype.itemsize):
        pytest.skip(f"{config.name} does not fit {gpu.name} with {out_dtype}")
    launcher = GEMMS[config.family]()
    compared = 0
    for m, n, k in ((1, 8, 16), (17, 24, 48), (129, 264, 2064), (300, 1032, 1040), (1000, 136, 96)):
        for biased in (False, True):
            call = random_call(m, n, k, out_dtype, stock_bias_dtype(out_dtype) if biased else None)
            values = {"random": (call.a, call.b), **adversarial(m, n, k)}
            for name, (call.a, call.b) in values.items():
                # The output lies inside a larger buffer: what is written beyond it would show.
                guard = torch.full((m * n + 8192,), torch.nan, dtype=out_dtype, device="cuda")
                d = guard[4096 : 4096 + m * n].view(m, n)
                bias = call.bias if biased else None
                operands = Operands(call.a, call.b, call.xs, call.ws, bias, d)
                _, theirs = call.run(stock())
                # Through the dispatcher first, then as the op launches it from then on.
                gemm = launcher(config)
                gemm.run(operands)
                assert torch.equal(d, theirs), (name, m, n, k, biased)
                d.fill_(torch.nan)
                tensors = (call.a, call.b, call.xs, call.ws, call.bias, d)
                stream = torch.cuda.current_stream().cuda_stream
                gemm.bind(operands)([t.data_ptr() for t in tensors], stream)
                assert torch.equal(d, theirs), (name, m, n, k, biased)
                assert guard[:4096].isnan().all()
                assert guard[4096 + m * n :].isnan().all()
                compared += 1
    record.add("equal_configurations", config=config.name, out=str(out_dtype), compared=compared)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (99_865, 21_504, 64),  # M * N just beyond 2^31
        (100_352, 21_504, 5_376),
        (74_899, 28_672, 64),
        (80_661, 28_672, 5_376),
        (32_769, 65_536, 16),
        (149_798, 128, 14_336),  # M * K beyond 2^31
        (200, 149_800, 14_336),  # N * K beyond 2^31
        (16, 149_800, 14_336),
    ],
)
def test_sizes_beyond_32_bit_offsets_are_right(m: int, n: int, k: int, record: Record) -> None:
    call = random_call(m, n, k, torch.bfloat16, stock_bias_dtype(torch.bfloat16))
    done, ours = call.replay(entry())
    assert done
    path = path_of(m, n, k, torch.bfloat16)
    assert path != "stock" or k == 16
    done, theirs = call.run(stock())
    assert done
    step = max(1, 2**28 // n)
    assert all(
        torch.equal(ours[row : row + step], theirs[row : row + step]) for row in range(0, m, step)
    )
    # Stock is no reference for itself: the corners once more, exactly, in float64.
    for rows in (slice(0, 4), slice(m - 4, m)):
        for columns in (slice(0, 64), slice(n - 64, n)):
            acc = call.a[rows].double() @ call.b[columns].double().T
            scaled = acc.float() * call.xs[rows]
            exact = scaled.double() * call.ws[columns].double() + call.bias[columns].double()
            assert torch.equal(ours[rows, columns], exact.float().bfloat16())
    record.add("equal_beyond_2_31", m=m, n=n, k=k, path=path, equal=True)


def test_wrong_calls_get_stocks_class_of_error() -> None:
    call = random_call(33, 64, 128)
    wrong = {
        "xs": call.xs[:32],
        "ws": call.ws[:63],
        "bias": torch.ones(1, dtype=torch.bfloat16, device="cuda"),
        "a": call.a.float(),
        "b": call.b[:, :64].contiguous(),
    }
    for name, value in wrong.items():
        broken = random_call(33, 64, 128)
        setattr(broken, name, value)
        with pytest.raises((RuntimeError, TypeError)) as theirs:
            broken.run(stock())
        with pytest.raises(theirs.type):
            broken.run(entry())


def test_stock_declines_what_it_declines_without_us() -> None:
    for m, n, k in ((33, 20, 64), (33, 64, 20), (3, 17, 17)):
        call = random_call(m, n, k)
        assert call.run(entry())[0] is call.run(stock())[0] is False
