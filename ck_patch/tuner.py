"""Which candidate a GEMM runs by: what was measured on this machine, or a trial that finds out."""

from __future__ import annotations

from collections.abc import Callable

from ck_patch import candidates, log, table
from ck_patch.candidates import Candidate, Candidates
from ck_patch.device import DeviceProfile
from ck_patch.forks import ForkSafe
from ck_patch.route import GemmCall
from ck_patch.table import Entry, Table
from ck_patch.trial import Trial

TableFor = Callable[[DeviceProfile], Table]

# A process that meets more keys than this tries them anew, unless the table has them.
_MAX_TRIALS = 4096


class Tuner(ForkSafe):
    """The trials and the tables of one process, shared by its ops.

    `mode` is the value of CK_PATCH_TUNE: "auto" measures, "frozen" uses what was measured before,
    "off" neither; nothing is measured on the CPU, device -1. A trial belongs to one device; devices
    of the same kind share a table.
    """

    def __init__(self, mode: str = "off", table_for: TableFor | None = None) -> None:
        super().__init__()
        self._mode = mode
        self._table_for = table_for or (lambda gpu: table.for_device(gpu, None))
        self._tables: dict[DeviceProfile, Table] = {}
        self._trials: dict[tuple[int, str], Trial] = {}
        # What the table was given: the choice, and whether that was the last word.
        self._kept: dict[tuple[int, str], tuple[str, bool]] = {}

    def choose(
        self,
        device: int,
        gpu: DeviceProfile,
        call: GemmCall,
        found: Candidates,
        runs: Callable[[Candidate], bool],
    ) -> Candidate | Trial:
        """The candidate to run a call by, or the trial that shall find it.

        `runs` says of one that was measured, maybe by another op, process or version, whether it
        can be used for this call.
        """
        first = found.ordered[0]
        if self._mode == "off" or device < 0 or len(found.ordered) == 1:
            return first
        key = candidates.key(call)
        with self._lock:
            trial = self._trials.get((device, key))
            if trial is None:
                entry = self._table(gpu).get(key)
                known = None if entry is None else _parsed(entry.choice)
                if known is not None and runs(known):
                    return known
                if self._mode == "frozen":
                    return first
                if len(self._trials) >= _MAX_TRIALS:
                    self._trials.clear()
                    self._kept.clear()
                trial = Trial([candidate.name for candidate in found.ordered])
                self._trials[device, key] = trial
        if trial.winner is None:
            return trial
        winner = candidates.parse(trial.winner)
        return winner if runs(winner) else first

    def report(
        self,
        trial: Trial,
        name: str,
        microseconds: float | None,
        device: int,
        gpu: DeviceProfile,
        call: GemmCall,
    ) -> None:
        """Count a sample of a trial of ours, None being one that tells nothing; keep the choice
        once it is made."""
        if microseconds is None:
            trial.void(name)
            return
        trial.add(name, microseconds)
        # The program may end before the trial does: the next one starts with what is known.
        if trial.winner is None and not trial.is_sound:
            return
        key, choice, times = candidates.key(call), trial.best, trial.microseconds
        with self._lock:
            decided = trial.winner is not None
            if self._kept.get((device, key)) in ((choice, decided), (choice, True)):
                return
            self._kept[device, key] = choice, decided
            if choice in times:
                rounded = {name: round(time, 2) for name, time in times.items()}
                self._table(gpu).put(key, Entry(choice, call.m, rounded, "run"))
        if decided and log.paths_wanted():
            shown = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
            log.path(f"{key} on {gpu.name}: measured, {choice} from now on (us: {shown})")

    def _table(self, gpu: DeviceProfile) -> Table:
        found = self._tables.get(gpu)
        if found is None:
            found = self._tables[gpu] = self._table_for(gpu)
        return found


def _parsed(choice: str) -> Candidate | None:
    """The candidate of that name, if this version has it."""
    try:
        return candidates.parse(choice)
    except ValueError:
        return None
