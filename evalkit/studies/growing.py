"""The curve of a training that is watched.

In: a finished run after the other. Out: for each, a line with its step, its result and the change since the step
before; and the figure of all, drawn again. Runs of earlier sessions whose checkpoints are removed by now belong to the
curve.
"""

from __future__ import annotations

from pathlib import Path

from evalkit.benchmarks.alike import differences
from evalkit.benchmarks.registry import benchmark_of
from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.comparison_report import page_unit
from evalkit.comparison.curves import curve
from evalkit.comparison.sides import Side
from evalkit.comparison.steps import step_of
from evalkit.errors import EvalkitError
from evalkit.models.locate import Say
from evalkit.reporting.escape import printable
from evalkit.runs.finding import list_runs
from evalkit.runs.folder import Run
from evalkit.runs.traits import model_differences


class GrowingCurve:
    """Runs of one training by step.

    Args:
        folder: of the training's checkpoints.
        plot: the figure's file; None: no figure.
        say: called with messages for the user.
    """

    def __init__(self, folder: Path, plot: Path | None, say: Say) -> None:
        self._folder, self._plot, self._say = folder, plot, say
        self._runs: dict[int, Run] = {}
        self._rule: str | None = None

    def add(self, step: int, run: Run, rule: str) -> str | None:
        """Add a finished run; return its line, or None if it is there already.

        Args:
            step: its training step.
            run: the run.
            rule: of its plan; finished runs may have been started under another one.

        Raises:
            EvalkitError: its results cannot be read.
        """
        self._rule = rule
        if not self._runs:
            self._runs = self._earlier(run)
        known = self._runs.get(step)
        self._runs[step] = run
        if known is not None and known.manifest["id"] == run.manifest["id"]:
            return None
        _, result = benchmark_of(run).headline(run, run.other_rule(rule))
        before = max((other for other in self._runs if other < step), default=None)
        change = "" if before is None else self._change(before, step)
        again = " (its checkpoint was written again)" if known is not None else ""
        self._draw()
        return printable(f"step {step:,}: {result}{change}{again}")

    def _earlier(self, run: Run) -> dict[int, Run]:
        """Return the newest run, under the same settings, of each checkpoint that is no longer in the folder."""
        found: dict[int, Run] = {}
        folder = str(self._folder.resolve())
        for other in sorted(list_runs(run.folder.parent), key=lambda one: str(one.manifest["created"])):
            path = other.manifest.get("path")
            if path is None or str(Path(path).parent) != folder or Path(path).exists() or not other.complete:
                continue
            if (step := step_of(other)) is not None and self._is_alike(run, other):
                found[step] = other
        return found

    def _is_alike(self, run: Run, other: Run) -> bool:
        same = (one.manifest["documents"].keys() for one in (run, other))
        if (run.kind, run.suite) != (other.kind, other.suite) or len({tuple(sorted(tasks)) for tasks in same}) > 1:
            return False
        try:
            differing = [one.name for one, _ in differences(run, other, self._rule) if one.refused]
        except EvalkitError as error:
            self._say(f"{other.folder.name} is left out of the curve: {error}")
            return False
        return not differing and not model_differences(run, other)

    def _change(self, before: int, step: int) -> str:
        """Return the paired difference from an earlier step with its interval; empty if they cannot be compared."""
        sides = [Side(str(one), (self._runs[one],)) for one in (before, step)]
        try:
            [found] = compare_sides(sides, self._rule)
        except EvalkitError:  # generated answers without documents in common, equal weights
            return ""
        unit, average = page_unit(found), found.average
        low, high = unit.difference(average.low), unit.difference(average.high)
        return f"; {unit.difference(average.difference)}{unit.points} [{low}, {high}] since step {before:,}"

    def _draw(self) -> None:
        """Draw the figure; one that cannot be drawn is reported, and the evaluation goes on."""
        if self._plot is None or len(self._runs) < 2:
            return
        from evalkit.comparison.plots import curves

        runs = tuple(run for _, run in sorted(self._runs.items()))
        try:
            curves([curve(Side(printable(self._folder.resolve().name), runs), self._rule)], self._plot)
        except EvalkitError as error:
            self._say(f"{self._plot} is not drawn: {error}")
