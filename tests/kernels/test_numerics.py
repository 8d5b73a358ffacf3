"""Every kernel, interpreted, against the exact reference: shapes, dtypes, values, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ck_patch import tiles
from ck_patch.kernels.launch import Operands, Rounding
from ck_patch.tiles import TileConfig
from tests import reference

pytestmark = pytest.mark.interpreter

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BIAS_DTYPES = (None, *FLOAT_DTYPES)

# With these, small shapes have many tiles and K steps, full groups and ragged ones.
SMALL = (
    TileConfig("pointer", 16, 32, 32, 4, 1, 2),
    TileConfig("tma", 16, 32, 32, 4, 1, 2),
)


def by_name(config: TileConfig) -> str:
    return config.name


def dtype_name(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else str(dtype).removeprefix("torch.")


def random_operands(
    m: int,
    n: int,
    k: int,
    out_dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype | None = None,
    *,
    residual: bool = False,
) -> Operands:
    """Operands with scales of both signs, of the size that real layers have; d is poisoned."""
    generator = torch.Generator().manual_seed(m * 1_000_003 + n * 1_009 + k)

    def addend(*shape: int) -> torch.Tensor | None:
        return torch.randn(*shape, generator=generator).to(out_dtype) if residual else None

    return Operands(
        torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=generator),
        torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator),
        torch.randn(m, 1, generator=generator) * 0.01,
        torch.randn(n, generator=generator) * 0.01,
        None if bias_dtype is None else torch.randn(n, generator=generator).to(bias_dtype),
        torch.full((m, n), torch.nan, dtype=out_dtype),
        addend(m, n),
        addend(n),
    )


def run(config: TileConfig, call: Operands, rounding: Rounding = "cutlass") -> None:
    """One launch; numpy's remarks on infinities are no concern of a kernel's."""
    from ck_patch.kernels.registry import GEMMS

    with np.errstate(all="ignore"):
        GEMMS[config.family]()(config, rounding).run(call)


def expected(call: Operands, rounding: Rounding = "cutlass") -> torch.Tensor:
    from tests.interpreter_facts import interpreter_rounding

    tensors = (call.a, call.b, call.x_scale, call.w_scale, call.bias)
    addends = (call.residual, call.residual_scale)
    return reference.gemm(*tensors, call.d.dtype, interpreter_rounding(), rounding, *addends)


def assert_exact(config: TileConfig, call: Operands, rounding: Rounding = "cutlass") -> None:
    """Run the kernel and compare every bit of d with the reference."""
    run(config, call, rounding)
    different = (reference.bits(call.d) != reference.bits(expected(call, rounding))).nonzero()
    assert not len(different), f"{config.name}: d differs at {different[:5].tolist()} and others"


@pytest.mark.parametrize("m", [*range(1, 41), 127, 128, 129, 130])
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_every_number_of_rows_is_exact(config: TileConfig, m: int) -> None:
    assert_exact(config, random_operands(m, 56, 112, bias_dtype=torch.float32))


@pytest.mark.parametrize("k", [16, 32, 48, 112, 144, 2064])
@pytest.mark.parametrize("n", [8, 16, 24, 56, 136, 264])
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_columns_and_depths_that_fill_no_tile_are_exact(config: TileConfig, n: int, k: int) -> None:
    assert_exact(config, random_operands(19, n, k, torch.float16))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 16), (130, 136, 272), (127, 264, 1040)], ids=str)
@pytest.mark.parametrize("config", [tiles.INTERPRETER, *tiles.EVERY], ids=by_name)
def test_every_configuration_is_exact(config: TileConfig, m: int, n: int, k: int) -> None:
    assert_exact(config, random_operands(m, n, k, torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bias_dtype", BIAS_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_every_pair_of_output_and_bias_dtype_is_exact(
    config: TileConfig, bias_dtype: torch.dtype | None, out_dtype: torch.dtype
) -> None:
    assert_exact(config, random_operands(33, 72, 80, out_dtype, bias_dtype))


@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bias_dtype", BIAS_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("rounding", ["triton", "eager"])
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_the_order_of_every_backend_is_exact(
    config: TileConfig,
    rounding: Rounding,
    bias_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> None:
    assert_exact(config, random_operands(33, 72, 80, out_dtype, bias_dtype), rounding)


def test_the_orders_differ() -> None:
    """Or the tests above would prove little."""
    call = random_operands(33, 72, 80, torch.float16, torch.float16)
    tensors = (call.a, call.b, call.x_scale, call.w_scale, call.bias, torch.float16)
    orders: tuple[Rounding, ...] = ("cutlass", "triton", "eager")
    results = [reference.gemm(*tensors, order=order) for order in orders]
    wide = [reference.gemm(*tensors[:-1], torch.float32, order=order) for order in orders]
    assert not torch.equal(results[1], results[2])
    assert not torch.equal(wide[0], wide[1])


@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("bias_dtype", BIAS_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("m", "n"), [(1, 8), (33, 72)], ids=str)
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_a_residual_is_exact_and_stays_as_it_is(
    config: TileConfig, m: int, n: int, bias_dtype: torch.dtype | None, out_dtype: torch.dtype
) -> None:
    call = random_operands(m, n, 80, out_dtype, bias_dtype, residual=True)
    assert call.residual is not None
    before = call.residual.clone()
    assert_exact(config, call)
    assert torch.equal(call.residual, before)


def _fill(a: int, b: int) -> Callable[[Operands], None]:
    def fill(call: Operands) -> None:
        call.a.fill_(a)
        call.b.fill_(b)

    return fill


def _outliers(call: Operands) -> None:
    call.a.zero_()
    call.b.zero_()
    call.a[-1, -1], call.a[0, 0], call.b[-1, -1], call.b[0, 0] = -128, 127, -128, 127


def _checkerboard(call: Operands) -> None:
    # The sum climbs to the limit of FP16 and back to nothing: 8 in one half, -8 in the other.
    call.a.fill_(8)
    call.a[:, call.k // 2 :] = -8
    call.b.fill_(1)


def _tiny_scales(call: Operands) -> None:
    # Subnormal products, and some that vanish.
    call.x_scale.mul_(1e-30)
    call.w_scale.mul_(1e-9)


def _huge_scales(call: Operands) -> None:
    # Beyond float32 in some columns, beyond float16 in all.
    call.x_scale.fill_(1e30)
    call.w_scale[::2] = 1e6
    call.w_scale[1::2] = 1e-20


def _zero_scales(call: Operands) -> None:
    call.x_scale[::2] = 0
    call.w_scale[1::2] = -0.0


def _huge_bias(call: Operands) -> None:
    if call.bias is not None:
        call.bias[::2] = 3e4
        call.bias[1::2] = 1e-4


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(_fill(127, 127), id="all 127"),
        pytest.param(_fill(-128, -128), id="all -128"),
        pytest.param(_fill(-128, 127), id="-128 by 127"),
        pytest.param(_fill(-127, 127), id="-127 by 127"),
        pytest.param(_fill(0, -128), id="zeros"),
        pytest.param(_outliers, id="single outliers"),
        pytest.param(_checkerboard, id="cancelling halves"),
        pytest.param(_tiny_scales, id="tiny scales"),
        pytest.param(_huge_scales, id="huge scales"),
        pytest.param(_zero_scales, id="zero scales"),
        pytest.param(_huge_bias, id="large and small bias"),
    ],
)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32], ids=dtype_name)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_hostile_values_are_exact(
    config: TileConfig,
    out_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    hostile: Callable[[Operands], None],
) -> None:
    call = random_operands(18, 40, 2064, out_dtype, bias_dtype)
    hostile(call)
    assert_exact(config, call)


@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_the_largest_sum_that_int32_holds_is_exact(config: TileConfig) -> None:
    k = 131_056
    call = random_operands(1, 8, k)
    call.a.fill_(-128)
    call.b.fill_(-128)
    call.b[1].fill_(127)
    config = dataclasses.replace(config, block_k=4096)
    assert_exact(config, call)
    sums = torch.tensor([k * 128 * 128, -k * 128 * 127]).float()
    assert torch.equal(call.d[0, :2], sums * call.x_scale[0] * call.w_scale[:2])


@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_a_scale_that_is_not_finite_spoils_its_own_row_only(
    config: TileConfig, out_dtype: torch.dtype
) -> None:
    clean = random_operands(20, 40, 48, out_dtype, torch.float32)
    call = dataclasses.replace(clean, x_scale=clean.x_scale.clone(), d=clean.d.clone())
    spoiled = {3: torch.inf, 7: -torch.inf, 19: torch.nan}
    for row, value in spoiled.items():
        call.x_scale[row] = value
    run(config, clean)
    run(config, call)
    kept = [row for row in range(20) if row not in spoiled]
    assert torch.equal(reference.bits(call.d[kept]), reference.bits(clean.d[kept]))
    assert torch.equal(reference.bits(call.d), reference.bits(expected(call)))
    assert not call.d[[*spoiled]].isfinite().any()


@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_a_weight_scale_that_is_not_finite_spoils_its_own_column_only(config: TileConfig) -> None:
    call = random_operands(20, 40, 48)
    call.w_scale[39] = torch.nan
    call.w_scale[0] = torch.inf
    assert_exact(config, call)
    assert call.d[:, 1:39].isfinite().all()


@pytest.mark.parametrize("out_dtype", FLOAT_DTYPES, ids=dtype_name)
@pytest.mark.parametrize(("m", "n"), [(1, 8), (17, 40), (32, 64)], ids=str)
@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_nothing_around_the_output_and_none_of_the_inputs_changes(
    config: TileConfig, m: int, n: int, out_dtype: torch.dtype
) -> None:
    call = random_operands(m, n, 48, out_dtype, torch.float16)
    inputs = (call.a, call.b, call.x_scale, call.w_scale, call.bias)
    before = [tensor.clone() for tensor in inputs if tensor is not None]
    # A multiple of 16 bytes on either side, as many rows as the largest tile would overrun.
    margin = 64 * n
    memory = torch.full((margin + m * n + margin,), 12.5, dtype=out_dtype)
    call = dataclasses.replace(call, d=memory[margin:-margin].view(m, n))
    call.d.fill_(torch.nan)
    assert_exact(config, call)
    assert (memory[:margin] == 12.5).all()
    assert (memory[-margin:] == 12.5).all()
    after = [tensor for tensor in inputs if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("config", SMALL, ids=by_name)
def test_what_lies_beyond_the_inputs_never_reaches_the_output(config: TileConfig) -> None:
    # Rows, columns and depth end inside a tile; the memory that follows would show in any sum.
    m, n, k = 17, 40, 48
    clean = random_operands(m, n, k)
    call = dataclasses.replace(
        clean,
        a=torch.cat([clean.a.flatten(), torch.full((4096,), 127, dtype=torch.int8)])[: m * k].view(
            m, k
        ),
        b=torch.cat([clean.b.flatten(), torch.full((4096,), 127, dtype=torch.int8)])[: n * k].view(
            n, k
        ),
        x_scale=torch.cat([clean.x_scale.flatten(), torch.full((64,), torch.nan)])[:m],
        w_scale=torch.cat([clean.w_scale, torch.full((64,), torch.nan)])[:n],
    )
    assert_exact(config, call)
    assert call.d.isfinite().all()


def _sparse(folder: Path, name: str, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix in a sparse file: only the pages that are written take memory or disk."""
    path = str(folder / name)
    return torch.from_file(path, shared=True, size=rows * columns, dtype=dtype).view(rows, columns)


def _run_last_tile(config: TileConfig, call: Operands, patch: pytest.MonkeyPatch) -> None:
    """Run the kernel as one program, which believes to be the one of the last tile."""
    from triton.runtime import interpreter

    from ck_patch.kernels.registry import GEMMS

    last = config.tiles(call.m, call.n) - 1
    program = interpreter.TensorHandle(np.array([last], np.int32), interpreter.tl.int32)

    def program_id(axis: int) -> Any:
        return program

    patch.setattr(interpreter.interpreter_builder, "create_get_program_id", program_id)
    patch.setattr(TileConfig, "tiles", lambda self, m, n: 1)
    GEMMS[config.family]()(config).run(call)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        pytest.param(1_048_577, 2056, 16, id="M*N beyond 2^31"),
        pytest.param(16_500, 16, 131_056, id="M*K beyond 2^31"),
        pytest.param(16, 16_504, 131_056, id="N*K beyond 2^31"),
    ],
)
@pytest.mark.parametrize("family", ["pointer", "tma"])
def test_the_last_tile_is_exact_beyond_2_31_elements(
    family: tiles.Family, m: int, n: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter's int32 wraps as the GPU's does, so that a 32-bit offset would miss.
    config = TileConfig(family, 16, 16, 16 if k == 16 else 8192, 4, 1, 1)
    rows, columns = (m - 1) % 16 + 1, (n - 1) % 16 + 1
    part = random_operands(rows, columns, k)
    call = Operands(
        _sparse(tmp_path, "a", m, k, torch.int8),
        _sparse(tmp_path, "b", n, k, torch.int8),
        torch.zeros(m, 1),
        torch.zeros(n),
        None,
        _sparse(tmp_path, "d", m, n, torch.float32),
    )
    call.a[-rows:], call.b[-columns:] = part.a, part.b
    call.x_scale[-rows:], call.w_scale[-columns:] = part.x_scale, part.w_scale
    _run_last_tile(config, call, monkeypatch)
    assert torch.equal(call.d[-rows:, -columns:], expected(part))
    assert call.d[0, 0] == 0
    assert call.d[-1, : n - columns].eq(0).all()
