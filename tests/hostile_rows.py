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


def _with(row: torch.Tensor, index: int, value: float) -> torch.Tensor:
    row = row.clone()
    row[index] = value
    return row
