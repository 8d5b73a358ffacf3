"""The linear over a dequantized weight on the CPU, against float64, and as cuBLAS may round."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ck_patch import gemm_chunks
from ck_patch.ops import dequantized_linear as module
from ck_patch.ops.dequantized_linear import Entry, dequantized_linear

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FLOATS = (F16, BF16, F32)
COMPUTES = (F16, BF16)


def hadamard(size: int) -> torch.Tensor:
    """ConvRot's: powers of [[1, 1, 1, -1], ...] with one -1 in each row, normalized."""
    four = 1 - 2 * torch.eye(4).flip(1)
    found = four
    while found.shape[0] < size:
        found = torch.kron(found, four)
    return found / math.sqrt(size)


def int8(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
) -> torch.Tensor:
    """The linear in float64."""
    x = x.double()
    if rotation is not None:
        groups = x.reshape(x.shape[0], -1, rotation.shape[0])
        x = (groups @ rotation.double()).reshape(x.shape)
    out = x @ weight.double().t() * scale.double()
    return out if bias is None else out + bias.double()


def error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest relative error of a row, by norms."""
    norms = truth.norm(dim=1).clamp(min=1e-300)
    return float(((out.double() - truth).norm(dim=1) / norms).max())


def splits_k_in_its_own_dtype(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A GEMM whose partial sums are stored in the operands' dtype: the least that torch's switch
    for reduced-precision reductions, which is on by default, allows cuBLAS."""
    halves = zip(a.float().chunk(4, 1), w.float().chunk(4, 1), strict=True)
    total = torch.zeros(a.shape[0], w.shape[0], dtype=a.dtype)
    for part, of_weight in halves:
        total += (part @ of_weight.t()).to(a.dtype)
    return total


@pytest.fixture(params=["widened", "narrow"])
def any_entry(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's entry, and one that writes float16 sums, as cuDNN and torch before 2.8 do."""
    if request.param == "narrow":
        narrow = Entry(splits_k_in_its_own_dtype, splits_k_in_its_own_dtype)
        chosen = module.entry
        monkeypatch.setattr(
            module,
            "entry",
            lambda device, compute: narrow if compute == F16 else chosen(device, compute),
        )


@pytest.mark.parametrize("group", [None, 4, 64])
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.usefixtures("any_entry")
def test_it_is_the_linear_within_the_rounding_of_its_dtypes(
    x_dtype: torch.dtype, out_dtype: torch.dtype, compute: torch.dtype, group: int | None
) -> None:
    x, weight = torch.randn(19, 192).to(x_dtype), int8(40, 192)
    rotation = None if group is None else hadamard(group)
    tolerance = 4 * max(torch.finfo(compute).eps, torch.finfo(out_dtype).eps)
    biases = [None, *(torch.randn(40).to(dtype) for dtype in FLOATS)]
    for scale, bias in itertools.product([torch.rand(1), torch.rand(40)], biases):
        out = dequantized_linear(x, weight, scale, bias, out_dtype, compute, rotation)
        assert out.dtype == out_dtype
        assert out.is_contiguous()
        assert error(out, exact(x, weight, scale, bias, rotation)) < tolerance


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 80), st.sampled_from(FLOATS),
    st.sampled_from(COMPUTES), st.integers(0, 2**31),
)  # fmt: skip
def test_every_small_shape_is_right(
    m: int, n: int, k: int, dtype: torch.dtype, compute: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, scale = torch.randn(m, k).to(dtype), int8(n, k), torch.rand(n)
    truth = exact(x, weight, scale)
    out = dequantized_linear(x, weight, scale, None, F32, compute)
    # By the size of the sums: a sum may cancel.
    size = x.double().abs() @ weight.double().abs().t() * scale.double()
    assert ((out.double() - truth).abs() <= 2 * torch.finfo(compute).eps * size).all()


@pytest.mark.parametrize("group", [None, 16, 256])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.usefixtures("any_entry")
def test_its_error_is_not_above_that_of_stocks_int8_path(
    compute: torch.dtype, dtype: torch.dtype, group: int | None
) -> None:
    quantization = pytest.importorskip("comfy_kitchen.backends.eager.quantization")
    stock = getattr(quantization.int8_linear, "__wrapped__", quantization.int8_linear)
    rotation = None if group is None else hadamard(group)
    weight, scale = int8(64, 1024), torch.rand(64) * 0.01 + 1e-4
    normal = torch.randn(24, 1024)
    outlier = normal.clone()
    outlier[:, 7::256] *= 200
    for x in (normal, outlier, normal * torch.logspace(-4, 2, 24)[:, None]):
        x = x.to(dtype)
        truth = exact(x, weight, scale, None, rotation)
        ours = dequantized_linear(x, weight, scale, None, dtype, compute, rotation)
        theirs = stock(
            x, weight, scale, None, dtype, convrot=group is not None, convrot_groupsize=group or 256
        )
        assert error(ours, truth) <= error(theirs, truth)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.usefixtures("any_entry")
def test_products_that_cancel_leave_exactly_zero(
    dtype: torch.dtype, compute: torch.dtype, rows: int
) -> None:
    k = 16384  # The first half sums up to 65,536, which no float16 holds.
    for value, times in ((8.0, 1), (1.0, 8), (0.0625, 127)):
        x = torch.full((rows, k), value).to(dtype)
        weight = torch.full((8, k), times, dtype=torch.int8)
        weight[:, k // 2 :] *= -1
        out = dequantized_linear(x, weight, torch.ones(1), None, F16, compute)
        assert (out == 0).all()


@pytest.mark.parametrize(
    ("k", "group"), [(1, None), (64, None), (5376, 256), (65536, None), (65536, 4), (65536, 256)]
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.usefixtures("any_entry")
def test_no_finite_activation_overflows_on_the_way(
    compute: torch.dtype, dtype: torch.dtype, group: int | None, k: int
) -> None:
    rotation = None if group is None else hadamard(group)
    top = torch.finfo(dtype).max
    weight = torch.where(int8(3, k) < 0, -128, 127).to(torch.int8)
    along = weight.sign()[:1].double()  # The x whose products with the first row are largest.
    if rotation is not None:
        along = (along.reshape(-1, rotation.shape[0]) @ rotation.double().t()).reshape(1, k)
    x = torch.full((4, k), top, dtype=torch.float64)
    x[0] = along[0] / along.abs().max() * top
    x[1, 1::2] *= -1
    x[2, 1:] = 0
    x = x.to(dtype)
    scale = torch.tensor([2.0**-40])  # Brings every sum back into the range of float32.
    truth = exact(x, weight, scale, None, rotation)
    magnitudes = None if rotation is None else rotation.abs()
    size = exact(x.abs(), weight.double().abs(), scale, None, magnitudes)
    out = dequantized_linear(x, weight, scale, None, F32, compute, rotation)
    assert ((out.double() - truth).abs() <= 2.0**-7 * size).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.usefixtures("any_entry")
def test_a_result_beyond_float16_is_infinite_there_and_finite_elsewhere(
    dtype: torch.dtype, compute: torch.dtype
) -> None:
    k = 5376
    x = torch.full((2, k), 127.0, dtype=dtype)
    x[1] *= -1
    weight, one = torch.full((8, k), 127, dtype=torch.int8), torch.ones(1)
    signs = torch.tensor([[1.0], [-1.0]]).expand(2, 8)
    assert torch.equal(dequantized_linear(x, weight, one, None, F16, compute), signs.half() / 0)
    for out_dtype in (BF16, F32):
        out = dequantized_linear(x, weight, one, None, out_dtype, compute)
        assert error(out, signs.double() * 86_709_504) < 2.0**-8


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.usefixtures("any_entry")
def test_infinities_and_nan_take_their_row_and_no_other(
    compute: torch.dtype, dtype: torch.dtype, group: int | None
) -> None:
    rotation = None if group is None else hadamard(group)
    x, weight, scale = torch.randn(6, 64).to(dtype), int8(24, 64), torch.rand(24)
    clean = dequantized_linear(x, weight, scale, None, F32, compute, rotation)
    x[1, 3], x[2, 4], x[4, 60] = math.inf, -math.inf, math.nan
    # Were every weight of one group 0, an infinity there would still make NaN.
    out = dequantized_linear(x, weight, scale, None, F32, compute, rotation)
    finite, lost = [0, 3, 5], [1, 2, 4]
    assert torch.equal(out[finite], clean[finite])
    columns = slice(None) if group is None else weight[:, :16].bool().all(1)
    assert not out[lost][:, columns].isfinite().any()
    assert out[4].isnan().all() or compute == F16


@pytest.mark.parametrize("compute", COMPUTES)
def test_rows_of_zeros_and_of_the_smallest_values_are_right(compute: torch.dtype) -> None:
    weight = int8(8, 32)
    x = torch.stack([torch.zeros(32), torch.full((32,), 1e-45), torch.full((32,), 2e-28)])
    out = dequantized_linear(x, weight, torch.ones(1), torch.ones(8), F32, compute)
    assert torch.equal(out, torch.ones(3, 8))
    large = torch.full((1,), 1e28)
    assert (
        error(
            dequantized_linear(x[2:], weight, large, None, F32, compute),
            exact(x[2:], weight, large),
        )
        < 0.01
    )


@pytest.mark.parametrize("m", [0, 1, 2, 3, 8, 15, 16, 17, 32])
@pytest.mark.parametrize("compute", COMPUTES)
def test_every_number_of_rows_works(m: int, compute: torch.dtype) -> None:
    x, weight, scale = torch.randn(m, 32).half(), int8(24, 32), torch.rand(24)
    out = dequantized_linear(x, weight, scale, None, BF16, compute)
    assert out.shape == (m, 24)
    assert out.dtype == BF16
    assert m == 0 or error(out, exact(x, weight, scale)) < 0.02


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_change_nothing_and_inputs_stay_as_they_were(
    compute: torch.dtype, dtype: torch.dtype
) -> None:
    big = torch.randn(48, 300).to(dtype)
    weight, scale, bias = int8(24, 48), torch.rand(24), torch.randn(24)
    row = big[:1, 3:51]
    for x in (big[:, 128:176], big.t()[:, :48], row.expand(5, 48), big[::2, 1:97:2]):
        before = [value.clone() for value in (x, weight, scale, bias)]
        expected = dequantized_linear(x.contiguous(), weight, scale, bias, F32, compute)
        assert torch.equal(dequantized_linear(x, weight, scale, bias, F32, compute), expected)
        given = scale, bias, F32, compute, hadamard(16)
        expected = dequantized_linear(x.contiguous(), weight, *given)
        assert torch.equal(dequantized_linear(x, weight.t().contiguous().t(), *given), expected)
        assert all(map(torch.equal, before, (x, weight, scale, bias)))


@pytest.mark.parametrize("compute", COMPUTES)
def test_gradients_inference_mode_and_autocast_change_nothing(compute: torch.dtype) -> None:
    x, weight, scale, bias = torch.randn(4, 32), int8(8, 32), torch.rand(8), torch.randn(8)
    expected = dequantized_linear(x, weight, scale, bias, F16, compute)
    wanting, parameter = x.clone().requires_grad_(), torch.nn.Parameter(bias)
    out = dequantized_linear(wanting, weight, scale, parameter, F16, compute)
    assert torch.equal(out, expected)
    with torch.inference_mode():
        a, w, s, b = (value.clone() for value in (x, weight, scale, bias))
        assert torch.equal(dequantized_linear(a, w, s, b, F16, compute), expected)
    assert torch.equal(dequantized_linear(a, w, s, b, F16, compute), expected)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(dequantized_linear(x, weight, scale, bias, F16, compute), expected)


class Watched(TorchDispatchMode):
    """Adds up what the tensors made under it hold, and keeps the names of their operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.names: set[str] = set()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.add(func.name())
        if made is None:  # Of an operation on a list of tensors.
            return made
        storage = made.untyped_storage()
        if not any(
            isinstance(given, torch.Tensor) and given.untyped_storage()._cdata == storage._cdata
            for given in args
        ):
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made


@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("chosen", [module.WIDENED, module.SAME_OUTPUT])
def test_it_stays_within_its_memory_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
    chosen: Entry,
    compute: torch.dtype,
    dtype: torch.dtype,
    group: int | None,
) -> None:
    monkeypatch.setattr(module, "entry", lambda *_: chosen)
    m, n, k, budget = 400, 500, 128, 2**18
    x, weight, scale = torch.randn(m, k).to(dtype), int8(n, k), torch.rand(n)
    rotation = None if group is None else hadamard(group)
    bias = torch.randn(n)
    whole = dequantized_linear(x, weight, scale, bias, F16, compute, rotation)
    monkeypatch.setattr(gemm_chunks, "BUDGET", budget)
    with Watched() as watched:
        out = dequantized_linear(x, weight, scale, bias, F16, compute, rotation)
    assert error(out, whole.double()) < 0.01
    small = 32 * m + 8 * n + 4096  # The scales of rows and of columns, the bias, the rotation.
    assert watched.peak <= out.nbytes + budget + small
    assert not any("_local_scalar_dense" in name for name in watched.names)
