"""The policy, asked for every known GPU, every setting and every shape, without a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ck_patch import shapes, tiles
from ck_patch.device import KNOWN, DeviceProfile
from ck_patch.route import MAX_K, OUT_BYTES, GemmCall, decide, device_reason
from ck_patch.settings import INT8
from tests import choices

BY_NAME = {device.name: device for device in KNOWN}
H200, GB10 = BY_NAME["H200"], BY_NAME["GB10"]
INTERPRETER = DeviceProfile("interpreter", "CPU")
LIMITS = (49152, 65536, 101376, 166912, 232448)
LARGE = GemmCall(4096, 4096, 4096, "bfloat16")
TENSOR_CORES = {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)}

every_gpu = pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)


def test_the_choices_tried_here_are_those_of_the_setting() -> None:
    assert INT8.choices == choices.INT8_VALUES


@every_gpu
@pytest.mark.parametrize("int8", INT8.choices)
def test_every_real_shape_gets_a_route_with_a_reason(device: DeviceProfile, int8: str) -> None:
    for (m, n, k), out_dtype in product(shapes.unique(), OUT_BYTES):
        route = decide(GemmCall(m, n, k, out_dtype, out_dtype), device, int8)
        assert route.reason
        assert (route.config is None) == (route.path == "stock")
        if route.config is not None:
            assert route.path.startswith(f"triton {route.config.name}")


@every_gpu
@pytest.mark.parametrize("int8", ["stock", "fp16"])
def test_nothing_is_ours_where_the_setting_asks_for_another_path(
    device: DeviceProfile, int8: str
) -> None:
    assert not any(decide(GemmCall(*s, "bfloat16"), device, int8).config for s in choices.GRID)
    assert int8 in (device_reason(device, int8) or "")


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
def test_triton_forces_ours_wherever_there_are_int8_tensor_cores(device: DeviceProfile) -> None:
    ours = [s for s in shapes.unique() if decide(GemmCall(*s, "bfloat16"), device, "triton").config]
    assert ours == (shapes.unique() if device.capability in TENSOR_CORES else [])


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (BY_NAME["Tesla P100"], "sm_60"),
        (BY_NAME["GeForce GTX 1080 Ti"], "sm_61"),
        (BY_NAME["Tesla V100"], "sm_70"),
        (BY_NAME["GeForce GTX 1660 SUPER"], "sm_75"),
        (BY_NAME["GeForce RTX 2080 Ti"], "sm_75"),
        (DeviceProfile("cuda", "Quadro T1000", (7, 5), 14, 65536), "sm_75"),
        (DeviceProfile("cuda", "TU117-unknown", (7, 5), 14, 65536), "sm_75"),
        (BY_NAME["B300"], "sm_103"),
        (DeviceProfile("cuda", "next", (13, 0), 200, 232448), "sm_130 is unknown"),
        (DeviceProfile("cuda", "Thor", (11, 0), 20, 232448), "sm_110 is unknown"),
        (DeviceProfile("other", "AMD Radeon RX 7900 XTX"), "AMD Radeon RX 7900 XTX"),
        (DeviceProfile("other", "CPU"), "CPU"),
    ],
    ids=lambda value: value.name if isinstance(value, DeviceProfile) else "",
)
@pytest.mark.parametrize("int8", ["auto", "triton"])
def test_a_device_that_cannot_gain_stays_on_stock_and_is_told_why(
    device: DeviceProfile, said: str, int8: str
) -> None:
    reason = device_reason(device, int8)
    assert said in (reason or "")
    for shape in shapes.unique():
        assert decide(GemmCall(*shape, "float16"), device, int8).reason == reason
        assert decide(GemmCall(*shape, "float16"), device, int8).config is None


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
def test_a_call_that_ours_cannot_take_stays_on_stock_and_is_told_why(
    device: DeviceProfile, change: dict[str, object], said: str, int8: str
) -> None:
    route = decide(dataclasses.replace(LARGE, **change), device, int8)  # type: ignore[arg-type]
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
    for config, out_dtypes in choices.chosen(small).items():
        assert all(config.shared_memory(OUT_BYTES[out_dtype]) <= limit for out_dtype in out_dtypes)


def test_a_configuration_that_does_not_fit_is_named_in_the_reason() -> None:
    route = decide(LARGE, dataclasses.replace(GB10, shared_memory=49152))
    assert route.config is None
    assert tiles.MMA_SYNC.name in route.reason
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
    if device_reason(device, int8) is not None:
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
