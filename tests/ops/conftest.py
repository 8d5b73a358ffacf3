"""The op under test, and the tests of this folder in a process where Triton interprets kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ck_patch import log
from ck_patch.breaker import Breaker
from tests.interpreter import pytest_configure, pytest_runtest_protocol, pytest_runtest_setup
from tests.ops.linear import Bench

__all__ = ["pytest_configure", "pytest_runtest_protocol", "pytest_runtest_setup"]


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget which lines were written, and write what CK_PATCH_LOG=info does."""
    monkeypatch.setattr(log, "_seen", {})
    log.configure("info")
    yield
    log.configure("info")


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Let the interpreter's numpy meet infinities without a remark."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture
def breaker() -> Breaker:
    """The breaker of every op that the test builds."""
    return Breaker()


@pytest.fixture
def make_op(breaker: Breaker) -> Callable[..., Any]:
    """`make_op(stock, release="0.2.34", **settings)` builds the op of the GEMM entry."""
    from ck_patch import releases
    from ck_patch.context import OpContext
    from ck_patch.ops import cutlass_int8_dequant
    from ck_patch.settings import Settings

    by_first = {release.first: release for release in releases.RELEASES}

    def make(stock: Callable[..., Any], release: str = "0.2.34", **settings: Any) -> Any:
        context = OpContext(Settings(**settings), breaker, by_first[release], check_first=False)
        return cutlass_int8_dequant.build(stock, context)

    return make


@pytest.fixture
def eager_host() -> Any:
    """The eager backend's module."""
    return pytest.importorskip("comfy_kitchen.backends.eager.quantization")


@pytest.fixture
def triton_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The Triton backend's module, its own kernels fit for the interpreter, which has no libdevice
    and nothing to tune."""
    quantization = pytest.importorskip("comfy_kitchen.backends.triton.quantization")
    import triton
    import triton.language as tl

    sizes = {"block_m": 32, "block_n": 32, "block_k": 32, "group_size_m": 8}
    for name in ("_int8_matmul_dequant_kernel", "_int8_matmul_dequant_per_row_kernel"):
        monkeypatch.setattr(getattr(quantization, name), "configs", [triton.Config(sizes)])
    monkeypatch.setattr(quantization.libdevice, "rint", lambda x: tl.floor(x + 0.5))
    return quantization


@pytest.fixture
def eager(eager_host: Any, breaker: Breaker) -> Bench:
    """The eager backend's op."""
    return Bench("eager", eager_host, breaker)


@pytest.fixture
def triton(triton_host: Any, breaker: Breaker) -> Bench:
    """The Triton backend's op."""
    return Bench("triton", triton_host, breaker)


@pytest.fixture(params=["eager", "triton"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """Either backend's op."""
    found: Bench = request.getfixturevalue(request.param)
    return found
