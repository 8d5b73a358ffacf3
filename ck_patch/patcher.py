"""The patcher: installs the ops in the slots of the host, keeps the ledger, takes them out again.

The only module that calls `setattr` on foreign objects.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import ck_patch
from ck_patch import _import_hook, guard, log, releases, settings, table
from ck_patch.breaker import Breaker, OpenBreaker, describe
from ck_patch.context import Factory, Function, Op, OpContext, Refused
from ck_patch.forks import ForkSafe
from ck_patch.slots import SLOTS, Binding, Slot
from ck_patch.tuner import Tuner

State = Literal["patched", "stock", "covered"]


@dataclass(frozen=True)
class SlotStatus:
    """What a slot is now: `patched`, `stock`, or `covered` by another patcher on top of ours."""

    name: str
    bindings: tuple[str, ...]
    state: State
    reason: str


@dataclass(frozen=True)
class Status:
    """Everything the patcher knows; `dataclasses.asdict` of it is fit for JSON."""

    version: str
    settings: settings.Settings
    host_version: str | None
    host_path: str | None
    host_reason: str
    tested: tuple[str, str]
    check_first: bool
    slots: tuple[SlotStatus, ...]
    breakers: tuple[OpenBreaker, ...]


@dataclass(frozen=True)
class _Entry:
    """One line of the ledger: what was put where, in place of what."""

    binding: Binding
    owner: object
    original: Function
    ours: Function


@dataclass(frozen=True)
class _Plan:
    """What a slot is to be patched with."""

    factory: Factory
    settings: settings.Settings
    release: releases.Release
    check_first: bool


@dataclass(frozen=True)
class _Patch:
    """One patched slot. It is kept inactive when another patcher held on to a part of it."""

    slot: Slot
    plan: _Plan
    replacement: Op
    entries: tuple[_Entry, ...]
    reason: str
    active: bool = True

    def is_covered_by(self, entry: _Entry, live: object) -> bool:
        """Whether another patcher put `live` where ours was; else it is the host's own."""
        if live is None or live is entry.ours or live is entry.original:
            return False
        signature = self.plan.release.signatures[self.slot.name]
        return guard.objection(self.slot, live, signature) is not None


class Patcher(ForkSafe):
    """Brings the slots of this process in line with the settings and back to stock."""

    def __init__(self, slots: Sequence[Slot] = SLOTS) -> None:
        super().__init__()
        self._slots = slots
        self._breaker = Breaker()
        self._tuners: dict[tuple[str, str | None], Tuner] = {}
        self._wanted: settings.Settings | None = None
        self._patches: dict[str, _Patch] = {}
        self._refusals: dict[str, str] = {}

    def _start(self) -> None:
        # A handler of log lines may ask for the status.
        self._lock = threading.RLock()

    def enable(self) -> None:
        """Patch every slot that the settings want and the guard allows; never raises.

        The settings are read anew, and the environment wins over the call: with CK_PATCH=0, or for
        a slot that CK_PATCH_SLOTS leaves out, this puts stock back. Called again it changes nothing
        that is already as it should be; it patches anew what a reload of the host undid.
        """
        wanted = settings.load()
        log.configure(wanted.log)
        for problem in (*wanted.problems, *self._unknown_slots(wanted)):
            log.warn(problem, problem)
        # Importing happens outside the lock: another thread may hold the host's import lock and
        # wait for ours.
        host = guard.examine_host()
        plans = [(slot, _plan(slot, wanted, host)) for slot in self._slots]
        with self._lock:
            self._wanted = wanted
            for slot, plan in plans:
                try:
                    refusal = self._converge(slot, plan)
                except Refused as error:
                    refusal = str(error)
                except guard.BROKEN as error:
                    refusal = f"patching failed ({describe(error)})"
                self._refusals[slot.name] = refusal
            for line in self._outcome(wanted, host):
                log.once(line, line)

    def disable(self) -> None:
        """Put stock back wherever ours is still in place, by identity.

        Where another patcher sits on top, it stays and ours passes every call to stock. Breakers
        are forgotten: enabling again is a fresh try.
        """
        with self._lock:
            for slot in self._slots:
                self._take_out(slot)
                self._refusals[slot.name] = "disabled by ck_patch.disable()"
            self._breaker = Breaker()
            self._tuners.clear()

    def status(self) -> Status:
        """Report from live identity, not from what was once done."""
        host = guard.examine_host()
        with self._lock:
            return Status(
                version=ck_patch.__version__,
                settings=self._wanted or settings.load(),
                host_version=host.version,
                host_path=host.path,
                host_reason=host.reason,
                tested=(releases.OLDEST, releases.NEWEST),
                check_first=host.check_first,
                slots=tuple(
                    SlotStatus(slot.name, tuple(map(str, slot.bindings)), *self._state(slot))
                    for slot in self._slots
                ),
                breakers=self._breaker.snapshot(),
            )

    def _unknown_slots(self, wanted: settings.Settings) -> list[str]:
        known = [slot.name for slot in self._slots]
        return [
            f"{settings.SLOTS.name} names {name!r}, which is no slot; there are: {', '.join(known)}"
            for name in wanted.slots or ()
            if name not in known
        ]

    def _outcome(self, wanted: settings.Settings, host: guard.Host) -> Iterator[str]:
        """What enable() came to: one line for all that is patched, one for each that is not."""
        names = [slot.name for slot in self._slots if wanted.wants(slot.name)]
        if host.path is None:
            if names and not _import_hook.is_waiting():
                yield "comfy_kitchen has not been imported: call ck_patch.enable() again after it"
            return
        patched = [name for name in names if not self._refusals[name]]
        if patched:
            yield f"patched: {', '.join(patched)} ({host.reason})"
        for name in names:
            if self._refusals[name]:
                yield f"{name} stays on stock: {self._refusals[name]}"

    def _converge(self, slot: Slot, plan: _Plan | str) -> str:
        """Bring one slot in line; the reason why it stays on stock, or an empty text."""
        if isinstance(plan, str):
            self._take_out(slot)
            return plan
        patch = self._patches.get(slot.name)
        if patch is not None and patch.active:
            state, _ = self._state(slot)
            if state == "covered" or (state == "patched" and patch.plan == plan):
                return ""
        self._take_out(slot)
        return self._install(slot, plan)

    def _install(self, slot: Slot, plan: _Plan) -> str:
        match = guard.examine_slot(slot, plan.release)
        if match.stock is None:
            return match.reason
        context = OpContext(
            plan.settings,
            self._breaker,
            plan.release,
            plan.check_first,
            self._tuner(plan.settings.tune, plan.settings.cache_dir),
        )
        replacement = plan.factory(match.stock, context)
        ours = replacement.function
        entries = tuple(
            _Entry(binding, owner, match.stock, ours)
            for binding, owner in zip(slot.bindings, match.owners, strict=True)
        )
        # The ledger comes first: whatever interrupts the next lines, it knows what to put back.
        self._patches[slot.name] = _Patch(slot, plan, replacement, entries, match.reason)
        try:
            for entry in entries:
                setattr(entry.owner, entry.binding.attribute, ours)
        except BaseException:
            self._take_out(slot)
            raise
        return ""

    def _tuner(self, mode: str, cache_dir: str | None) -> Tuner:
        """The one that all slots of these settings share."""
        found = self._tuners.get((mode, cache_dir))
        if found is None:
            found = Tuner(mode, partial(table.for_device, configured=cache_dir))
            self._tuners[mode, cache_dir] = found
        return found

    def _take_out(self, slot: Slot) -> None:
        """Put stock back where ours is; keep what is covered in the ledger, inactive."""
        patch = self._patches.pop(slot.name, None)
        if patch is None:
            return
        covered = []
        for entry in patch.entries:
            live = getattr(entry.owner, entry.binding.attribute, None)
            if live is entry.ours:
                setattr(entry.owner, entry.binding.attribute, entry.original)
            elif patch.is_covered_by(entry, live):
                covered.append(entry)
        patch.replacement.deactivate()
        if covered:
            self._patches[slot.name] = replace(patch, entries=tuple(covered), active=False)
        for entry in covered:
            _, reason = self._state(slot)
            log.warn(f"covered {entry.binding}", f"{slot.name} cannot be taken out: {reason}")

    def _state(self, slot: Slot) -> tuple[State, str]:
        patch = self._patches.get(slot.name)
        if patch is None:
            return "stock", self._refusals.get(slot.name, "not enabled yet")
        passing = "" if patch.active else ", which passes every call to stock"
        for entry in patch.entries:
            try:
                owner = entry.binding.find_owner()
                live = getattr(owner, entry.binding.attribute, None)
            except guard.BROKEN as error:
                return "stock", f"{entry.binding} cannot be looked at ({describe(error)})"
            if live is entry.ours:
                continue
            if owner is entry.owner and patch.is_covered_by(entry, live):
                return "covered", f"{guard.name_of(live)} sits on top of ours{passing}"
            return "stock", f"{entry.binding} was reloaded or put back; enable() patches it"
        if patch.active:
            return "patched", patch.reason
        return "stock", f"ours is still in place{passing}; disable() takes it out"


def _plan(slot: Slot, wanted: settings.Settings, host: guard.Host) -> _Plan | str:
    """What to patch the slot with, or the reason why it stays on stock."""
    if not wanted.enabled:
        return f"{settings.ENABLED.name}=0"
    if not wanted.wants(slot.name):
        return f"not in {settings.SLOTS.name}"
    if host.release is None:
        return host.reason
    module, _, name = slot.factory.partition(":")
    try:
        factory: Factory = getattr(importlib.import_module(module), name)
    except guard.BROKEN as error:
        return f"its op cannot be loaded ({describe(error)})"
    return _Plan(factory, wanted, host.release, host.check_first)


# Kept over a reload of this module: what is in place could not be taken out without the ledger.
_PATCHER: Patcher = globals().get("_PATCHER") or Patcher()
enable = _PATCHER.enable
disable = _PATCHER.disable
status = _PATCHER.status
