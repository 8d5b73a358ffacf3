"""The rows of a sweep as a table, the geometric means last."""

from __future__ import annotations

from collections.abc import Sequence

from ck_patch import tables
from ck_patch.candidates import STOCK
from ck_patch.tables import number
from ck_patch.trial import MARGIN
from ck_patch.tune.rows import Row, means

HOW = (
    "Microseconds by CUDA graph replay, medians of interleaved runs in one process; weights rotate "
    "so that none is in the L2, as in a model, activations are warm. old: the choice of the table "
    "before, or the prior where it had none; new: the fastest, or stock where nothing is faster by "
    f"more than {MARGIN:.0%}; times: stock over new; regret: by how much the old choice is slower "
    "than the best of the sweep"
)
"""What the figures of the table are."""

_COLUMNS = ("M x N x K", "old", "from", "us", "new", "us", "stock us", "times", "regret of old")


def show(rows: Sequence[Row]) -> None:
    """Print the table and the means."""
    if not rows:
        return
    print(f"\n{HOW}.")
    tables.show("Candidates of the INT8 GEMM", _COLUMNS, [_cells(row) for row in rows])
    tables.show(
        "Geometric means",
        ("what", "calls", "mean", "worst", "at"),
        [
            [
                mean.what,
                str(mean.rows),
                number(mean.geometric_mean, 3),
                number(mean.worst, 3),
                mean.worst_at,
            ]
            for mean in means(rows)
        ],
    )


def _cells(row: Row) -> list[str]:
    regret = row.regret(row.old)
    return [
        row.name,
        row.old,
        row.old_from,
        number(row.us.get(row.old), 1),
        row.choice,
        number(row.us[row.choice], 1),
        number(row.us.get(STOCK.name), 1),
        number(row.speed_up(row.choice), 2),
        "-" if regret is None else f"{regret:.1%}",
    ]
