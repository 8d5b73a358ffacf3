"""Rows that have spoiled row quantizers, or could."""

from __future__ import annotations

import torch


def hostile_rows(k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows of K values on the CPU, by what is hostile about them."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    normal = torch.randn(k)
    ties = torch.randint(-255, 256, (k,)) * 0.5
    ties[0] = 127  # Makes the scale 1.
    rows = {
        "normal": normal,
        "zeros": torch.zeros(k),
        "negative zeros": torch.full((k,), -0.0),
        "tiny": normal * 1e-6,
        "tiny beside zeros": torch.where(torch.arange(k) % 2 == 1, normal * 1e-6, 0.0),
        "tinier": normal * 1e-28,
        "subnormal": normal * smallest * 0.01,
        # Their scales are about the smallest that float16 holds.
        "scale at the end of float16": (torch.rand(k) - 0.5) * 254 * 2.0**-24,
        "all of the largest": normal.sign() * largest,
        "one of the largest": _with(normal, 0, largest),
        "an outlier": _with(normal, -1, 300.0),
        "ties": ties,
        "an infinity": _with(normal, k // 2, torch.inf),
        "a negative infinity": _with(normal, 0, -torch.inf),
        "all infinite": normal.sign() * torch.inf,
        "a NaN": _with(normal, k // 2, torch.nan),
        "all NaN": torch.full((k,), torch.nan),
        "a NaN and an infinity": _with(_with(normal, 0, torch.nan), -1, torch.inf),
    }
    return {name: row.to(dtype) for name, row in rows.items()}


# What a rotation without halvings has for the largest magnitudes of rows that it is not exact for.
BOUNDS = (2.0**-107, 2.0**-30, 2.0**127)


def hostile_rotated_rows(k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same, and rows that have spoiled rotating quantizers, or could; K a multiple of 256."""
    smallest, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    normal, k_of = torch.randn(k, dtype=torch.float64), torch.arange(k)
    sign = normal.sign()
    rows = {
        "all of the largest, of one sign": torch.full((k,), largest),
        "a group of NaN": torch.where(k_of < 256, torch.nan, normal),
        "subnormal beside 1": torch.where(k_of % 7 == 0, 1.0, normal * smallest * 0.01),
        "zeros beside 1": torch.where(k_of % 7 == 0, 1.0, 0.0),
        "one value": _with(torch.zeros(k), 0, 1.0),
        "the smallest": sign * smallest,
        "wide": sign * torch.exp(torch.randn(k, dtype=torch.float64) * 4),
        "wider": sign * torch.exp(torch.randn(k, dtype=torch.float64) * 25),
    }
    for power in (-38, -36, -34, -32, -30, -10, 4, 5, 36, 37, 37.5, 38):
        rows[f"of 10^{power}"] = normal * 10.0**power
    for name, low, high in (("", -20, 21), (", wide", -149, 128), (", low", -149, 1)):
        rows[f"powers of two{name}"] = sign * 2.0 ** torch.randint(low, high, (k,)).double()
    rows["powers of two, lowest"] = sign * 2.0 ** torch.randint(-149, -80, (k,)).double()
    # A group of one value has it, but for the sign, for all 256 that it is rotated to, times 16.
    for bound in BOUNDS:
        others = torch.where(k_of < 256, 0.0, normal) * bound * 2.0**-12
        below = bound * (1 - torch.finfo(dtype).eps / 2)
        rows[f"at {bound}"] = _with(others, 0, bound)
        rows[f"below {bound}"] = _with(others, 0, below)
        for factor in (-7, -6, -5, -4):
            rows[f"about {bound} * 2^{factor}"] = normal * bound * 2.0**factor
    return {**hostile_rows(k, dtype), **{name: row.to(dtype) for name, row in rows.items()}}


def _with(row: torch.Tensor, index: int, value: float) -> torch.Tensor:
    row = row.clone()
    row[index] = value
    return row
