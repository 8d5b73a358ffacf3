"""The ledger: what is put where, who else may sit there, and the way back, by identity."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ck_patch import _import_hook, guard
from ck_patch.patcher import Patcher

from .conftest import COMPUTE, LINEAR, FakeHost
from .probe_op import Probe


def states(subject: Patcher) -> dict[str, str]:
    return {slot.name: slot.state for slot in subject.status().slots}


def reasons(subject: Patcher) -> dict[str, str]:
    return {slot.name: slot.reason for slot in subject.status().slots}


def cover(host: FakeHost) -> Any:
    """What another patcher does: wrap whatever is there."""
    below = host.extension.compute

    @functools.wraps(below)
    def on_top(a: int) -> bool:
        return bool(below(a))

    host.extension.compute = on_top
    return on_top


def in_threads(work: Callable[[], None], count: int = 8) -> None:
    """Run `work` in that many threads that start together; what one raises fails the test."""
    together = threading.Barrier(count)

    def one() -> None:
        together.wait()
        work()

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(one) for _ in range(count)]:
            future.result()


def test_nothing_is_patched_before_enable(host: FakeHost, both: Patcher) -> None:
    assert states(both) == {"compute": "stock", "linear": "stock"}
    assert reasons(both)["compute"] == "not enabled yet"
    assert host.extension.compute is host.compute


def test_enable_installs_at_every_binding_and_disable_puts_stock_back(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    compute, linear = probes
    assert host.extension.compute is compute.function
    assert host.module.linear is host.other.linear is linear.function
    assert host.extension.untouched is host.untouched
    assert states(both) == {"compute": "patched", "linear": "patched"}
    assert host.module._C.compute(3) is True
    assert compute.calls == 1

    both.disable()
    assert host.extension.compute is host.compute
    assert host.module.linear is host.other.linear is host.linear
    assert states(both) == {"compute": "stock", "linear": "stock"}
    assert reasons(both)["compute"] == "disabled by ck_patch.disable()"


def test_three_times_enabled_is_undone_by_one_disable(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    for _ in range(3):
        both.enable()
    assert len(probes) == 2
    both.disable()
    both.disable()
    assert host.extension.compute is host.compute


def test_a_reference_kept_across_disable_passes_calls_to_stock(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    kept = host.extension.compute
    both.disable()
    assert kept(3) is True
    assert not probes[0].active
    assert probes[0].calls == 0


def test_the_op_is_built_with_settings_breaker_and_release(
    host: FakeHost, both: Patcher, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CK_PATCH_INT8", "triton")
    both.enable()
    context = probes[0].context
    assert context.settings.int8 == "triton"
    assert context.release.bias_dtype == "output"
    assert context.check_first is False
    assert probes[1].context.breaker is context.breaker
    context.breaker.open("compute", 0, "it broke")
    assert [opened.reason for opened in both.status().breakers] == ["it broke"]


def test_changed_settings_take_effect_at_the_next_enable(
    host: FakeHost, both: Patcher, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    both.enable()
    monkeypatch.setenv("CK_PATCH_INT8", "stock")
    assert both.status().settings.int8 == "auto"
    both.enable()
    assert both.status().settings.int8 == "stock"
    assert [probe.context.settings.int8 for probe in probes] == ["auto", "auto", "stock", "stock"]
    assert [probe.active for probe in probes] == [False, False, True, True]
    assert host.extension.compute is probes[2].function
    both.disable()
    assert host.extension.compute is host.compute


def test_breakers_are_closed_by_disable_and_enable(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    probes[0].context.breaker.open("compute", 0, "it broke")
    both.disable()
    both.enable()
    assert both.status().breakers == ()
    assert probes[2].context.breaker.reason("compute", 0) is None


def test_a_newer_release_is_passed_on_as_check_first(
    host: FakeHost, both: Patcher, probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = dataclasses.replace(guard.examine_host(), check_first=True)
    monkeypatch.setattr(guard, "examine_host", lambda: newer)
    both.enable()
    assert probes[0].context.check_first
    assert both.status().check_first


@pytest.mark.parametrize("word", ["0", "false", "OFF", " no "])
def test_the_kill_switch_wins_over_an_explicit_enable(
    host: FakeHost, both: Patcher, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv("CK_PATCH", word)
    both.enable()
    assert host.extension.compute is host.compute
    assert reasons(both) == {"compute": "CK_PATCH=0", "linear": "CK_PATCH=0"}


def test_the_kill_switch_set_at_run_time_puts_stock_back_at_the_next_enable(
    host: FakeHost, both: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    both.enable()
    monkeypatch.setenv("CK_PATCH", "0")
    both.enable()
    assert host.extension.compute is host.compute
    assert host.other.linear is host.linear


def test_only_the_named_slots_are_patched(
    host: FakeHost,
    both: Patcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CK_PATCH_SLOTS", "linear, attention")
    both.enable()
    assert states(both) == {"compute": "stock", "linear": "patched"}
    assert reasons(both)["compute"] == "not in CK_PATCH_SLOTS"
    assert "names 'attention', which is no slot; there are: compute, linear" in caplog.text


def test_another_patcher_on_top_stays_and_is_named(
    host: FakeHost, both: Patcher, probes: list[Probe], caplog: pytest.LogCaptureFixture
) -> None:
    both.enable()
    on_top = cover(host)
    assert states(both)["compute"] == "covered"
    assert "sits on top of ours" in reasons(both)["compute"]
    both.enable()
    assert host.extension.compute is on_top
    assert [probe.active for probe in probes] == [True, True]

    both.disable()
    assert host.extension.compute is on_top
    assert not probes[0].active
    assert states(both) == {"compute": "covered", "linear": "stock"}
    assert "which passes every call to stock" in reasons(both)["compute"]
    assert "compute cannot be taken out" in caplog.text
    assert on_top(3) is True


def test_a_slot_that_stays_covered_is_left_alone_by_enable(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    on_top = cover(host)
    both.disable()
    both.enable()
    assert host.extension.compute is on_top
    assert states(both) == {"compute": "covered", "linear": "patched"}
    assert not probes[0].active


def test_once_the_other_patcher_has_left_the_slot_can_be_emptied_or_patched_again(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    ours = host.extension.compute
    cover(host)
    both.disable()
    host.extension.compute = ours
    assert states(both)["compute"] == "stock"
    assert "disable() takes it out" in reasons(both)["compute"]
    both.enable()
    assert host.extension.compute is not ours
    assert states(both)["compute"] == "patched"
    both.disable()
    assert host.extension.compute is host.compute


def test_a_patcher_that_was_there_first_keeps_its_place(host: FakeHost, both: Patcher) -> None:
    first = cover(host)
    both.enable()
    assert host.extension.compute is first
    assert states(both) == {"compute": "stock", "linear": "patched"}
    assert "was replaced by another patcher" in reasons(both)["compute"]


def test_a_patcher_that_hides_the_signature_keeps_its_place(host: FakeHost, both: Patcher) -> None:
    def first(*args: Any) -> bool:
        return True

    host.extension.compute = first
    both.enable()
    assert host.extension.compute is first
    assert "has another signature" in reasons(both)["compute"]


def test_a_proxy_around_the_extension_does_not_hide_what_is_patched(
    host: FakeHost, both: Patcher
) -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            return getattr(host.extension, name)

    both.enable()
    host.module._C = Proxy()
    assert states(both)["compute"] == "patched"
    both.disable()
    assert host.extension.compute is host.compute


def test_what_raises_when_looked_at_hinders_neither_status_nor_disable(
    host: FakeHost, both: Patcher
) -> None:
    class Raises:
        def __getattribute__(self, name: str) -> Any:
            raise SystemExit(name)

    both.enable()
    host.extension.compute = on_top = Raises()
    host.module._C = Raises()
    assert states(both)["linear"] == "patched"
    assert "cannot be looked at (SystemExit: compute)" in reasons(both)["compute"]
    host.module._C = host.extension
    assert states(both)["compute"] == "covered"
    both.disable()
    assert host.extension.compute is on_top
    assert host.module.linear is host.linear


def test_a_reload_of_the_host_shows_and_enable_patches_again(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    both.enable()
    before, original = host.extension, host.compute
    host.reload()
    assert states(both) == {"compute": "stock", "linear": "stock"}
    assert "enable() patches it" in reasons(both)["compute"]
    both.enable()
    assert states(both) == {"compute": "patched", "linear": "patched"}
    assert before.compute is original
    both.disable()
    assert host.extension.compute is host.compute
    assert host.other.linear is host.linear


def test_stock_put_back_by_somebody_else_shows_and_stays_after_disable(
    host: FakeHost, both: Patcher
) -> None:
    both.enable()
    host.extension.compute = host.compute
    assert states(both)["compute"] == "stock"
    both.disable()
    assert host.extension.compute is host.compute


def test_an_entry_that_somebody_deleted_is_not_invented_again(
    host: FakeHost, both: Patcher
) -> None:
    both.enable()
    del host.extension.compute
    both.disable()
    assert not hasattr(host.extension, "compute")


def test_a_binding_that_cannot_be_set_leaves_the_whole_slot_on_stock(
    host: FakeHost, both: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sealed(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError("read only")

    sealed = Sealed(linear=host.linear)
    monkeypatch.setitem(sys.modules, "host.other", sealed)
    both.enable()
    assert host.module.linear is host.linear
    assert states(both) == {"compute": "patched", "linear": "stock"}
    assert "read only" in reasons(both)["linear"]


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_such_module:build", "No module named 'no_such_module'"),
        (f"{__package__}.probe_op:missing", "has no attribute 'missing'"),
        (f"{__package__}.probe_op:not_callable", "not callable"),
        (f"{__package__}.probe_op:build_nothing", "PY_SSIZE_T_CLEAN"),
    ],
)
def test_a_broken_op_leaves_its_slot_on_stock_and_the_others_patched(
    host: FakeHost, probes: list[Probe], factory: str, reason: str
) -> None:
    broken = Patcher((dataclasses.replace(COMPUTE, factory=factory), LINEAR))
    broken.enable()
    assert host.extension.compute is host.compute
    assert states(broken) == {"compute": "stock", "linear": "patched"}
    assert reason in reasons(broken)["compute"]


def test_keyboard_interrupt_while_patching_passes_and_leaves_stock(
    host: FakeHost, both: Patcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(SimpleNamespace):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if value is not host.compute:
                raise KeyboardInterrupt

    host.module._C = Interrupted()
    host.module._C.__dict__["compute"] = host.compute
    with pytest.raises(KeyboardInterrupt):
        both.enable()
    assert host.module._C.compute is host.compute


def test_enable_and_disable_from_many_threads_end_in_stock(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    def toggle() -> None:
        for _ in range(50):
            both.enable()
            assert host.module._C.compute(3) is True
            both.status()
            both.disable()

    in_threads(toggle)
    assert host.extension.compute is host.compute
    assert host.module.linear is host.other.linear is host.linear
    assert not any(probe.active for probe in probes)


def test_threads_that_enable_at_once_build_one_op(
    host: FakeHost, both: Patcher, probes: list[Probe]
) -> None:
    in_threads(both.enable)
    assert len(probes) == 2


def test_status_is_fit_for_json(host: FakeHost, both: Patcher) -> None:
    both.enable()
    cover(host)
    report = json.loads(json.dumps(dataclasses.asdict(both.status())))
    assert report["host_version"] == "1.0"
    assert report["slots"][0]["bindings"] == ["host._C.compute"]
    assert report["slots"][0]["state"] == "covered"
    assert report["slots"][1]["bindings"] == ["host.linear", "host.other.linear"]
    assert report["settings"]["int8"] == "auto"


def test_each_outcome_is_logged_once(
    host: FakeHost, both: Patcher, caplog: pytest.LogCaptureFixture
) -> None:
    del host.module.linear
    with caplog.at_level(logging.INFO):
        both.enable()
        both.enable()
    assert caplog.messages == [
        "patched: compute (known)",
        "linear stays on stock: host.linear is missing",
    ]


def test_all_that_is_patched_is_in_one_line(
    host: FakeHost, both: Patcher, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        both.enable()
        both.enable()
    assert caplog.messages == ["patched: compute, linear (known)"]


NOT_IMPORTED = "comfy_kitchen has not been imported: call ck_patch.enable() again after it"


@pytest.mark.parametrize(
    ("waiting", "kill", "lines"),
    [
        (False, "1", [NOT_IMPORTED]),
        (True, "1", []),
        (False, "0", []),
    ],
    ids=["nobody waits", "a finder of ours waits", "switched off"],
)
def test_enable_before_the_host_says_so_unless_a_finder_waits(
    host: FakeHost,
    both: Patcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waiting: bool,
    kill: str,
    lines: list[str],
) -> None:
    absent = guard.Host("1.0", None, None, check_first=False, reason="not imported")
    monkeypatch.setattr(guard, "examine_host", lambda: absent)
    others = [f for f in sys.meta_path if type(f).__module__ != _import_hook.__name__]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setenv("CK_PATCH", kill)
    if waiting:
        _import_hook.call_after_import("host_to_come", both.enable)
    with caplog.at_level(logging.INFO):
        both.enable()
        both.enable()
    assert caplog.messages == lines
    assert reasons(both)["compute"] == ("CK_PATCH=0" if kill == "0" else "not imported")


def test_a_bad_value_warns_once_and_means_the_default(
    host: FakeHost,
    both: Patcher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CK_PATCH", "maybe")
    both.enable()
    both.enable()
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        "CK_PATCH='maybe' is neither 0 nor 1; it means 1"
    ]
    assert states(both)["compute"] == "patched"
