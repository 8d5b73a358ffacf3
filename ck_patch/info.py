"""What is installed here, what is patched or why not, and which route each GPU gets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ck_patch
from ck_patch import activation, notices, preview, route, settings, table
from ck_patch.activation import Activation
from ck_patch.breaker import describe
from ck_patch.device import DeviceProfile
from ck_patch.preview import Choice
from ck_patch.slots import SLOTS
from ck_patch.stock_paths import stock_path
from ck_patch.table import Table
from ck_patch.tune import unused

# What a broken installation can raise at an import. KeyboardInterrupt is the user's.
_BROKEN = (Exception, SystemExit)

# Modules, in the order of import, and the distributions that may have brought them.
_PACKAGES = (
    ("torch", ("torch",)),
    ("triton", ("triton", "triton-windows")),
    ("wrapt", ("wrapt",)),
    ("packaging", ("packaging",)),
    ("comfy_kitchen", ("comfy-kitchen",)),
)


@dataclass(frozen=True)
class Package:
    """One package; `problem` says why it cannot be imported."""

    name: str
    version: str | None
    path: str | None
    problem: str | None


@dataclass(frozen=True)
class Backend:
    """One backend of comfy_kitchen; `problem` says why it is not used."""

    name: str
    problem: str | None


@dataclass(frozen=True)
class Variable:
    """One environment variable; `given` is None where it is not set."""

    name: str
    given: str | None
    default: str


@dataclass(frozen=True)
class Slot:
    """One entry of comfy_kitchen: patched, stock or covered, and why."""

    name: str
    state: str
    reason: str


@dataclass(frozen=True)
class BackendPath:
    """The path that the INT8 linears of one backend take on a device, and what stock would do."""

    backend: str
    path: str
    reason: str
    advice: str
    stock: str


@dataclass(frozen=True)
class Tuned:
    """The tuning table of a device here: its file, which need not exist, None without a home; how
    many choices are in it; why they are not used, and why new ones cannot be kept, if so."""

    path: str | None
    entries: int
    unused: str | None
    unkept: str | None


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU as -1 where that is taken for one; `problem` says why it could not be
    asked. `routes` are those of the linears of the backend named `routes_of`; `tuned` is None on
    the CPU, where nothing is measured."""

    index: int
    name: str | None
    architecture: str | None
    sm_count: int | None
    shared_memory: int | None
    problem: str | None
    paths: tuple[BackendPath, ...] = ()
    routes_of: str | None = None
    routes: tuple[Choice, ...] = ()
    tuned: Tuned | None = None


@dataclass(frozen=True)
class Report:
    """All that `info` knows; `dataclasses.asdict` of it is fit for JSON.

    `enabled_by` says who patched this process: "start-up", or "info" where nothing did at start,
    so that the slots still show what `ck_patch.enable()` would do.
    """

    version: str
    path: str
    executable: str
    python: str
    platform: str
    site: str
    start_up: Activation
    packages: tuple[Package, ...]
    backends: tuple[Backend, ...]
    host: str
    tested: tuple[str, str] | None
    settings: tuple[Variable, ...]
    enabled_by: str
    slots: tuple[Slot, ...]
    breakers: tuple[str, ...]
    devices: tuple[Device, ...]
    no_devices: str | None
    notes: tuple[str, ...]


def run(as_json: bool) -> int:
    """Print the report; 0, whatever is broken here."""
    with _quiet_stdout():
        report = gather()
    if as_json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        from ck_patch import report as text

        text.show(report)
    return 0


def gather() -> Report:
    """Look at everything. Imports torch, triton and comfy_kitchen, and initializes CUDA."""
    # First of all: the imports below may load what start-up would have loaded.
    start_up = activation.examine()
    packages = tuple(_package(*entry) for entry in _PACKAGES)
    if not start_up.active:
        with contextlib.suppress(*_BROKEN):
            ck_patch.enable()
    host, tested, slots, breakers = _patches()
    devices, no_devices = _devices()
    return Report(
        version=ck_patch.__version__,
        path=str(Path(ck_patch.__file__).parent),
        executable=sys.executable,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=platform.platform(),
        site=sysconfig.get_path("purelib"),
        start_up=start_up,
        packages=packages,
        backends=_backends(),
        host=host,
        tested=tested,
        settings=tuple(
            Variable(variable.name, os.environ.get(variable.name), variable.default)
            for variable in settings.VARIABLES
        ),
        enabled_by="start-up" if start_up.active else "info",
        slots=slots,
        breakers=breakers,
        devices=devices,
        no_devices=no_devices,
        notes=tuple(_notes(packages)),
    )


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Whatever a foreign import prints goes to stderr: stdout is for the report alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _package(name: str, distributions: tuple[str, ...]) -> Package:
    version = None
    for distribution in distributions:
        with contextlib.suppress(*_BROKEN):
            version = version or metadata.version(distribution)
    try:
        module = importlib.import_module(name)
    except _BROKEN as error:
        return Package(name, version, None, describe(error))
    own = getattr(module, "__version__", None)
    file = getattr(module, "__file__", None)
    return Package(
        name,
        own if isinstance(own, str) else version,
        str(Path(file).parent) if isinstance(file, str) else None,
        # A folder without __init__.py, left by a broken upgrade for instance, imports as well.
        None if file else "is an empty package",
    )


def _backends() -> tuple[Backend, ...]:
    """The backends of comfy_kitchen as it lists them; none where it does not."""
    host: Any = sys.modules.get("comfy_kitchen")
    try:
        listed = sorted(host.list_backends().items())
        return tuple(Backend(name, _backend_problem(entry)) for name, entry in listed)
    except _BROKEN:
        return ()


def _backend_problem(entry: dict[str, Any]) -> str | None:
    if entry["disabled"]:
        return "disabled"
    return None if entry["available"] else str(entry["unavailable_reason"] or "not available")


def _patches() -> tuple[str, tuple[str, str] | None, tuple[Slot, ...], tuple[str, ...]]:
    """Verdict on the host, tested range, slots and open breakers."""
    try:
        status: Any = ck_patch.status()
    except _BROKEN as error:
        return f"the patcher cannot be loaded ({describe(error)})", None, (), ()
    return (
        status.host_reason,
        status.tested,
        tuple(Slot(slot.name, slot.state, slot.reason) for slot in status.slots),
        tuple(f"{b.operation} on device {b.device}: {b.reason}" for b in status.breakers),
    )


def _devices() -> tuple[tuple[Device, ...], str | None]:
    """The GPUs, or none and why; without any, the CPU where it is to be taken for one."""
    devices, problem = _gpus()
    if not devices and settings.load().assumed(-1) is not None:
        devices = (_device(-1),)
    return devices, problem


def _gpus() -> tuple[tuple[Device, ...], str | None]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return (), "torch cannot be imported"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count:
            return tuple(_device(index) for index in range(count)), None
        if getattr(torch.version, "cuda", None) is None:
            return (), "torch was built without CUDA"
        said = [str(warning.message).splitlines()[0] for warning in caught]
        return (), said[0] if said else "CUDA finds no device"
    except _BROKEN as error:
        return (), f"CUDA cannot be used ({describe(error)})"


def _device(index: int) -> Device:
    try:
        from ck_patch.device import profile

        wanted = settings.load()
        found = profile(index, wanted.assumed(index))
        known = table.for_device(found, wanted.cache_dir) if index >= 0 else None
        backend: route.Backend = "eager" if notices.cuda_backend_obstacle() else "cuda"
        return Device(
            index,
            found.name,
            found.architecture,
            found.sm_count,
            found.shared_memory,
            None,
            tuple(_backend_path(found, wanted.int8, name) for name in route.BACKENDS),
            backend,
            _routes(found, wanted, backend, known),
            None if known is None else _tuned(known, wanted),
        )
    except _BROKEN as error:
        return Device(index, None, None, None, None, describe(error))


def _backend_path(gpu: DeviceProfile, int8: str, backend: route.Backend) -> BackendPath:
    found = route.device_path(gpu, int8, backend)
    stock = stock_path(backend, "int8_linear", gpu.capability)
    return BackendPath(backend, found.path, found.reason, found.advice, stock)


def _routes(
    gpu: DeviceProfile, wanted: settings.Settings, backend: route.Backend, known: Table | None
) -> tuple[Choice, ...]:
    used = {} if known is None or unused.reason(wanted) else known.entries()
    return preview.choices(gpu, wanted.int8, backend=backend, force=wanted.force, measured=used)


def _tuned(known: Table, wanted: settings.Settings) -> Tuned:
    fault = known.unreadable()
    return Tuned(
        None if known.path is None else str(known.path),
        len(known.entries()),
        unused.reason(wanted) or (fault and f"the file {fault}"),
        known.unwritable(),
    )


def _notes(packages: tuple[Package, ...]) -> Iterator[str]:
    """What is likely to explain a surprise."""
    wanted = settings.load()
    yield from wanted.problems
    slots = [slot.name for slot in SLOTS]
    for name in wanted.slots or ():
        if name not in slots:
            yield f"{settings.SLOTS.name} names {name!r}, which is no slot"
    known = {variable.name for variable in settings.VARIABLES}
    for name in sorted(os.environ):
        if name.startswith("CK_PATCH") and name not in known:
            yield f"{name} is no variable of ck_patch"
    environment = os.environ.get("VIRTUAL_ENV")
    if environment and Path(environment).resolve() != Path(sys.prefix).resolve():
        yield f"the virtual environment {environment} is active, but this is {sys.prefix}"
    if any(package.name == "comfy_kitchen" and package.problem for package in packages):
        yield (
            "comfy_kitchen cannot be imported here: run this with the Python that starts ComfyUI, "
            "in its folder for the portable build: python_embeded\\python.exe -s -m ck_patch info"
        )
    if wanted.force is not None:
        yield (
            f"{settings.FORCE.name}={wanted.force} is set: every INT8 GEMM runs by that where it "
            "can, else by stock, and nothing is measured"
        )
    if wanted.assume:
        yield (
            f"{settings.ASSUME.name} is set: devices are taken for the GPUs shown, which is for "
            "tests and support"
        )
    obstacle = notices.cuda_backend_obstacle()
    if obstacle:
        yield f"{obstacle}, and uses the eager backend, which is patched as well"
