"""Checkpoints of a training as they appear in a folder.

In: a folder that a training writes to. Out: its checkpoints, each once it is complete, in the order of their steps. A
checkpoint is complete when its config and all its weight files are there, their headers describe their sizes, and no
file has changed for some seconds. One that is written again is yielded again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from math import inf
from pathlib import Path

from evalkit.benchmarks.registry import results_of
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.curves import curve
from evalkit.comparison.naming import are_alike
from evalkit.comparison.sentences import page_unit
from evalkit.comparison.sides import Side, step_of, step_of_checkpoint
from evalkit.display import Say
from evalkit.errors import EvalkitError
from evalkit.escape import printable
from evalkit.models.loading.files import FileStates, file_states, is_begun, why_incomplete
from evalkit.models.loading.locate import silent
from evalkit.runs.finding import list_runs
from evalkit.runs.folder import Run
from evalkit.runs.traits import model_differences


@dataclass
class GrowingCurve:
    """Runs of one training by step, and their figure in `plot`, if that is given."""

    folder: Path
    plot: Path | None
    say: Say
    _runs: dict[int, Run] = field(default_factory=dict)
    _rule: str | None = None

    def add(self, step: int, run: Run, rule: str) -> str | None:
        """Add a finished run under the rule of its plan; return its line, or None if it is there already."""
        self._rule = rule
        if not self._runs:
            self._runs = self._earlier(run)
        known = self._runs.get(step)
        self._runs[step] = run
        if known is not None and known.manifest["id"] == run.manifest["id"]:
            return None
        _, result = results_of(run).headline(run.other_rule(rule))
        before = max((other for other in self._runs if other < step), default=None)
        change = "" if before is None else self._change(before, step)
        again = " (its checkpoint was written again)" if known is not None else ""
        self._draw()
        return printable(f"step {step:,}: {result}{change}{again}")

    def _earlier(self, run: Run) -> dict[int, Run]:
        """Return the newest run, under the same settings, of each checkpoint that is no longer in the folder."""
        earlier: dict[int, Run] = {}
        folder = str(self.folder.resolve())
        for other in sorted(list_runs(run.folder.parent), key=lambda known: str(known.manifest["created"])):
            path = other.manifest.get("path")
            is_gone = path is not None and str(Path(path).parent) == folder and not Path(path).exists()
            is_alike = other.complete and are_alike(run, other) and not model_differences(run, other)
            if is_gone and is_alike and (step := step_of(other)) is not None:
                earlier[step] = other
        return earlier

    def _change(self, before: int, step: int) -> str:
        """Return the paired difference from an earlier step with its interval; empty if they cannot be compared."""
        sides = [Side(str(number), (self._runs[number],)) for number in (before, step)]
        try:
            [comparison] = compare_sides(sides, self._rule)
        except EvalkitError:  # generated answers without documents in common, equal weights
            return ""
        unit, average = page_unit(comparison), comparison.average
        low, high = unit.difference(average.low), unit.difference(average.high)
        return f"; {unit.difference(average.difference)}{unit.points} [{low}, {high}] since step {before:,}"

    def _draw(self) -> None:
        if self.plot is None or len(self._runs) < 2:
            return
        from evalkit.comparison.plots import curves

        runs = tuple(run for _, run in sorted(self._runs.items()))
        try:
            curves([curve(Side(printable(self.folder.resolve().name), runs), self._rule)], self.plot)
        except EvalkitError as error:
            self.say(f"{self.plot} is not drawn: {error}")


_TEMPORARY = re.compile(r"[._]|te?mp|.*(\.|_|-)(te?mp|part|partial|incomplete|writing)$|.*~$", re.IGNORECASE)
"""Names of folders that are renamed when they are complete."""


@dataclass(frozen=True)
class Arrived:
    """A checkpoint that is complete."""

    step: int
    folder: Path


@dataclass
class _Candidate:
    folder: Path
    states: FileStates = ()
    changed: float = 0.0
    """When its files were last seen to change; seconds of a monotonic clock."""
    step: int | None = None
    yielded: FileStates | None = None
    reason: str = ""
    """Why it is not complete, in this state."""
    not_before: float = 0.0
    named: bool = False


@dataclass
class Watcher:
    """Iterates over the checkpoints of a folder as they become complete.

    Args:
        folder: the folder, whose subfolders are checkpoints; their steps are in their names or trainer_state.json.
        until: the last step; later ones are not yielded, and the iteration ends when this step is reached.
        idle: seconds without a new checkpoint and without a changed file after which the iteration ends; None: never.
        allow_pickle: whether pickled weights count.
        say: called with messages for the user.
        settled: seconds without a change after which a checkpoint is complete.
        poll: seconds between two looks at the folder.
        stalled: seconds without a change after which an incomplete checkpoint is named, and no longer waited for at
            the end.
    """

    folder: Path
    _: KW_ONLY
    until: int | None = None
    idle: float | None = None
    allow_pickle: bool = False
    say: Say = silent
    settled: float = 5.0
    poll: float = 2.0
    stalled: float = 60.0

    def __post_init__(self) -> None:
        self._until, self._idle = inf if self.until is None else self.until, inf if self.idle is None else self.idle
        self._known: dict[str, _Candidate] = {}
        self._active = time.monotonic()
        self._is_away = False

    def __iter__(self) -> Iterator[Arrived]:
        self._active = time.monotonic()
        while True:
            self._look()
            if ready := self._ready():
                step, first = min(ready.items())
                first.yielded, first.named = first.states, False
                yield Arrived(step, first.folder)
                self._active = time.monotonic()
            elif self._is_over():
                return
            else:
                time.sleep(self.poll)

    @property
    def incomplete(self) -> dict[str, str]:
        """Return the checkpoints that are there and were never complete: name → reason."""
        return {
            name: candidate.reason
            for name, candidate in sorted(self._known.items())
            if candidate.yielded is None and candidate.reason and not self._is_late(candidate)
        }

    def again(self, arrived: Arrived, seconds: float = 0.0) -> None:
        """Yield a checkpoint again, after some seconds."""
        if candidate := self._known.get(arrived.folder.name):
            candidate.yielded, candidate.not_before = None, time.monotonic() + seconds

    def _look(self) -> None:
        known = {}
        try:
            folders = [path for path in self.folder.iterdir() if path.is_dir() and not _TEMPORARY.match(path.name)]
            self._is_away = False
        except OSError as error:
            # A file system that is away for a while does not end hours of waiting
            if not self._is_away:
                self.say(f"{self.folder} cannot be read ({error.strerror or error}); trying again")
            folders, self._is_away = [], True
        for folder in folders:
            # A link to a checkpoint of the same folder, such as "latest", is not another one
            is_link = folder.is_symlink() and folder.resolve().parent == self.folder.resolve()
            if is_link or not is_begun(states := file_states(folder)):
                continue
            candidate = known[folder.name] = self._known.get(folder.name) or _Candidate(folder)
            if candidate.states != states:
                candidate.states, candidate.changed = states, time.monotonic()
                candidate.reason, candidate.named = "", False
            candidate.step = step_of_checkpoint(str(folder))
        self._known = known

    def _ready(self) -> dict[int, _Candidate]:
        """Return step → complete checkpoint that was not yielded in its present state."""
        ready: dict[int, _Candidate] = {}
        for _, candidate in sorted(self._known.items()):
            if candidate.yielded == candidate.states or self._is_unsettled(candidate, self.settled):
                continue
            candidate.reason = candidate.reason or why_incomplete(candidate.folder, allow_pickle=self.allow_pickle)
            twins = (other for other in self._known.values() if other.yielded and other.step == candidate.step)
            if candidate.reason or candidate.step is None:
                if not self._is_unsettled(candidate, self.stalled):
                    lacking = "has no training step in its name (checkpoint-1000) or trainer_state.json"
                    self._name(candidate, f"is skipped until it changes: {candidate.reason or lacking}")
            elif self._is_late(candidate):
                continue
            elif (twin := next(twins, candidate)) is not candidate:
                # The folder that was yielded first counts
                self._name(candidate, f"is skipped: it has step {candidate.step:,}, as {twin.folder.name} has")
            else:
                ready.setdefault(candidate.step, candidate)
        return ready

    def _name(self, candidate: _Candidate, why: str) -> None:
        if not candidate.named:
            candidate.named = True
            self.say(f"{candidate.folder.name} {why}")

    def _is_late(self, candidate: _Candidate) -> bool:
        return candidate.step is not None and candidate.step > self._until

    def _is_unsettled(self, candidate: _Candidate, seconds: float) -> bool:
        now = time.monotonic()
        return now - candidate.changed < seconds or now < candidate.not_before

    def _is_over(self) -> bool:
        known = self._known.values()
        # A change may complete a checkpoint, which is seen when it has settled
        changed = max((candidate.changed + self.settled for candidate in known), default=0.0)
        if time.monotonic() - max(self._active, changed) > self._idle:
            return True
        # Earlier steps may still be written or in use
        early = [candidate for candidate in known if not self._is_late(candidate)]
        new = [candidate for candidate in early if candidate.yielded != candidate.states]
        is_waiting = any(self._is_unsettled(candidate, self.stalled) for candidate in new)
        return not is_waiting and any(map(self._is_last, known))

    def _is_last(self, candidate: _Candidate) -> bool:
        """Return whether a candidate is a complete checkpoint of the last step or a later one."""
        if candidate.step is None or candidate.step < self._until or self._is_unsettled(candidate, self.settled):
            return False
        return candidate.yielded is not None or not why_incomplete(candidate.folder, allow_pickle=True)
