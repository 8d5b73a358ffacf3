"""Which devices get a line about a slow path, what it says, and that it is said once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ck_patch import log, notices
from ck_patch.device import KNOWN, profile
from ck_patch.route import BACKENDS, Backend, device_path


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget which lines were written."""
    monkeypatch.setattr(log, "_seen", {})
    log.configure("info")
    yield
    log.configure("info")


def build_torch_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "torch", torch)


def say(capability: tuple[int, int], backend: Backend, index: int = 0, int8: str = "auto") -> None:
    gpu = profile(index, capability)
    notices.say(index, gpu, backend, device_path(gpu, int8, backend))


OLD_TORCH = "torch was built for CUDA 12.8: ComfyUI disables the CUDA backend below CUDA 13"


@pytest.mark.parametrize(
    ("capability", "backend", "said"),
    [
        (
            (7, 0),
            "eager",
            "Tesla V100 (assumed), sm_70): INT8 linears of the eager backend run in FP16: sm_70 "
            "has no INT8 tensor cores, and runs FP16 on tensor cores",
        ),
        (
            (8, 6),
            "eager",
            "GeForce RTX 3090 (assumed), sm_86): INT8 linears of the eager backend run in our "
            "Triton GEMM: fused, without the transposed copy of the weight and the int32 output; "
            f"faster: comfy_kitchen's CUDA backend ({OLD_TORCH})",
        ),
        (
            (7, 5),
            "eager",
            "GeForce GTX 1660 SUPER (assumed), sm_75): INT8 linears of the eager backend stay on "
            "stock's path: Triton has no int8 tensor-core kernels for sm_75, cuBLAS has INT8 ones; "
            f"faster: comfy_kitchen's CUDA backend ({OLD_TORCH})",
        ),
        (
            (10, 3),
            "eager",
            "B300 (assumed), sm_103): INT8 linears of the eager backend run in BF16: INT8 is slow "
            "on sm_103 whatever the kernel, and BF16 is fast there",
        ),
        (
            (10, 3),
            "cuda",
            "B300 (assumed), sm_103): INT8 linears of the cuda backend stay on stock's path: INT8 "
            "is slow on sm_103 whatever the kernel; faster: CK_PATCH_INT8=fp16, which dequantizes "
            "to BF16",
        ),
        (
            (6, 1),
            "cuda",
            "GeForce GTX 1080 Ti (assumed), sm_61): INT8 linears of the cuda backend go to the "
            "eager backend: the CUDA backend has no kernels for sm_61",
        ),
    ],
)
def test_a_slow_device_is_told_its_path_and_why_and_what_is_faster(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    backend: Backend,
    said: str,
) -> None:
    build_torch_for(monkeypatch, "12.8")
    say(capability, backend, index=1)
    assert caplog.messages == [f"cuda:1 ({said}"]
    assert caplog.records[0].levelname == "INFO"


@pytest.mark.parametrize(
    ("capability", "backend"),
    [
        ((9, 0), "cuda"),  # Ours, where stock was not slow.
        ((8, 6), "cuda"),  # Stock, and nothing better is known.
        ((12, 1), "cuda"),
        ((9, 0), "triton"),
        ((6, 1), "eager"),  # dp4a is the best it has.
        ((13, 0), "eager"),
    ],
)
def test_a_device_on_its_best_path_gets_no_line(
    caplog: pytest.LogCaptureFixture, capability: tuple[int, int], backend: Backend
) -> None:
    say(capability, backend)
    assert caplog.messages == []


def test_every_known_gpu_gets_at_most_one_line_for_each_backend_however_often_it_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        for index, gpu in enumerate(KNOWN):
            for backend in BACKENDS:
                notices.say(index, gpu, backend, device_path(gpu, "auto", backend))
    starts = [message.partition(" backend")[0] for message in caplog.messages]
    assert starts
    assert len(starts) == len(set(starts))
    assert all("\n" not in message for message in caplog.messages)


def test_each_gpu_of_a_host_gets_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    say((7, 0), "eager", 0)
    say((7, 0), "eager", 1)
    say((7, 0), "eager", -1)
    assert [message.partition(" ")[0] for message in caplog.messages] == ["cuda:0", "cuda:1", "cpu"]


def test_stock_by_setting_is_no_news_and_fp16_by_setting_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say((7, 0), "eager", int8="stock")
    assert caplog.messages == []
    say((9, 0), "cuda", int8="fp16")
    assert caplog.messages == [
        "cuda:0 (H200 (assumed), sm_90): INT8 linears of the cuda backend run in FP16: "
        "CK_PATCH_INT8=fp16"
    ]


@pytest.mark.parametrize(
    ("capability", "backend", "int8", "why"),
    [
        (
            (7, 5),
            "cuda",
            "auto",
            "stay on stock's path: Triton has no int8 tensor-core kernels for sm_75",
        ),
        (
            (10, 3),
            "cuda",
            "auto",
            "stay on stock's path: INT8 is slow on sm_103 whatever the kernel; faster: "
            "CK_PATCH_INT8=fp16, which dequantizes to BF16",
        ),
        (
            (10, 3),
            "eager",
            "auto",
            "run in BF16: INT8 is slow on sm_103 whatever the kernel, and BF16 is fast there",
        ),
        ((6, 1), "eager", "auto", "stay on stock's path: cuBLAS runs INT8 by dp4a on sm_61"),
        ((9, 0), "cuda", "stock", "stay on stock's path: CK_PATCH_INT8=stock"),
        ((9, 0), "cuda", "fp16", "run in FP16: CK_PATCH_INT8=fp16"),
    ],
)
def test_a_forced_candidate_that_has_no_part_in_the_path_is_said_in_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    backend: Backend,
    int8: str,
    why: str,
) -> None:
    monkeypatch.setenv("CK_PATCH_FORCE", "cfg7")
    for _ in range(2):
        say(capability, backend, int8=int8)
    (line,) = caplog.messages
    assert line.endswith(f"backend {why}; CK_PATCH_FORCE=cfg7 has no effect")


def test_stock_forced_is_what_a_device_on_stock_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CK_PATCH_FORCE", "stock")
    say((7, 5), "cuda")
    assert caplog.messages == []
    say((10, 3), "eager")
    assert caplog.messages[0].endswith("CK_PATCH_FORCE=stock has no effect")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forced_candidate_on_a_device_with_our_gemm_is_not_of_this_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: Backend
) -> None:
    monkeypatch.setenv("CK_PATCH_FORCE", "cfg7")
    say((8, 6), backend)
    assert "CK_PATCH_FORCE" not in caplog.text


@pytest.mark.parametrize(
    ("cuda", "known"),
    [("11.8", True), ("12.8", True), ("13.0", False), ("14.1", False), (None, False), ("", False)],
)
def test_a_torch_for_cuda_below_13_is_what_keeps_the_cuda_backend_from_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cuda: str | None, known: bool
) -> None:
    build_torch_for(monkeypatch, cuda)
    obstacle = notices.cuda_backend_obstacle()
    assert (obstacle is not None) == known
    say((8, 6), "eager")
    assert ("torch was built for" in caplog.text) == known


def test_without_torch_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert notices.cuda_backend_obstacle() is None
