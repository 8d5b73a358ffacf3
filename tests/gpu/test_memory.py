"""Peak memory of `comfy_kitchen.int8_linear` with ours and with stock, on each backend.

Of the eager and the Triton backend at every shape of the models: test_int8_linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ck_patch
from ck_patch import log
from tests.gpu.conftest import Record
from tests.gpu.test_triton_backend import bf16, layer

pytestmark = pytest.mark.gpu

SHAPES = (
    (64, 1024, 1024),
    (1024, 4096, 4096),
    (4608, 3072, 12_288),
    (8192, 8192, 8192),
    (25_900, 4096, 16_384),
    (37_296, 21_504, 5376),
)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"bias": None},
    "bias": {},
    "convrot": {"convrot": True},
}


@pytest.fixture(autouse=True)
def chosen_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is tried in the calls that are looked at; ours is in place afterwards, as before."""
    monkeypatch.setenv("CK_PATCH_TUNE", "off")
    ck_patch.disable()
    yield
    ck_patch.disable()
    monkeypatch.undo()
    ck_patch.enable()
    torch.cuda.empty_cache()


def peak(call: Callable[[], torch.Tensor]) -> int:
    """Bytes at the peak of a call, beyond those that were in use before; its output is counted."""
    torch.cuda.synchronize()
    # Of a large cached block a tensor may get more than it asked for.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["cuda", "triton", "eager"])
def test_a_linear_needs_no_more_memory_than_stocks(
    backend: str, form: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy_kitchen
    from comfy_kitchen.registry import registry

    lines: list[str] = []
    monkeypatch.setattr(log, "paths_wanted", lambda: True)
    monkeypatch.setattr(log, "path", lines.append)
    more = []
    for m, n, k in SHAPES:
        x, given = bf16(m, k), {**layer(n, k), **FORMS[form]}

        def call(x: torch.Tensor = x, given: dict[str, Any] = given) -> torch.Tensor:
            with registry.use_backend(backend):
                out: torch.Tensor = comfy_kitchen.int8_linear(x, **given)
            return out

        ck_patch.disable()
        call()  # Tunes Triton's kernel, and makes what the libraries keep.
        stock = peak(call)
        ck_patch.enable()
        # The first call of a kernel compares it with stock in a few rows.
        first, ours = peak(call), peak(call)
        assert ck_patch.status().breakers == ()
        record.add(
            "memory",
            op="int8_linear",
            backend=backend,
            form=form,
            m=m,
            n=n,
            k=k,
            output_mib=round(m * n * 2 / 2**20, 3),
            stock_mib=round(stock / 2**20, 3),
            ours_mib=round(ours / 2**20, 3),
            ours_first_mib=round(first / 2**20, 3),
        )
        if ours > stock:
            more.append(((m, n, k), ours, stock))
    assert any(": triton " in line for line in lines), lines
    assert more == []
