"""What runs under compute-sanitizer: every kernel, in every form, in memory of its own."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch
import triton

import ck_patch.kernels
from ck_patch import device, tiles
from ck_patch.kernels.registry import GEMMS
from tests.gpu import sanitized
from tests.gpu.sanitized import Case, GemmCase
from tests.interpreter import interpreting

compiling = pytest.mark.skipif(interpreting(), reason="kernels of the interpreter are no functions")
HOPPER = next(gpu for gpu in device.KNOWN if gpu.architecture == "sm_90")
AMPERE = next(gpu for gpu in device.KNOWN if gpu.architecture == "sm_86")


def kernels() -> Iterator[str]:
    for module in pkgutil.iter_modules(ck_patch.kernels.__path__, "ck_patch.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and isinstance(value, triton.JITFunction):
                yield name


@compiling
def test_every_kernel_is_run() -> None:
    assert {case.kernel for case in sanitized.plan(HOPPER)} == set(kernels())


@compiling
@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=lambda gpu: gpu.architecture)
def test_every_configuration_that_fits_is_run_in_every_form(gpu: device.DeviceProfile) -> None:
    cases = [case for case in sanitized.plan(gpu) if isinstance(case, GemmCase)]
    own = [case for case in cases if case.family in {family() for family in GEMMS.values()}]
    fitting = [c for c in tiles.EVERY if tiles.fits(c, gpu.shared_memory, gpu.descriptors, 2)]
    assert {case.config for case in own} == set(fitting)
    for config in fitting:
        variants = [case.variant for case in own if case.config == config]
        assert {variant.rounding for variant in variants} == {"cutlass", "triton", "eager"}
        assert {v.out_dtype for v in variants} >= {torch.float16, torch.bfloat16}
        assert {variant.bias_dtype for variant in variants} >= {None, torch.bfloat16}
        assert {variant.residual for variant in variants} == {True, False}
        assert {variant.even for variant in variants} == {True, False}
    # What the rest of the world runs is run on a newer GPU as well.
    of_the_class = {case.config for case in cases if case not in own}
    assert of_the_class == ({tiles.EIGHT_WARPS, *_class()} if gpu is HOPPER else set())


def _class() -> set[tiles.TileConfig]:
    return {cost.config for cost in tiles.MMA_SYNC_COSTS}


@compiling
def test_sizes_fill_no_tile_and_ragged_ones_no_step() -> None:
    for case in sanitized.plan(HOPPER):
        if isinstance(case, GemmCase):
            assert [m for m, _, _ in case.sizes] == [1, 3, 17, 129, 257]
            for m, n, k in case.sizes:
                assert m % case.config.block_m
                assert n % case.config.block_n
                assert (k % case.config.block_k == 0) is case.variant.even
                assert n % 8 == k % 16 == 0


def one_of_each() -> dict[str, Case]:
    """A case of each kernel in each form that its code tells apart; the smallest configuration."""
    found: dict[str, Case] = {}
    for case in sanitized.plan(HOPPER):
        form = [case.kernel]
        if isinstance(case, GemmCase):
            # PTX cannot be interpreted.
            if case.family not in {family() for family in GEMMS.values()}:
                continue
            form.append(str(case.variant))
        elif isinstance(case, sanitized.QuantizerCase):
            form += [str(case.rounding), str(case.dtype)]
        found.setdefault(" ".join(form), case)
    return found


@pytest.mark.interpreter
def test_every_form_runs_and_leaves_nothing_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    empty = torch.empty

    def poisoned(*shape: int, **given: object) -> torch.Tensor:
        made.append(empty(*shape, **given))  # type: ignore[call-overload]
        made[-1].fill_(torch.nan if made[-1].dtype.is_floating_point else -128)
        return made[-1]

    monkeypatch.setattr(torch, "empty", poisoned)
    for form, case in one_of_each().items():
        made.clear()
        case.run(case.sizes[:2], "cpu")
        for out in made:
            # A row quantizer never writes the lowest int8: its scale is that of the largest value.
            unwritten = out.isnan() if out.dtype.is_floating_point else out == -128
            assert not unwritten.any(), form
