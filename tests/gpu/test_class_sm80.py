"""The kernel that Ampere, Ada, RTX Blackwell and GB10 run, run on a newer GPU: bit equality."""

from __future__ import annotations

import pytest
import torch

from ck_patch import shapes, tiles
from ck_patch.bench.class_sm80 import ClassGemm
from ck_patch.kernels.launch import Operands
from tests.gpu.conftest import Record
from tests.gpu.slot import random_call, stock, stock_bias_dtype

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def newer_than_the_kernel() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("PTX for sm_80 runs on nothing older")


def sm_count() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def assert_equal_to_stock(
    shape: shapes.Shape, out_dtype: torch.dtype, bias_dtype: torch.dtype | None
) -> tiles.TileConfig:
    """Compare both ways of launching it, into poisoned outputs; the configuration it ran with."""
    m, n, k = shape
    call = random_call(m, n, k, out_dtype, bias_dtype)
    done, theirs = call.run(stock())
    assert done
    ours = torch.full_like(theirs, torch.nan)
    bias = None if bias_dtype is None else call.bias
    operands = Operands(a=call.a, b=call.b, x_scale=call.xs, w_scale=call.ws, bias=bias, d=ours)
    config = tiles.mma_sync(m, n, k, sm_count())
    gemm = ClassGemm(config)
    gemm.run(operands)
    assert torch.equal(ours, theirs), shape
    ours.fill_(torch.nan)
    tensors = (call.a, call.b, call.xs, call.ws, call.bias, ours)
    stream = torch.cuda.current_stream().cuda_stream
    gemm.bind(operands)([tensor.data_ptr() for tensor in tensors], stream)
    assert torch.equal(ours, theirs), shape
    return config


@pytest.mark.parametrize("shape", shapes.unique(), ids=lambda s: "x".join(map(str, s)))
def test_every_model_shape_is_bit_identical_on_the_mma_sync_class(
    shape: shapes.Shape, record: Record
) -> None:
    m, n, k = shape
    config = assert_equal_to_stock(shape, BF16, stock_bias_dtype(BF16))
    record.add("class_sm80", op="class_sm80", m=m, n=n, k=k, config=config.name, equal=True)


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_ragged_shapes_are_bit_identical_on_the_mma_sync_class(
    out_dtype: torch.dtype, biased: bool, record: Record
) -> None:
    bias_dtype = stock_bias_dtype(out_dtype) if biased else None
    compared = ((1, 8, 16), (15, 24, 4112), (17, 264, 48), (129, 1032, 2064), (300, 136, 1024))
    for shape in compared:
        assert_equal_to_stock(shape, out_dtype, bias_dtype)
    record.add(
        "class_sm80_ragged", out=str(out_dtype), bias=biased, compared=len(compared), equal=True
    )
