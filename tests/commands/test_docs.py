"""The documents: in step with the code, and every command they promise exists."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from ck_patch import cli, device, route, settings, stock_paths
from tests.conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])


def test_the_page_of_settings_is_the_table_of_settings() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "document_settings.py"))
    assert page == script["text"](), "run python scripts/document_settings.py"
    assert all(f"`{variable.name}`" in page for variable in settings.VARIABLES)


def test_the_page_of_the_policy_is_what_the_policy_says() -> None:
    page = (REPOSITORY / "docs" / "policy.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(REPOSITORY / "scripts" / "document_policy.py"))
    assert page == script["text"](), "run python scripts/document_policy.py"


@pytest.mark.parametrize(("backend", "operation"), stock_paths.OPERATIONS)
def test_the_page_of_the_policy_has_a_row_for_every_class_of_gpu_and_operation(
    backend: route.Backend, operation: stock_paths.Operation
) -> None:
    page = (REPOSITORY / "docs" / "policy.md").read_text(encoding="utf-8")
    (section,) = (
        part
        for part in page.split("\n## ")
        if re.match(f"{backend} backend: `[^`]*{operation}`", part, re.IGNORECASE)
    )
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| sm_")]
    architectures = [row[1].strip() for row in rows]
    assert architectures == list(dict.fromkeys(gpu.architecture for gpu in device.KNOWN))
    assert (architectures[0], architectures[-1]) == ("sm_60", "sm_121")
    assert all(len(row) == 7 and all(cell.strip() for cell in row[1:-1]) for row in rows)
    if operation == "int8_linear":
        gpus = {gpu.architecture: gpu for gpu in device.KNOWN}
        for row, gpu in zip(rows, gpus.values(), strict=True):
            path = route.device_path(gpu, "auto", backend)
            assert row[3].strip() == f"`{path.path}`"
            assert path.reason in row[4]
            assert path.advice in row[4]


def test_stock_has_a_path_on_a_gpu_that_nobody_knows() -> None:
    for backend, operation in stock_paths.OPERATIONS:
        assert stock_paths.stock_path(backend, operation, (3, 5))
        assert stock_paths.stock_path(backend, operation, (99, 9))
    assert "sm_80" in stock_paths.stock_path("cuda", "cutlass_int8_dequant", (8, 6))
    assert "sm_89" in stock_paths.stock_path("cuda", "cutlass_int8_dequant", (8, 9))
    assert "sm_89" in stock_paths.stock_path("cuda", "cutlass_int8_dequant", (13, 0))
    with pytest.raises(KeyError):
        stock_paths.stock_path("eager", "cutlass_int8_dequant", (8, 0))


def test_every_script_the_readme_names_exists() -> None:
    named = set(re.findall(r"\./(scripts/[\w.]+)", README))
    assert {"scripts/run.sh", "scripts/test.sh"} <= named
    assert all(os.access(REPOSITORY / name, os.R_OK) for name in named)


def test_every_command_the_readme_names_is_understood() -> None:
    named = set(re.findall(r"-m ck_patch ([^`\n#|]+)", README))
    commands = {"info", "demo", "bench", "tune"}
    assert {words.split()[0] for words in named} == commands
    for words in named:
        assert cli._parser().parse_args(shlex.split(words)).command in commands


def test_every_variable_the_readme_names_exists() -> None:
    known = {variable.name for variable in settings.VARIABLES} | {"CK_PATCH_PYTHON"}
    assert set(re.findall(r"\bCK_PATCH\w*", README)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


CASES = (REPOSITORY / "docs" / "cases.md").read_text(encoding="utf-8")
NOT_CASES = {3, 7, 12, 15, 18, 23, 33, 34, 43, 48, 54, 56, 69, 72, 78, 86, 88, 93, 96, 100}
"""Numbers up to 102 that the list of reported failures leaves out."""


def test_every_case_has_one_row_with_a_test_or_the_reason_why_there_is_none() -> None:
    found: list[int] = []
    for numbers, here in re.findall(r"^\| (\d[\d, to]*) \|.*\| ([^|]+) \|$", CASES, re.MULTILINE):
        assert "`tests/" in here or "No test" in here, numbers
        for part in numbers.split(", "):
            first, _, last = part.partition(" to ")
            found += set(range(int(first), int(last or first) + 1)) - NOT_CASES
    assert sorted(found) == sorted(set(range(1, 103)) - NOT_CASES)


def test_every_test_that_the_page_of_cases_names_exists() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", CASES))
    assert named
    for file, test in named:
        assert (REPOSITORY / file).exists(), file
        if test:
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            assert f"def {test}(" in text, f"{file}::{test}"
