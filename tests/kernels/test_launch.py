"""What a bound GEMM hands to the compiled kernel: a value for each parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ck_patch import tiles
from ck_patch.kernels.launch import Operands, Rounding
from ck_patch.kernels.registry import GEMMS
from ck_patch.tiles import TileConfig

OPERANDS = ["a", "b", "x_scale", "w_scale", "bias", "d", "residual", "residual_scale"]


class Compiled:
    """Stands in for Triton's compiled kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def runner(*args: Any, stream: int) -> None:
            self.launches.append((grid, args, stream))

        return runner


def operands(m: int, n: int, k: int, *, biased: bool, residual: bool) -> Operands:
    bias = torch.zeros(n) if biased else None
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
    extra = (torch.zeros(m, n), torch.zeros(n)) if residual else ()
    return Operands(a, b, torch.zeros(m, 1), torch.zeros(n), bias, torch.zeros(m, n), *extra)


@pytest.mark.parametrize("rounding", ["cutlass", "triton", "eager"])
@pytest.mark.parametrize("residual", [False, True], ids=["no residual", "residual"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "config",
    [tiles.MMA_SYNC, tiles.HOPPER],
    ids=lambda config: config.family,
)
def test_a_bound_launch_gives_every_parameter_its_value(
    config: TileConfig, biased: bool, residual: bool, rounding: Rounding
) -> None:
    call = operands(640, 272, 96, biased=biased, residual=residual)
    gemm = GEMMS[config.family]()(config, rounding)
    compiled = gemm._compiled = Compiled()
    launch = gemm.bind(call)
    tensors = [call.a, call.b, call.x_scale, call.w_scale, torch.empty(0), call.d]
    if call.residual is not None and call.residual_scale is not None:
        tensors += [call.residual, call.residual_scale]
    pointers = [tensor.data_ptr() for tensor in tensors]
    launch(pointers, 7)

    ((grid, args, stream),) = compiled.launches
    names = gemm.kernel.arg_names
    given = dict(zip(names, args, strict=True))
    assert stream == 7
    assert grid == (5 * 3, 1, 1)
    sizes: dict[str, object] = {"M": 640, "N8": 272 // 8, "K16": 96 // 16}
    sizes |= {"ROUNDING": rounding, "HAS_BIAS": biased, "HAS_RESIDUAL": residual}
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"), config.blocks, strict=True))
    assert {name: given[name] for name in (*sizes, *blocks)} == sizes | blocks
    assert given.get("EVEN_K", False) is False  # 96 fills no last step of 64.
    if not residual:
        assert (given["residual_ptr"], given["residual_scale_ptr"]) == (0, 0)
    for name, tensor in zip(OPERANDS, tensors, strict=False):
        if f"{name}_ptr" in given:
            assert given[f"{name}_ptr"] == tensor.data_ptr()
        else:
            descriptor = given[f"{name}_desc"]
            assert descriptor.base.data_ptr() == tensor.data_ptr()
            assert descriptor.base.dtype == tensor.dtype
            assert descriptor.shape == list(tensor.shape)
            assert descriptor.strides == [tensor.shape[1], 1]


def test_the_kernel_takes_its_operands_first_in_the_order_of_the_addresses() -> None:
    for family in GEMMS.values():
        heads = [name.rsplit("_", 1)[0] for name in family().kernel.arg_names[: len(OPERANDS)]]
        assert heads == OPERANDS
