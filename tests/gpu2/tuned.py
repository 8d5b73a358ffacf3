"""A program: calls the GEMM entry on one GPU until nothing is left to try, and says what ran.

Its arguments are the device and the shapes, MxNxK each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.gpu.slot import entry, random_call, stock
from tests.gpu2.devices import answer, launched

BATCHES, BATCH = 8, 25
"""More calls than a trial takes."""


def main(device: int, shapes: list[str]) -> None:
    torch.cuda.set_device(device)
    import comfy_kitchen  # noqa: F401

    found = {shape: _use(*map(int, shape.split("x"))) for shape in shapes}
    import ck_patch

    status = ck_patch.status()
    answer(
        shapes=found,
        breakers=[str(breaker) for breaker in status.breakers],
        patched=all(slot.state == "patched" for slot in status.slots),
    )


def _use(m: int, n: int, k: int) -> dict[str, Any]:
    call = random_call(m, n, k)
    _, expected = call.run(stock())
    # Proves the kernel that comes first.
    results = [torch.equal(call.run(entry())[1], expected)]
    d = torch.empty_like(expected)

    def work(calls: int) -> bool:
        d.fill_(torch.nan)
        torch.cuda._sleep(20_000_000)  # What is timed must not wait for the host.
        for _ in range(calls):
            call.into(entry(), d)
        return torch.equal(d, expected)

    around = launched(lambda: work(0))
    early = launched(lambda: results.extend(work(BATCH) for _ in range(BATCHES)))
    late = launched(lambda: results.append(work(BATCH)))
    device = d.get_device()
    return {
        "equal": all(results),
        "ran_on": sorted({*early, *late}),
        "early": sorted(early[device] - around[device]),
        "late": sorted(late[device] - around[device]),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
