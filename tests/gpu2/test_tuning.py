"""One table of measured choices, written by two processes with a GPU each, and read by either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Record
from tests.gpu2.devices import Run, Started

pytestmark = pytest.mark.gpu2

SHARED = "1024x4096x4096"
OWN = ("512x5120x5120", "4096x3072x3072")


def runs(folder: Path, swapped: bool = False) -> dict[str, Run]:
    """A process for each GPU, with a shape of its own and one that both have."""
    environment = {"CK_PATCH_CACHE_DIR": str(folder), "CK_PATCH_TUNE": "auto"}
    return {
        f"cuda:{device}": Run([device, OWN[device ^ swapped], SHARED], environment)
        for device in (0, 1)
    }


def _tables(folder: Path) -> dict[str, Any]:
    """What is in the files of tables there: each is whole at any time."""
    return {
        str(file.relative_to(folder)): json.loads(file.read_text(encoding="utf-8"))
        for file in folder.rglob("*.json")
    }


def _weight_shape(shape: str) -> str:
    """As a key of the table has it, whatever the bucket of M."""
    return shape.partition("x")[2]


def _checked(answers: dict[str, Any]) -> dict[str, Any]:
    """What ran by device and shape, where all is as it should be."""
    for device, answer in enumerate(answers.values()):
        assert answer["breakers"] == []
        assert answer["patched"]
        for shape, found in answer["shapes"].items():
            assert found["equal"], shape
            assert found["ran_on"] == [device], shape
    return {name: answer["shapes"] for name, answer in answers.items()}


def test_two_processes_fill_one_table_and_what_one_gpu_learned_the_other_knows(
    programs: dict[str, Started], record: Record
) -> None:
    first = _checked(programs["tuned"].answers())
    folder = Path(programs["tuned"].runs["cuda:0"].environment["CK_PATCH_CACHE_DIR"])
    learned = _tables(folder)
    text = json.dumps(learned)
    assert all(f"x{_weight_shape(shape)} " in text for shape in (*OWN, SHARED)), text
    explored = {
        f"{name} {shape}": len(found["early"])
        for name, shapes in first.items()
        for shape, found in shapes.items()
    }
    # What both have may have been learned by the one when the other comes to it.
    shared = [count for name, count in explored.items() if name.endswith(SHARED)]
    assert max(shared) > 1, explored
    own = [count for name, count in explored.items() if not name.endswith(SHARED)]
    assert min(own) > 1, explored

    # The other GPU, and a table in which all is known: nothing but the choice runs.
    again = Started("tuned", runs(folder, swapped=True))
    try:
        second = _checked(again.answers())
    finally:
        again.stop()
    for name, shapes in second.items():
        (teacher,) = first.keys() - {name}
        for shape, found in shapes.items():
            assert found["early"] == found["late"], shape
            if shape != SHARED:
                assert found["late"] == first[teacher][shape]["late"], shape
    assert _tables(folder) == learned
    record.add(
        "shared_table",
        files=len(learned),
        explored_kernels=explored,
        chosen={
            f"{name} {shape}": [kernel[0][:60] for kernel in found["late"]]
            for name, shapes in second.items()
            for shape, found in shapes.items()
        },
        explored_again=0,
    )
