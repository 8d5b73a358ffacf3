"""Two GPUs that are unlike, by assumption: each tensor goes the way of its own device."""

from __future__ import annotations

import pytest

from tests.conftest import Record
from tests.gpu2.devices import Run, Started

pytestmark = pytest.mark.gpu2

CASES = [(assumed, first) for assumed in (0, 1) for first in (0, 1)]


RUNS = {
    f"{assumed} {first}": Run([first], {"CK_PATCH_ASSUME_DEVICE": f"{assumed}=sm_70"})
    for assumed, first in CASES
}


@pytest.mark.parametrize(("assumed", "first"), CASES)
def test_each_device_takes_its_own_route_whichever_is_current_at_the_first_call(
    assumed: int, first: int, programs: dict[str, Started], record: Record
) -> None:
    found = programs["assumed_pair"].answers()[f"{assumed} {first}"]
    volta, real = found["devices"][assumed], found["devices"][1 - assumed]
    assert found["current"] == first
    assert found["breakers"] == []
    assert (volta["ran_on"], real["ran_on"]) == ([assumed], [1 - assumed])
    # FP16 keeps what INT8 rounds away.
    assert all(error < volta["stock_error"] / 5 for error in volta["error"].values()), volta
    assert volta["gemms"] == volta["quantizers"] == []
    assert all(real["equal"].values()), real
    assert all(error > real["stock_error"] / 2 for error in real["error"].values()), real
    assert real["gemms"]
    assert real["quantizers"]
    for device in (0, 1):
        lines = [line for line in found["lines"] if line.startswith(f"cuda:{device} (")]
        assert all(("sm_70" in line) is (device == assumed) for line in lines), lines
        assert lines or device != assumed
    record.add(
        "assumed_pair",
        assumed=f"{assumed}=sm_70",
        current_at_first_call=first,
        error_assumed=volta["error"],
        error_real=real["error"],
        stock_error=real["stock_error"],
        real_equals_stock=real["equal"],
        kernels_real=real["gemms"],
    )
