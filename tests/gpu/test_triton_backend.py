"""The Triton backend on a GPU beyond 2^31 elements, where stock alone kills the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ck_patch import chunks
from tests.gpu.conftest import Record

pytestmark = pytest.mark.gpu

# Every M, N and K below is a multiple of 16 where stock's kernels see it, and there is a bias
# always: one set of compiled kernels serves all tests.
BESIDE = 64
"""Rows on both sides of an edge, half on each, that are computed alone."""


@pytest.fixture(autouse=True)
def fresh_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def functions(attribute: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and stock's of the backend's quantization module."""
    from comfy_kitchen.backends.triton import quantization

    ours = getattr(quantization, attribute)
    assert hasattr(ours, "__wrapped__"), "the slot is not patched: is the wheel installed?"
    return ours, ours.__wrapped__


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def layer(n: int, k: int) -> dict[str, Any]:
    scale = torch.rand(n, device="cuda") * 0.01 + 1e-4
    return {"weight": int8(n, k), "weight_scale": scale, "bias": bf16(n) * 10}


def windows(m: int, widest: int) -> list[slice]:
    """The first and last rows, those where chunks meet, and those where int32 ends."""
    edges = [part.start for part in chunks.chunks(m, chunks.rows_per_chunk(widest))]
    starts = {min(max(edge - BESIDE // 2, 0), m - BESIDE) for edge in (*edges, 2**31 // widest, m)}
    return [slice(start, start + BESIDE) for start in sorted(starts)]


def compare_rows(
    out: torch.Tensor, x: torch.Tensor, stock: Callable[..., Any], step: int, **given: Any
) -> None:
    """Every row against stock on `step` rows at a time, and the edges against 64 rows alone."""
    m = x.shape[0]
    for rows in (*chunks.chunks(m, step), *windows(m, max(x.shape[1], out.shape[1]))):
        assert torch.equal(out[rows], stock(x[rows], **given)), rows


class Canaries:
    """Buffers around a hole of the size of the output, in which the allocator may place it."""

    def __init__(self, size: int) -> None:
        before, hole, after = (self._filled(size) for _ in range(3))
        self._around = (before, after)
        del hole

    @staticmethod
    def _filled(size: int) -> torch.Tensor:
        return torch.full((size // 8,), 0x5CA1AB1E, dtype=torch.int64, device="cuda")

    def assert_untouched(self) -> None:
        for canary in self._around:
            assert canary.amin().item() == canary.amax().item() == 0x5CA1AB1E


def test_an_output_beyond_the_limit_is_right_and_nothing_around_it_changes(
    record: Record,
) -> None:
    import comfy_kitchen
    from comfy_kitchen.registry import registry

    m, n, k = 100_352, 21_504, 256
    _, stock = functions("int8_linear")
    x, given = bf16(m, k), layer(n, k)
    step = chunks.rows_per_chunk(n)
    size = m * n * 2
    with registry.use_backend("triton"):
        # Stock's autotuner takes memory of its own the first time.
        comfy_kitchen.int8_linear(x[:step], **given)
        canaries = Canaries(size)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = comfy_kitchen.int8_linear(x, **given)
        peak = torch.cuda.max_memory_allocated() - before
    canaries.assert_untouched()
    assert out.shape == (m, n)
    assert out.is_contiguous()
    compare_rows(out, x, stock, m // 4, **given)
    # Stock's kernel against arithmetic that shares nothing with it: quantization costs about 1 %.
    for rows in (slice(0, BESIDE), slice(m - BESIDE, m)):
        exact = x[rows].float() @ (given["weight"].float() * given["weight_scale"][:, None]).t()
        exact += given["bias"].float()
        error = (out[rows].float() - exact).norm() / exact.norm()
        assert error < 0.03
    assert peak <= size + chunks.CHUNK_BYTES
    record.add("triton_backend", what="output", m=m, n=n, k=k, equal=True, above_output=peak - size)


def test_an_activation_beyond_the_limit_is_right() -> None:
    m, n, k = 149_798, 128, 14_336
    ours, stock = functions("int8_linear")
    x, given = bf16(m, k), layer(n, k)
    compare_rows(ours(x, **given), x, stock, 49_936, **given)


def test_an_activation_whose_raw_rows_are_beyond_the_limit_is_right() -> None:
    m, n, k = 74_899, 128, 14_336
    ours, stock = functions("int8_linear")
    x, given = bf16(m, 2 * k), {**layer(n, k), "input_act": "swiglu"}
    out = ours(x, **given)
    for rows in windows(m, 2 * k):
        assert torch.equal(out[rows], stock(x[rows], **given)), rows


def test_a_weight_beyond_the_limit_is_right() -> None:
    m, n, k = 16, 149_824, 14_336
    ours, stock = functions("int8_linear")
    x, given = bf16(m, k), layer(n, k)
    out = ours(x, **given)
    for columns in chunks.chunks(n, n // 2):
        theirs = stock(x, **{name: value[columns] for name, value in given.items()})
        assert torch.equal(out[:, columns], theirs), columns


def test_a_quantization_beyond_the_limit_is_right_and_nothing_around_it_changes(
    record: Record,
) -> None:
    from comfy_kitchen.backends import triton

    m, k = 149_798, 14_336
    _, stock = functions("triton_quantize_rowwise")
    x = bf16(m, k)
    canaries = Canaries(m * k)
    q, scale = triton.quantize_int8_rowwise(x)
    canaries.assert_untouched()
    assert (q.shape, scale.shape) == ((m, k), (m, 1))
    for rows in (*chunks.chunks(m, m // 2), *windows(m, k)):
        q_alone, scale_alone = stock(x[rows])
        assert torch.equal(q[rows], q_alone), rows
        assert torch.equal(scale[rows], scale_alone), rows
    record.add("triton_backend", what="quantization", m=m, k=k, equal=True)


def test_rows_that_are_not_contiguous_are_right_beyond_the_limit() -> None:
    """Stock takes them for contiguous."""
    m, k = 149_798, 14_336
    ours, stock = functions("triton_quantize_rowwise")
    x = bf16(m, k + 16)[:, 16:]
    q, scale = ours(x)
    for rows in windows(m, k):
        q_alone, scale_alone = stock(x[rows].contiguous())
        assert torch.equal(q[rows], q_alone), rows
        assert torch.equal(scale[rows], scale_alone), rows


def test_w4a8_beyond_the_limit_is_right(record: Record) -> None:
    from comfy_kitchen.backends import triton

    m, n, k = 100_352, 21_504, 256
    functions("int8_linear")
    x = bf16(m, k)
    scales = torch.rand(n, k // 16, device="cuda") * 8 + 8, torch.rand(n, device="cuda") * 0.01
    weight = int8(n, k // 2), *scales
    given: dict[str, Any] = {"bias": bf16(n), "group_size": 16, "convrot_groupsize": 256}
    out = triton.w4a8_int8_linear(x, *weight, **given)
    # The rotation is torch's matmul: it is the same for the same number of rows.
    for rows in chunks.chunks(m, chunks.rows_per_chunk(n)):
        assert torch.equal(out[rows], triton.w4a8_int8_linear(x[rows], *weight, **given)), rows
    for rows in windows(m, n):
        alone = triton.w4a8_int8_linear(x[rows], *weight, **given).float()
        assert (out[rows].float() - alone).norm() <= 0.01 * alone.norm(), rows
    record.add("triton_backend", what="w4a8", m=m, n=n, k=k, equal=True)


def test_below_the_limit_the_result_is_stocks() -> None:
    ours, stock = functions("int8_linear")
    x, given = bf16(3072, 256), layer(21_504, 256)
    assert torch.equal(ours(x, **given), stock(x, **given))
    ours, stock = functions("triton_quantize_rowwise")
    assert all(torch.equal(a, b) for a, b in zip(ours(x), stock(x), strict=True))
