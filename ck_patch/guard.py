"""The guard: whether this host may be patched and whether a slot is what we know; never raises."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from importlib import metadata
from types import FunctionType
from typing import Any

from packaging.version import InvalidVersion, Version

from ck_patch import releases
from ck_patch.breaker import describe
from ck_patch.context import Function
from ck_patch.slots import Slot

_DISTRIBUTION = "comfy-kitchen"
_PACKAGE = "comfy_kitchen"
_TESTED = f"{releases.OLDEST} to {releases.NEWEST}"

# What a broken installation of somebody else can raise at us. KeyboardInterrupt is the user's.
BROKEN = (Exception, SystemExit)


@dataclass(frozen=True)
class Host:
    """The verdict on the installed comfy-kitchen; without a `release` everything stays on stock."""

    version: str | None
    path: str | None
    release: releases.Release | None
    check_first: bool
    reason: str


@dataclass(frozen=True)
class Match:
    """The verdict on one slot; without a `stock` function it stays on stock. `owners` has the
    object that holds the function for each binding of the slot."""

    stock: Function | None
    owners: tuple[object, ...]
    reason: str


def examine_host() -> Host:
    """Look at the installed distribution, the loaded package and what the ops need."""
    path: str | None = None
    version: str | None = None

    def refuse(reason: str) -> Host:
        return Host(version, path, None, False, reason)

    try:
        path = _package_path()
        version, problem = _installed_version(path)
        if version is None:
            return refuse(problem)
        parsed = Version(version)
        release = releases.release_for(parsed)
        if release is None:
            return refuse(f"{_DISTRIBUTION} {version} is older than the tested {_TESTED}")
        missing = _missing_requirement(path)
        if missing is not None:
            return refuse(missing)
    except InvalidVersion:
        return refuse(f"{_DISTRIBUTION} calls its version {version!r}, which is none")
    except BROKEN as error:
        return refuse(f"the installation of {_DISTRIBUTION} cannot be read ({describe(error)})")
    newer = releases.is_newer_than_tested(parsed)
    place = "newer than the tested" if newer else "within the tested"
    return Host(version, path, release, newer, f"{_DISTRIBUTION} {version} is {place} {_TESTED}")


def examine_slot(slot: Slot, release: releases.Release) -> Match:
    """Look at the live function of a slot: present, untouched, and of the signature we know."""

    def refuse(reason: str) -> Match:
        return Match(None, (), reason)

    expected = release.signatures.get(slot.name)
    if expected is None:
        return refuse(f"not known for {_DISTRIBUTION} {release.first} and later")
    owners: list[object] = []
    found: list[Function] = []
    for binding in slot.bindings:
        try:
            owner = binding.find_owner()
            function = getattr(owner, binding.attribute, None)
        except BROKEN as error:
            return refuse(f"{binding} cannot be looked at ({describe(error)})")
        if owner is None or function is None:
            return refuse(f"{binding} is missing")
        if found and function is not found[0]:
            return refuse(f"{binding} is not {slot.bindings[0]}")
        owners.append(owner)
        found.append(function)
    reason = objection(slot, found[0], expected)
    if reason is not None:
        return refuse(f"{slot.bindings[0]} {reason}")
    return Match(found[0], tuple(owners), "its signature is the known one")


def objection(slot: Slot, function: object, expected: str) -> str | None:
    """Why this is not the host's own function with the signature we know; None when it is."""
    try:
        if not callable(function):
            return f"is not a function but {type(function).__name__}"
        if slot.signature == "nanobind":
            # A compiled function wraps nothing.
            own = not hasattr(function, "__wrapped__")
            text = (function.__doc__ or "").partition("\n")[0]
        else:
            # functools.wraps copies the name of the module, but not where the code really lives;
            # wrapt's wrappers pass on even that, and the class, but not to type().
            home = sys.modules[slot.bindings[0].module]
            kind: type = type(function)
            own = kind is FunctionType and getattr(function, "__globals__", None) is vars(home)
            text = str(inspect.signature(function))
        if not own:
            return f"was replaced by another patcher ({name_of(function)})"
        return None if text == expected else f"has another signature than the known one: {text!r}"
    except BROKEN as error:
        return f"cannot be looked at ({describe(error)})"


def name_of(function: Any) -> str:
    """Module and name of a function, or of its class where it has none."""
    try:
        return f"{function.__module__}.{function.__qualname__}"
    except BROKEN:
        return f"{type(function).__module__}.{type(function).__qualname__}"


def _package_path() -> str | None:
    """The folder of the loaded package; None while it is not loaded."""
    module = sys.modules.get(_PACKAGE)
    file = getattr(module, "__file__", None)
    return os.path.dirname(os.path.abspath(file)) if file else None


def _installed_version(path: str | None) -> tuple[str | None, str]:
    """The version of the distribution, or None and why; one beside the loaded package wins.

    An interrupted upgrade leaves two: which of them the code is cannot be told.
    """
    found = [
        (os.path.abspath(str(distribution.locate_file(_PACKAGE))), _version(distribution))
        for distribution in metadata.distributions(name=_DISTRIBUTION)
    ]
    beside = [version for place, version in found if place == path]
    versions = sorted(set(beside or [version for _, version in found]))
    if len(versions) == 1:
        return versions[0], ""
    if versions:
        return None, f"{_DISTRIBUTION} is installed in more than one version: {', '.join(versions)}"
    if path is None:
        return None, f"{_DISTRIBUTION} is not installed"
    return None, f"{_PACKAGE} is loaded but has no distribution metadata, so no version"


def _version(distribution: metadata.Distribution) -> str:
    # Asking for a header that is missing gives None, a warning or KeyError, by Python version; and
    # get() is promised from 3.12 on only.
    headers = distribution.metadata
    if "Version" not in headers:
        return ""
    return headers["Version"]


def _missing_requirement(path: str | None) -> str | None:
    """The first thing that the ops cannot do without, or None."""
    if path is None:
        return f"{_PACKAGE} has not been imported"
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not loaded"
    if getattr(getattr(torch, "version", None), "hip", None):
        return "torch is built for ROCm"
    return _wrapt_problem() or _triton_problem()


def _wrapt_problem() -> str | None:
    try:
        import wrapt

        usable = isinstance(getattr(wrapt, "FunctionWrapper", None), type)
        return None if usable else "wrapt has no usable FunctionWrapper"
    except BROKEN as error:
        return f"wrapt cannot be used ({describe(error)})"


def _triton_problem() -> str | None:
    # Only looked for: importing it is slow, and the op does so when it first needs a kernel.
    try:
        if sys.modules.get("triton") or importlib.util.find_spec("triton"):
            return None
        return "triton is not installed"
    except BROKEN as error:
        return f"triton cannot be looked for ({describe(error)})"
