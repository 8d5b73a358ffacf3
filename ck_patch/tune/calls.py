"""The GEMM calls that a sweep measures: those of shapes, or those that a table has met."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

from ck_patch import candidates, shapes
from ck_patch.route import Backend, GemmCall
from ck_patch.shapes import Shape
from ck_patch.table_file import Entry

_DTYPE = "float32|float16|bfloat16"
_KEY = re.compile(
    rf"(cuda|triton|eager) [0-9]+x([0-9]{{1,10}})x([0-9]{{1,10}}) ({_DTYPE}) (no|{_DTYPE}) bias"
    "( residual)?"
)


def of_shapes(found: Iterable[Shape], bias_dtype: str | None) -> list[GemmCall]:
    """Calls of the CUDA backend with bfloat16 output."""
    return [GemmCall(*shape, "bfloat16", bias_dtype) for shape in found]


def recorded(entries: Mapping[str, Entry]) -> list[GemmCall]:
    """The calls that the entries of a table were measured with; of entries of another version of
    ck_patch, which have other keys, none."""
    found = ((key, _parsed(key, entry.m)) for key, entry in entries.items())
    return [call for key, call in found if call is not None and candidates.key(call) == key]


def named(call: GemmCall) -> str:
    """The shape, and what is not the usual: `4096x3072x3072 float16 float32 bias`."""
    parts = [shapes.named((call.m, call.n, call.k))]
    if call.out_dtype != "bfloat16":
        parts.append(call.out_dtype)
    if call.bias_dtype is not None:
        parts.append(f"{call.bias_dtype} bias")
    if call.residual:
        parts.append("residual")
    if call.backend != "cuda":
        parts.append(f"({call.backend} backend)")
    return " ".join(parts)


def _parsed(key: str, m: int) -> GemmCall | None:
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    backend, n, k, out_dtype, bias, residual = match.groups()
    return GemmCall(
        m,
        int(n),
        int(k),
        out_dtype,
        None if bias == "no" else bias,
        residual=residual is not None,
        backend=cast(Backend, backend),
    )
