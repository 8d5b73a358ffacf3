"""The table of releases: its order, its range, and what holds for a version."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ck_patch import releases
from ck_patch.slots import SLOTS


def test_the_table_is_in_order_and_starts_with_the_tested_range() -> None:
    firsts = [Version(release.first) for release in releases.RELEASES]
    assert firsts == sorted(set(firsts))
    assert firsts[0] == Version(releases.OLDEST)
    assert firsts[-1] <= Version(releases.NEWEST)
    for version in releases.MEASURED:
        assert Version(releases.OLDEST) <= Version(version) <= Version(releases.NEWEST)


def test_every_signature_belongs_to_a_slot() -> None:
    names = {slot.name for slot in SLOTS}
    for release in releases.RELEASES:
        assert release.signatures.keys() <= names


@pytest.mark.parametrize(
    ("version", "bias_dtype", "newer"),
    [
        ("0.2.31", "float32", False),
        ("0.2.33", "float32", False),
        ("0.2.34rc1", "float32", False),
        ("0.2.34", "output", False),
        ("0.2.40", "output", False),
        ("0.2.40.post1", "output", True),
        ("0.2.40+cu130", "output", True),
        ("0.2.41.dev3", "output", True),
        ("1!0.1", "output", True),
    ],
)
def test_the_facts_of_a_version_are_those_of_the_row_before_it(
    version: str, bias_dtype: str, newer: bool
) -> None:
    release = releases.release_for(Version(version))
    assert release is not None
    assert release.bias_dtype == bias_dtype
    assert releases.is_newer_than_tested(Version(version)) is newer


@pytest.mark.parametrize("version", ["0.1", "0.2.12", "0.2.30", "0.2.31rc1", "0.2.31.dev0"])
def test_nothing_is_known_before_the_tested_range(version: str) -> None:
    assert releases.release_for(Version(version)) is None
