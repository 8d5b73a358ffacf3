"""The environment variables: one table that describes them, one function that reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from ck_patch import slots

Kind = Literal["switch", "choice", "names", "directory", "devices", "candidate"]
T = TypeVar("T")

_ON = ("1", "true", "on", "yes")
# _bootstrap.start() knows the same words: it decides before anything of this is imported.
_OFF = ("0", "false", "off", "no")


@dataclass(frozen=True)
class Variable:
    """One environment variable; `default` is what unset, empty and not understood all mean."""

    name: str
    kind: Kind
    default: str
    help: str
    choices: tuple[str, ...] = ()


ENABLED = Variable(
    "CK_PATCH",
    "switch",
    "1",
    "0 turns the plugin off: nothing is installed, nothing is patched. It wins over enable().",
    ("0", "1"),
)
INT8 = Variable(
    "CK_PATCH_INT8",
    "choice",
    "auto",
    "Which path an INT8 linear takes. auto: decided per device and shape. stock: never ours. "
    "triton: our GEMM from sm_80 on, also where stock may be faster, but not on sm_103 and on "
    "architectures that this version does not know. fp16: weights are dequantized piece by piece "
    "and activations are not quantized, in FP16 (BF16 on sm_103); the result is another one than "
    "INT8's.",
    ("auto", "stock", "triton", "fp16"),
)
SLOTS = Variable(
    "CK_PATCH_SLOTS",
    "names",
    "",
    "Comma list of the slots that may be patched; empty means all. There are: "
    + ", ".join(slot.name for slot in slots.SLOTS)
    + ". An unknown name warns, and patches nothing of that name.",
)
LOG = Variable(
    "CK_PATCH_LOG",
    "choice",
    "info",
    "off is silent; info says what was patched and what failed; path adds one line per unique "
    "shape that says which path ran. The lines go to the logger ck_patch at INFO, which ComfyUI "
    "shows, and so do this project's own commands; other programs need logging configured.",
    ("off", "info", "path"),
)
CACHE_DIR = Variable(
    "CK_PATCH_CACHE_DIR",
    "directory",
    "",
    "Absolute path of the folder for what is measured on this machine; empty means ck_patch in "
    "the user's cache folder (XDG_CACHE_HOME, ~/Library/Caches or %LOCALAPPDATA%).",
)

TUNE = Variable(
    "CK_PATCH_TUNE",
    "choice",
    "auto",
    "How a GEMM's kernel is chosen. auto: the first calls of a shape take turns among the few that "
    "may be the fastest, stock among them, and are timed as they run; the choice is kept. frozen: "
    "what was measured before is used, and nothing more is measured. off: neither.",
    ("auto", "frozen", "off"),
)
FORCE = Variable(
    "CK_PATCH_FORCE",
    "candidate",
    "",
    "For comparisons: run every GEMM by one candidate. stock; cfg0 to cfg13, stock's own tile "
    "configurations (CUDA backend, no bias); triton:NAME, one of ours by its name. Where it cannot "
    "run, one line says so, and the call is stock's.",
)

ASSUME = Variable(
    "CK_PATCH_ASSUME_DEVICE",
    "devices",
    "",
    "For tests and support: take every device for one of this compute capability (sm_70), or some "
    "of them (0=sm_90,1=sm_70), and go the way that such a GPU would. On the CPU, paths of plain "
    "torch then run too.",
)

VARIABLES = (ENABLED, INT8, SLOTS, LOG, TUNE, FORCE, CACHE_DIR, ASSUME)


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. `problems` has one sentence per value not understood."""

    enabled: bool = True
    int8: str = INT8.default
    slots: tuple[str, ...] | None = None
    log: str = LOG.default
    tune: str = TUNE.default
    force: str | None = None
    cache_dir: str | None = None
    assume: tuple[tuple[int | None, tuple[int, int]], ...] = ()
    problems: tuple[str, ...] = ()

    def assumed(self, device: int) -> tuple[int, int] | None:
        """The compute capability that a device (-1 for the CPU) is to be taken for, or None."""
        for index, capability in self.assume:
            if index is None or index == device:
                return capability
        return None

    def wants(self, slot: str) -> bool:
        """Whether the slot of that name may be patched."""
        return self.enabled and (self.slots is None or slot in self.slots)


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings; never raises: a value that is not understood means the default."""
    environ = os.environ if environ is None else environ
    problems: list[str] = []

    def read(variable: Variable, parse: Callable[[str], T]) -> T:
        text = environ.get(variable.name, "").strip()
        try:
            return parse(text or variable.default)
        except ValueError as error:
            meaning = variable.default or "nothing set"
            problems.append(f"{variable.name}={text!r} {error}; it means {meaning}")
            return parse(variable.default)

    return Settings(
        enabled=read(ENABLED, _switch),
        int8=read(INT8, _one_of(INT8.choices)),
        slots=read(SLOTS, _names),
        log=read(LOG, _one_of(LOG.choices)),
        tune=read(TUNE, _one_of(TUNE.choices)),
        force=read(FORCE, _candidate),
        cache_dir=read(CACHE_DIR, _directory),
        assume=read(ASSUME, _devices),
        problems=tuple(problems),
    )


def _switch(text: str) -> bool:
    word = text.lower()
    if word not in _ON + _OFF:
        raise ValueError("is neither 0 nor 1")
    return word in _ON


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"is none of {', '.join(choices)}")
        return text.lower()

    return parse


def _names(text: str) -> tuple[str, ...] | None:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not names:
        raise ValueError("names no slot")
    return names or None


def _directory(text: str) -> str | None:
    # A relative path would move the cache with every start directory.
    if text and not Path(text).is_absolute():
        raise ValueError("is not an absolute path")
    return text or None


def _candidate(text: str) -> str | None:
    if text:
        # Tables of tiles: for those who ask.
        from ck_patch import candidates

        candidates.parse(text)
    return text or None


def _devices(text: str) -> tuple[tuple[int | None, tuple[int, int]], ...]:
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(?:([0-9]+)\s*=\s*)?sm_([0-9]{1,2})([0-9])", item.lower())
        if match is None:
            raise ValueError("is not of the form sm_70 or 0=sm_90,1=sm_70")
        index, major, minor = match.groups()
        found.append((None if index is None else int(index), (int(major), int(minor))))
    return tuple(found)
