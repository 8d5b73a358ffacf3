"""The report of `info` as plain text."""

from __future__ import annotations

from collections.abc import Iterable

from ck_patch import preview, tables
from ck_patch.info import BackendPath, Device, Package, Report, Tuned, Variable

Lines = Iterable[tuple[str, str]]


def show(report: Report) -> None:
    """Print the report in sections."""
    _section(f"ck_patch {report.version}", _place(report))
    _section("Packages", [(package.name, _package(package)) for package in report.packages])
    _section("comfy_kitchen", [("release", report.host), *_backends(report)])
    if report.enabled_by == "start-up":
        title = "Slots"
    else:
        title = "Slots, after ck_patch.enable() by this command alone"
    slots = [(slot.name, f"{slot.state}: {slot.reason}") for slot in report.slots]
    _section(title, [*slots, *(("gone back to stock", text) for text in report.breakers)])
    _section("Settings", [(variable.name, _value(variable)) for variable in report.settings])
    _section("Devices", [("none", report.no_devices)] if report.no_devices else [])
    for device in report.devices:
        _device(device)
    _section("Notes", [("-", note) for note in report.notes])


def _section(title: str, lines: Lines) -> None:
    lines = list(lines)
    if not lines:
        return
    width = max(len(name) for name, _ in lines)
    print(f"\n{title}")
    for name, text in lines:
        print(f"  {name.ljust(width)}  {text}")


def _place(report: Report) -> Lines:
    start_up = report.start_up
    yield "start-up", f"{'active' if start_up.active else 'not active'}: {start_up.reason}"
    for file in start_up.files:
        yield "start file", file
    yield "package", report.path
    yield "site-packages", report.site
    yield "interpreter", f"{report.executable} ({report.python})"
    yield "platform", report.platform


def _package(package: Package) -> str:
    if package.version is None and package.problem and "ModuleNotFound" in package.problem:
        return "not installed"
    parts = [package.version or "version unknown", package.path or ""]
    if package.problem:
        parts.append(f"cannot be imported ({package.problem})")
    return "  ".join(filter(None, parts))


def _backends(report: Report) -> Lines:
    for backend in report.backends:
        yield f"backend {backend.name}", backend.problem or "available"


def _value(variable: Variable) -> str:
    if variable.given is None:
        return f"not set, so {variable.default or 'the default'}"
    return variable.given or "empty, so the default"


def _device(device: Device) -> None:
    name = f"GPU {device.index}" if device.index >= 0 else "CPU"
    if device.problem:
        _section("Devices", [(name, device.problem)])
        return
    title = (
        f"{name}: {device.name}, {device.architecture}, {device.sm_count} SMs, "
        f"{(device.shared_memory or 0) // 1024} KiB of shared memory per block"
    )
    lines = [(path.backend, _path(path)) for path in device.paths]
    if device.tuned is not None:
        lines.append(("tuned", _tuned(device.tuned)))
    _section(title, lines)
    tables.show(
        f"{name}: GEMMs of the {device.routes_of} backend",
        ("M x N x K", "route", "reason"),
        preview.grouped(device.routes),
    )


def _tuned(tuned: Tuned) -> str:
    choices = "1 choice" if tuned.entries == 1 else f"{tuned.entries} choices"
    unused = f"; not used: {tuned.unused}" if tuned.unused else ""
    unkept = f"; new ones cannot be kept: {tuned.unkept}" if tuned.unkept else ""
    return f"{choices} in {tuned.path or 'no file'}{unused}{unkept}"


def _path(path: BackendPath) -> str:
    advice = f"; faster: {path.advice}" if path.advice else ""
    return f"{path.path}: {path.reason}{advice}"
