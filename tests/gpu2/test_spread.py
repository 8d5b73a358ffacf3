"""Tensors of one call on several devices: stock's answer or stock's error, and nothing lost."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.conftest import Record
from tests.gpu2.devices import Run, Started

pytestmark = pytest.mark.gpu2

RUNS = {"stock": Run(environment={"CK_PATCH": "0"}), "ours": Run()}


def test_tensors_on_several_devices_are_answered_as_by_stock_and_nothing_is_given_up(
    programs: dict[str, Started], record: Record
) -> None:
    answers = programs["spread"].answers()
    stock, ours = answers["stock"], answers["ours"]
    assert not any(stock["ours"].values())
    different = {
        name: (outcome, ours["outcomes"][name])
        for name, outcome in stock["outcomes"].items()
        if ours["outcomes"][name] != outcome
    }
    assert different == {}
    assert ours["breakers"] == []
    assert all(ours["ours"].values()), ours["ours"]
    assert ours["current"] == 0
    refused = Counter(outcome[0] for outcome in stock["outcomes"].values() if len(outcome) == 1)
    # Else nothing was shown.
    assert refused
    record.add(
        "spread",
        calls=len(stock["outcomes"]),
        equal=True,
        errors_of_stock=dict(refused),
        forms={name: outcome for name, outcome in stock["outcomes"].items() if len(outcome) == 1},
    )
