"""The policy, asked for every known GPU, every setting and every shape, without a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ck_patch import shapes, tiles
from ck_patch.device import KNOWN, DeviceProfile, profile
from ck_patch.route import (
    BACKENDS,
    CUDA_BACKEND,
    MAX_K,
    OUT_BYTES,
    Backend,
    DevicePath,
    GemmCall,
    decide,
    device_path,
)
from ck_patch.settings import INT8
from tests import choices

BY_NAME = {device.name: device for device in KNOWN}
H200, GB10 = BY_NAME["H200"], BY_NAME["GB10"]
INTERPRETER = DeviceProfile("interpreter", "CPU")
LIMITS = (49152, 65536, 101376, 166912, 232448)
LARGE = GemmCall(4096, 4096, 4096, "bfloat16")
TENSOR_CORES = {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)}
"""Where Triton runs int8 on tensor cores that are fast."""
FUTURE = DeviceProfile("cuda", "next", (13, 0), 200, 232448, True)
AMD = DeviceProfile("other", "AMD Radeon RX 7900 XTX")
CPU = DeviceProfile("other", "CPU")

every_gpu = pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def test_the_choices_tried_here_are_those_of_the_setting() -> None:
    assert INT8.choices == choices.INT8_VALUES


@every_gpu
@pytest.mark.parametrize("int8", INT8.choices)
def test_every_real_shape_gets_a_route_with_a_reason(device: DeviceProfile, int8: str) -> None:
    for use, shape in product(choices.USES, shapes.unique()):
        call = GemmCall(
            *shape, use.out_dtype, use.out_dtype, residual=use.residual, backend=use.backend
        )
        route = decide(call, device, int8)
        assert route.reason
        assert (route.config is None) == (route.path == "stock")
        if route.config is not None:
            assert route.path.startswith(f"triton {route.config.name}")


@every_gpu
@every_backend
@pytest.mark.parametrize("int8", ["stock", "fp16"])
def test_nothing_is_ours_where_the_setting_asks_for_another_path(
    device: DeviceProfile, int8: str, backend: Backend
) -> None:
    calls = [GemmCall(*shape, "bfloat16", backend=backend) for shape in choices.GRID]
    assert not any(decide(call, device, int8).config for call in calls)
    path = device_path(device, int8, backend)
    if int8 == "fp16" and backend == "cuda" and device.capability < (7, 5):
        assert path == device_path(device, "auto", backend)
        assert path.path == "eager"
        return
    half = "bfloat16" if device.capability == (10, 3) else "float16"
    assert path.path == ("stock" if int8 == "stock" else half)
    assert (path.reason, path.advice) == (f"CK_PATCH_INT8={int8}", "")


@every_gpu
def test_auto_takes_every_real_shape_where_it_was_measured_and_none_elsewhere(
    device: DeviceProfile,
) -> None:
    ours = [s for s in shapes.unique() if decide(GemmCall(*s, "bfloat16"), device).config]
    if device == H200:
        assert ours == shapes.unique()
    elif device == GB10:
        assert ours == [shape for shape in shapes.unique() if shape[0] >= 128]
    else:
        assert not ours


@every_gpu
@pytest.mark.parametrize(
    ("backend", "int8"),
    [("cuda", "triton"), ("triton", "auto"), ("triton", "triton"), ("eager", "auto")],
)
def test_every_real_shape_is_ours_wherever_int8_tensor_cores_are_fast(
    device: DeviceProfile, backend: Backend, int8: str
) -> None:
    calls = [GemmCall(*shape, "bfloat16", backend=backend) for shape in shapes.unique()]
    expected = device.capability in TENSOR_CORES
    assert all((decide(call, device, int8).config is not None) == expected for call in calls)


NO_TRITON = "Triton has no int8 tensor-core kernels for "
SLOW = "INT8 is slow on sm_103 whatever the kernel"
FUSED = "fused, without the transposed copy of the weight and the int32 output"
WIDE = "the same GEMM in 64 bits, and not tuned anew for each M"
UNMEASURED = "nothing is known of our kernels on "
NO_KERNELS = "the CUDA backend has no kernels for "
UNKNOWN = " is unknown to this version"
# For each compute capability, path and reason of the CUDA, the Triton and the eager backend.
PATHS: dict[tuple[int, int], tuple[tuple[str, str], tuple[str, str], tuple[str, str]]] = {
    (5, 2): (
        ("eager", NO_KERNELS + "sm_52"),
        ("stock", NO_TRITON + "sm_52"),
        ("stock", "sm_52 has neither dp4a nor fast FP16"),
    ),
    (6, 0): (
        ("eager", NO_KERNELS + "sm_60"),
        ("float16", "sm_60 has no dp4a, and runs FP16 at double rate"),
        ("float16", "sm_60 has no dp4a, and runs FP16 at double rate"),
    ),
    (6, 1): (
        ("eager", NO_KERNELS + "sm_61"),
        ("stock", NO_TRITON + "sm_61"),
        ("stock", "cuBLAS runs INT8 by dp4a on sm_61"),
    ),
    (6, 2): (
        ("eager", NO_KERNELS + "sm_62"),
        ("stock", NO_TRITON + "sm_62"),
        ("stock", "cuBLAS runs INT8 by dp4a on sm_62"),
    ),
    (7, 0): (
        ("eager", NO_KERNELS + "sm_70"),
        ("float16", "sm_70 has no INT8 tensor cores"),
        ("float16", "sm_70 has no INT8 tensor cores"),
    ),
    (7, 2): (
        ("eager", NO_KERNELS + "sm_72"),
        ("float16", "INT8 tensor cores of sm_72"),
        ("float16", "INT8 tensor cores of sm_72"),
    ),
    (7, 5): (
        ("stock", NO_TRITON + "sm_75"),
        ("stock", NO_TRITON + "sm_75"),
        ("stock", NO_TRITON + "sm_75, cuBLAS has INT8 ones"),
    ),
    (8, 0): (("tuned", UNMEASURED + "sm_80"), ("triton", WIDE), ("triton", FUSED)),
    (8, 6): (("tuned", UNMEASURED + "sm_86"), ("triton", WIDE), ("triton", FUSED)),
    (8, 7): (("tuned", UNMEASURED + "sm_87"), ("triton", WIDE), ("triton", FUSED)),
    (8, 9): (("tuned", UNMEASURED + "sm_89"), ("triton", WIDE), ("triton", FUSED)),
    (9, 0): (
        ("triton", "measured faster than stock's CUTLASS on sm_90"),
        ("triton", WIDE),
        ("triton", FUSED),
    ),
    (10, 0): (("tuned", UNMEASURED + "sm_100"), ("triton", WIDE), ("triton", FUSED)),
    (10, 3): (("stock", SLOW), ("stock", SLOW), ("bfloat16", f"{SLOW}, and BF16 is fast there")),
    (11, 0): (("stock", "sm_110" + UNKNOWN),) * 3,
    (12, 0): (("tuned", UNMEASURED + "sm_120"), ("triton", WIDE), ("triton", FUSED)),
    (12, 1): (
        ("triton", "reported 2.3 times as fast as stock's CUTLASS on sm_121"),
        ("triton", WIDE),
        ("triton", FUSED),
    ),
    (13, 0): (("stock", "sm_130" + UNKNOWN),) * 3,
}


def test_every_known_gpu_has_its_paths_written_down() -> None:
    assert {device.capability for device in KNOWN} == PATHS.keys() - {(5, 2), (13, 0)}


@pytest.mark.parametrize("capability", PATHS)
def test_each_backend_takes_the_path_for_its_device_and_says_why(
    capability: tuple[int, int],
) -> None:
    gpu = profile(0, capability)
    for backend, (path, said) in zip(BACKENDS, PATHS[capability], strict=True):
        found = device_path(gpu, "auto", backend)
        assert (found.path, said in found.reason) == (path, True), (backend, found)
        # Only the CUDA backend's path is one of choice between two that run.
        forced = device_path(gpu, "triton", backend)
        if backend == "cuda" and capability in TENSOR_CORES and path == "tuned":
            assert forced == DevicePath("triton", "CK_PATCH_INT8=triton")
        else:
            assert forced == found


@every_backend
@pytest.mark.parametrize("int8", ["auto", "triton"])
def test_a_gpu_that_triton_cannot_compile_for_is_left_to_stock(backend: Backend, int8: str) -> None:
    found = device_path(dataclasses.replace(GB10, compiles=False), int8, backend)
    assert (found.path, found.advice) == ("stock", "a newer Triton")
    assert found.reason == "this version of Triton cannot compile for sm_121"


@pytest.mark.parametrize(("triton", "compiles"), [("3.3.1", False), ("3.4.0", True)])
def test_only_a_triton_that_knows_sm_121_is_asked_to_compile_for_it(
    triton: str, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from ck_patch import device

    properties = SimpleNamespace(
        name="GB10", major=12, minor=1, multi_processor_count=48, shared_memory_per_block=49152
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("importlib.metadata.version", lambda name: triton)
    device.profile.cache_clear()
    device._triton_since.cache_clear()
    try:
        assert device.profile(0).compiles == compiles
        properties.minor = 0
        device.profile.cache_clear()
        assert device.profile(0).compiles
    finally:
        device.profile.cache_clear()
        device._triton_since.cache_clear()


@every_gpu
def test_a_path_that_is_slow_for_its_device_comes_with_advice(device: DeviceProfile) -> None:
    cuda, triton, eager = (device_path(device, "auto", backend) for backend in BACKENDS)
    # The CUDA backend's slow devices are handed on to the eager one, which has the advice.
    assert bool(cuda.advice) == (device.capability == (10, 3))
    half = {(6, 0), (7, 0), (7, 2)}
    slow = device.capability < (8, 0) or device.capability == (10, 3)
    assert bool(triton.advice) == (slow and device.capability not in half)
    assert (eager.advice == CUDA_BACKEND) == (
        device.capability == (7, 5) or device.capability in TENSOR_CORES
    )
    best = half | {(6, 1), (6, 2), (10, 3), (11, 0)}
    assert bool(eager.advice) == (device.capability not in best)


@pytest.mark.parametrize("name", ["GeForce GTX 1660 SUPER", "Quadro T1000", "TU117-unknown"])
@every_backend
def test_a_turing_gpu_is_left_to_stock_whatever_its_name(name: str, backend: Backend) -> None:
    turing = DeviceProfile("cuda", name, (7, 5), 14, 65536)
    for int8 in ("auto", "triton"):
        assert device_path(turing, int8, backend).path == "stock"


@pytest.mark.parametrize(
    "device",
    [BY_NAME["Tesla V100"], BY_NAME["GeForce RTX 2080 Ti"], BY_NAME["B300"], FUTURE, AMD, CPU],
    ids=lambda device: device.name,
)
@every_backend
@pytest.mark.parametrize("int8", ["auto", "triton"])
def test_a_gemm_that_the_device_has_no_use_for_is_refused_for_the_device(
    device: DeviceProfile, int8: str, backend: Backend
) -> None:
    reason = device_path(device, int8, backend).reason
    for shape in shapes.unique():
        route = decide(GemmCall(*shape, "float16", backend=backend), device, int8)
        assert (route.config, route.reason) == (None, reason)


@pytest.mark.parametrize("device", [AMD, CPU], ids=lambda device: device.name)
@every_backend
@pytest.mark.parametrize("int8", INT8.choices)
def test_what_is_no_nvidia_gpu_stays_on_stock_under_any_setting(
    device: DeviceProfile, int8: str, backend: Backend
) -> None:
    path = device_path(device, int8, backend)
    assert (path.path, path.advice) == ("stock", "")
    assert (device.name if int8 != "stock" else "CK_PATCH_INT8=stock") in path.reason


@every_backend
def test_the_interpreter_runs_our_gemm_unless_another_path_is_asked_for(backend: Backend) -> None:
    for int8, path in (("auto", "triton"), ("triton", "triton")):
        assert device_path(INTERPRETER, int8, backend).path == path
    for int8, path in (("stock", "stock"), ("fp16", "float16")):
        found = device_path(INTERPRETER, int8, backend)
        assert (found.path, found.reason) == (path, f"CK_PATCH_INT8={int8}")


@pytest.mark.parametrize(
    ("capability", "path"),
    [((3, 7), "stock"), ((5, 2), "stock"), ((5, 3), "float16"), ((13, 0), "float16")],
)
@every_backend
def test_fp16_is_had_on_request_wherever_it_exists(
    capability: tuple[int, int], path: str, backend: Backend
) -> None:
    # The CUDA backend has no kernels at all for the first three: the eager one does it.
    expected = "eager" if backend == "cuda" and capability < (7, 5) else path
    assert device_path(profile(0, capability), "fp16", backend).path == expected


def test_a_gpu_with_no_faster_path_is_not_told_of_one() -> None:
    assert device_path(profile(0, (5, 2)), "auto", "eager").advice == ""


@pytest.mark.parametrize("device", [H200, GB10, INTERPRETER], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"m": 0}, "nothing to compute"),
        ({"n": 0}, "nothing to compute"),
        ({"k": 0}, "nothing to compute"),
        ({"k": 131_072}, "131072"),
        ({"n": 4097}, "multiple of 8"),
        ({"n": 4100}, "multiple of 8"),
        ({"n": 51_865}, "multiple of 8"),
        ({"n": 51_866}, "multiple of 8"),
        ({"n": 51_868}, "multiple of 8"),
        ({"k": 17}, "multiple of 16"),
        ({"k": 20}, "multiple of 16"),
        ({"k": 24}, "multiple of 16"),
        ({"k": 100}, "multiple of 16"),
        ({"bias_dtype": "float32", "accepts_bias": False}, "float32 bias"),
    ],
    ids=str,
)
@pytest.mark.parametrize("int8", ["auto", "triton"])
@every_backend
def test_a_call_that_ours_cannot_take_stays_on_stock_and_is_told_why(
    device: DeviceProfile, change: dict[str, object], said: str, int8: str, backend: Backend
) -> None:
    call = dataclasses.replace(LARGE, backend=backend, **change)  # type: ignore[arg-type]
    route = decide(call, device, int8)
    assert route.config is None
    assert said in route.reason


@pytest.mark.parametrize("device", [GB10, INTERPRETER], ids=lambda device: device.name)
@pytest.mark.parametrize(
    "change", [{"k": 131_056}, {"k": 16}, {"k": 48}, {"k": 2064}, {"n": 8}, {"n": 51_872}], ids=str
)
def test_the_last_size_inside_each_limit_is_ours(
    device: DeviceProfile, change: dict[str, int]
) -> None:
    assert decide(dataclasses.replace(LARGE, **change), device).config is not None  # type: ignore[arg-type]


def test_sm_90_takes_a_large_gemm_whatever_its_n_and_k() -> None:
    for n, k in ((4104, 4096), (4096, 4112), (51_872, 2064), (4096, 131_056)):
        assert decide(GemmCall(16_384, n, k, "bfloat16"), H200).config is not None


def test_the_limit_of_k_is_where_int32_ends() -> None:
    assert MAX_K * 128 * 128 <= 2**31 - 1 < (MAX_K + 1) * 128 * 128


@pytest.mark.parametrize(("m", "ours"), [(1, False), (127, False), (128, True), (80_661, True)])
def test_gb10_takes_the_rows_that_were_reported_faster(m: int, ours: bool) -> None:
    call = dataclasses.replace(LARGE, m=m)
    assert (decide(call, GB10).config is not None) == ours
    assert decide(call, GB10, "triton").config is not None


@pytest.mark.parametrize("limit", LIMITS)
@every_gpu
def test_what_needs_more_shared_memory_than_there_is_is_never_chosen(
    device: DeviceProfile, limit: int
) -> None:
    small = dataclasses.replace(device, shared_memory=limit)
    for config, uses in choices.chosen(small).items():
        for use in uses:
            assert config.shared_memory(OUT_BYTES[use.out_dtype]) <= limit


def test_a_configuration_that_does_not_fit_is_named_in_the_reason() -> None:
    route = decide(LARGE, dataclasses.replace(GB10, shared_memory=49152))
    assert route.config is None
    assert tiles.EIGHT_WARPS.name in route.reason
    assert "GB10 has" in route.reason


sizes = st.one_of(st.integers(0, 300), st.integers(0, 200_000))
multiples = st.builds(
    lambda size, step: size * step, st.integers(0, 9000), st.sampled_from([8, 16])
)
calls = st.builds(
    GemmCall,
    m=sizes,
    n=st.one_of(sizes, multiples),
    k=st.one_of(sizes, multiples),
    out_dtype=st.sampled_from([*OUT_BYTES]),
    bias_dtype=st.sampled_from([None, *OUT_BYTES]),
    accepts_bias=st.booleans(),
    residual=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
capabilities = st.one_of(
    st.sampled_from([device.capability for device in KNOWN]),
    st.tuples(st.integers(1, 20), st.integers(0, 9)),
)
devices = st.one_of(
    st.sampled_from([*KNOWN, INTERPRETER, DeviceProfile("other", "CPU")]),
    st.builds(
        DeviceProfile,
        st.just("cuda"),
        st.text(max_size=8),
        capabilities,
        st.integers(1, 300),
        st.one_of(st.sampled_from(LIMITS), st.integers(0, 300_000)),
        st.booleans(),
    ),
)


# The same examples in every run, however busy the machine.
repeatable = settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@repeatable
@given(calls, devices, st.sampled_from(INT8.choices))
def test_any_route_fits_its_device_and_keeps_to_what_the_kernels_can_do(
    call: GemmCall, device: DeviceProfile, int8: str
) -> None:
    before = dataclasses.astuple(call), dataclasses.astuple(device)
    route = decide(call, device, int8)
    assert route == decide(dataclasses.replace(call), dataclasses.replace(device), int8)
    assert (dataclasses.astuple(call), dataclasses.astuple(device)) == before
    assert route.reason.strip()
    assert "\n" not in route.reason
    path = device_path(device, int8, call.backend)
    assert path.reason.strip()
    assert "\n" not in path.reason + path.advice
    if path.path != "triton":
        assert route.config is None
    if route.config is None:
        return
    assert 0 not in (call.m, call.n, call.k)
    assert call.n % 8 == 0
    assert call.k % 16 == 0
    assert call.k <= MAX_K
    assert call.accepts_bias
    if device.kind == "cuda":
        out_bytes = OUT_BYTES[call.out_dtype]
        assert tiles.fits(route.config, device.shared_memory, device.descriptors, out_bytes)


@repeatable
@given(calls, devices)
def test_auto_never_takes_what_triton_would_not(call: GemmCall, device: DeviceProfile) -> None:
    if decide(call, device, "auto").config is not None:
        assert decide(call, device, "triton").config is not None


def test_deciding_imports_neither_torch_nor_triton() -> None:
    script = (
        "import sys\n"
        "from ck_patch import device, route, shapes, tiles\n"
        "for gpu in device.KNOWN:\n"
        "    for m, n, k in shapes.unique():\n"
        "        route.decide(route.GemmCall(m, n, k, 'float16'), gpu, 'triton')\n"
        "print(sorted({'torch', 'triton', 'numpy', 'comfy_kitchen'} & set(sys.modules)))\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=root
    )
    assert done.stdout.strip() == "[]"
