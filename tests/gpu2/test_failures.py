"""A failure on one of two GPUs: the other stays patched, and works."""

from __future__ import annotations

import pytest

from tests.conftest import Record
from tests.gpu2.devices import Run, Started
from tests.gpu2.failing import BAD, STICKY

pytestmark = pytest.mark.gpu2

GOOD = 1 - BAD
KINDS = ("wrong", "crashing", "sticky")
RUNS = {kind: Run([kind]) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_on_one_gpu_leaves_the_other_patched_and_working(
    kind: str, programs: dict[str, Started], record: Record
) -> None:
    found = programs["failing"].answers()[kind]
    assert found["equal"] == [True, True]
    assert found["slots"] == ["patched"]
    assert found["gemms"][GOOD]
    assert all(found["quantizers"])
    if kind == "sticky":
        # The caller's: with a dead context stock could not help. Nothing is given up for it.
        (raised,) = found["raised"]
        assert raised.startswith(f"{BAD} ")
        assert raised.endswith(STICKY)
        assert found["breakers"] == []
        assert found["gemms"][BAD]
    else:
        assert found["raised"] == []
        assert {device for _, device, _ in found["breakers"]} == {str(BAD)}
        assert found["warnings"]
        assert all(f"device {BAD}" in line for line in found["warnings"])
    record.add(
        "failure_on_one",
        kind=kind,
        on=BAD,
        equal=True,
        kernels_of_the_other=found["gemms"][GOOD],
        breakers=found["breakers"],
        warnings=found["warnings"],
    )
