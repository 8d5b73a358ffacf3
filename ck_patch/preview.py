"""Which route a device would take for a handful of model shapes; needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ck_patch import candidates, route
from ck_patch.candidates import STOCK, Candidate, Candidates
from ck_patch.device import DeviceProfile
from ck_patch.route import Backend, GemmCall
from ck_patch.shapes import Shape
from ck_patch.table_file import Entry

SHAPES: tuple[tuple[str, Shape], ...] = (
    ("MiniMax H3", (37296, 21504, 5376)),
    ("MiniMax H3", (37296, 5376, 14336)),
    ("LTX 2.5", (25900, 4096, 16384)),
    ("LTX 2.5", (1024, 4096, 4096)),
    ("Qwen-Image", (4096, 12288, 3072)),
    ("Qwen-Image", (4096, 3072, 3072)),
    ("Qwen-Image", (77, 3072, 3072)),
)
"""Large and small layers of `data/shapes.json`, each with the name of its model."""


@dataclass(frozen=True)
class Choice:
    """The route of one shape, with bfloat16 output and no bias."""

    model: str
    m: int
    n: int
    k: int
    path: str
    reason: str

    @property
    def shape(self) -> str:
        """For example `37296x21504x5376`."""
        return f"{self.m}x{self.n}x{self.k}"


def named(shapes: Sequence[Shape] | None) -> tuple[tuple[str, Shape], ...]:
    """The shapes given to --shape, or those of models."""
    return tuple(("--shape", shape) for shape in shapes) if shapes else SHAPES


def choices(
    device: DeviceProfile,
    int8: str,
    shapes: Sequence[tuple[str, Shape]] = SHAPES,
    backend: Backend = "cuda",
    force: str | None = None,
    measured: Mapping[str, Entry] = MappingProxyType({}),
) -> tuple[Choice, ...]:
    """The routes of a backend's linears on `device` under CK_PATCH_INT8=`int8` and
    CK_PATCH_FORCE=`force`; `measured` has the entries of the table that is used there."""
    whole = route.device_path(device, int8, backend)
    found = []
    for model, (m, n, k) in shapes:
        path, reason = str(whole.path), whole.reason
        if whole.ours:
            call = GemmCall(m, n, k, "bfloat16", backend=backend)
            offered = candidates.chosen(call, device, int8, force)
            path, reason = offered.ordered[0].path, offered.reason
            known = _known(call, device, offered, measured)
            if known is not None:
                path, reason = known.path, "measured on this machine"
        found.append(Choice(model, m, n, k, path, reason))
    return tuple(found)


def _known(
    call: GemmCall, device: DeviceProfile, offered: Candidates, measured: Mapping[str, Entry]
) -> Candidate | None:
    """The choice of a table, if there is one and it can run the call."""
    entry = measured.get(candidates.key(call))
    if entry is None or len(offered.ordered) == 1:
        return None
    every = (STOCK, *offered.ordered, *candidates.every(call, device))
    return {one.name: one for one in every}.get(entry.choice)


def grouped(found: Sequence[Choice]) -> list[tuple[str, str, str]]:
    """Shapes, path and reason, in one row for all shapes that share both; the most shapes last."""
    rows: dict[tuple[str, str], list[str]] = {}
    for choice in found:
        rows.setdefault((choice.path, choice.reason), []).append(choice.shape)
    ordered = sorted(rows.items(), key=lambda row: len(row[1]))
    return [
        (_text(shapes, len(found), last=row == ordered[-1][0]), *row) for row, shapes in ordered
    ]


def _text(shapes: Sequence[str], total: int, last: bool) -> str:
    if len(shapes) == total:
        return "all"
    return "the others" if last and len(shapes) > 2 else " ".join(shapes)
