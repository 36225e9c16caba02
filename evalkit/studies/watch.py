"""Checkpoints of a training as they appear in a folder.

In: a folder that a training writes to. Out: its checkpoints, each once it is complete, in the order of their steps. A
checkpoint is complete when its config and all its weight files are there, their headers describe their sizes, and no
file has changed for some seconds. One that is written again is yielded again.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evalkit.comparison.steps import step_of_checkpoint
from evalkit.models.complete import FileStates, file_states, is_begun, why_incomplete
from evalkit.models.locate import Say, silent

_TEMPORARY = re.compile(r"[._]|te?mp|.*(\.|_|-)(te?mp|part|partial|incomplete|writing)$|.*~$", re.IGNORECASE)
"""Names of folders that are renamed when they are complete."""
SETTLED = 5.0
"""Seconds without a change after which a checkpoint is complete."""
POLL = 2.0
"""Seconds between two looks at the folder."""
STALLED = 60.0
"""Seconds without a change after which an incomplete checkpoint is named, and no longer waited for at the end."""


@dataclass(frozen=True)
class Arrived:
    """A checkpoint that is complete."""

    step: int
    folder: Path


@dataclass
class _Known:
    """What is known of a folder."""

    states: FileStates
    changed: float
    """When its files were last seen to change; seconds of a monotonic clock."""
    yielded: FileStates | None = None
    """The state in which it was yielded."""
    reason: str = ""
    """Why it is not complete, in this state."""
    not_before: float = 0.0
    named: bool = False


class Watcher:
    """Iterates over the checkpoints of a folder as they become complete.

    Args:
        folder: the folder, whose subfolders are checkpoints; their steps are in their names or trainer_state.json.
        until: the last step; later ones are not yielded, and the iteration ends when this step is reached.
        idle: seconds without a new checkpoint and without a changed file after which the iteration ends; None: never.
        allow_pickle: whether pickled weights count.
        say: called with messages for the user.
        settled: see `SETTLED`.
        poll: see `POLL`.
        stalled: see `STALLED`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        until: int | None = None,
        idle: float | None = None,
        allow_pickle: bool = False,
        say: Say = silent,
        settled: float = SETTLED,
        poll: float = POLL,
        stalled: float = STALLED,
    ) -> None:
        self._folder = folder
        self._until, self._idle = until, idle
        self._allow_pickle, self._say = allow_pickle, say
        self._settled, self._poll, self._stalled = settled, poll, stalled
        self._known: dict[str, _Known] = {}
        self._active = time.monotonic()
        self._is_away = False

    def __iter__(self) -> Iterator[Arrived]:
        self._active = time.monotonic()
        while True:
            self._look()
            if (ready := self._ready()) is not None:
                known = self._known[ready.folder.name]
                known.yielded, known.named = known.states, False
                yield ready
                self._active = time.monotonic()
            elif self._is_over():
                return
            else:
                time.sleep(self._poll)

    @property
    def incomplete(self) -> dict[str, str]:
        """Return the checkpoints that are there and were never complete: name → reason."""
        return {
            name: known.reason
            for name, known in sorted(self._known.items())
            if known.yielded is None and known.reason and not self._is_late(name)
        }

    def again(self, one: Arrived, seconds: float = 0.0) -> None:
        """Yield a checkpoint again, after some seconds."""
        if known := self._known.get(one.folder.name):
            known.yielded, known.not_before = None, time.monotonic() + seconds

    def _look(self) -> None:
        """Read the states of all folders."""
        now, found = time.monotonic(), {}
        for name in self._names():
            states = file_states(self._folder / name)
            if not is_begun(states):
                continue
            known = self._known.get(name)
            if known is None:
                known = _Known(states, now)
            elif known.states != states:
                known.states, known.changed, known.reason, known.named = states, now, "", False
            found[name] = known
        self._known = found

    def _names(self) -> list[str]:
        """Return the names of the folders that may be checkpoints."""
        try:
            with os.scandir(self._folder) as entries:
                found = [
                    one.name
                    for one in entries
                    if one.is_dir() and not _TEMPORARY.match(one.name) and not self._is_alias(one)
                ]
        except OSError as error:
            # A file system that is away for a while does not end hours of waiting
            if not self._is_away:
                self._say(f"{self._folder} cannot be read ({error.strerror or error}); trying again")
            self._is_away = True
            return []
        self._is_away = False
        return found

    def _is_alias(self, entry: os.DirEntry[str]) -> bool:
        """Return whether an entry links to a checkpoint of the same folder, such as "latest"."""
        return entry.is_symlink() and Path(entry.path).resolve().parent == self._folder.resolve()

    def _ready(self) -> Arrived | None:
        """Return the complete checkpoint of the lowest step that was not yielded in its present state."""
        now, ready = time.monotonic(), []
        for name, known in self._known.items():
            if known.yielded == known.states or now - known.changed < self._settled or now < known.not_before:
                continue
            folder = self._folder / name
            if not known.reason:
                known.reason = why_incomplete(folder, allow_pickle=self._allow_pickle)
            step = step_of_checkpoint(str(folder))
            if known.reason or step is None:
                self._name(name, known, now, step)
            elif not self._is_late(name) and not self._is_duplicate(name, known, step):
                ready.append(Arrived(step, folder))
        return min(ready, key=lambda one: (one.step, one.folder.name), default=None)

    def _name(self, name: str, known: _Known, now: float, step: int | None) -> None:
        """Name a folder that is not yielded, once it has not changed for a while."""
        if not known.named and now - known.changed >= self._stalled:
            known.named = True
            why = known.reason or "has no training step in its name (checkpoint-1000) or trainer_state.json"
            self._say(f"{name} is skipped until it changes: {why}")

    def _is_duplicate(self, name: str, known: _Known, step: int) -> bool:
        """Return whether another folder has the same step; the one that was yielded first counts."""
        for other, one in self._known.items():
            if other != name and one.yielded is not None and step_of_checkpoint(str(self._folder / other)) == step:
                if not known.named:
                    known.named = True
                    self._say(f"{name} is skipped: it has step {step:,}, as {other} has")
                return True
        return False

    def _is_late(self, name: str) -> bool:
        step = step_of_checkpoint(str(self._folder / name))
        return self._until is not None and step is not None and step > self._until

    def _is_over(self) -> bool:
        now = time.monotonic()
        # A change may complete a checkpoint, which is seen when it has settled
        changed = max([one.changed + self._settled for one in self._known.values()], default=0.0)
        if self._idle is not None and now - max(self._active, changed) > self._idle:
            return True
        if self._until is None or not self._is_reached():
            return False
        # Earlier steps may still be written or in use
        return not any(
            one.yielded != one.states and (now - one.changed < self._stalled or now < one.not_before)
            for name, one in self._known.items()
            if not self._is_late(name)
        )

    def _is_reached(self) -> bool:
        """Return whether a complete checkpoint has the last step or a later one."""
        for name, known in self._known.items():
            step = step_of_checkpoint(str(self._folder / name))
            if step is None or self._until is None or step < self._until:
                continue
            settled = time.monotonic() - known.changed >= self._settled
            if known.yielded is not None or (settled and not why_incomplete(self._folder / name, allow_pickle=True)):
                return True
        return False
