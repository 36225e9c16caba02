"""Public functions on existing runs: open one, compare several. Does not import torch.

In: a `Run`, or a reference as on the command line: a run's folder; its folder's name or id, or a prefix of either; or
its checkpoint, where only one run has it. Out: `Run`s and `Comparison`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from evalkit.comparison.comparison import compare_sides
from evalkit.comparison.differences import Comparison
from evalkit.comparison.sides import sides_of
from evalkit.errors import UsageError
from evalkit.inputs import values
from evalkit.paths import RUNS
from evalkit.runs.finding import find_any_run
from evalkit.runs.folder import Run
from evalkit.runs.score_table import outcome_key

GivenRun: TypeAlias = Run | str | Path


def load_run(run: str | Path, root: str | Path = RUNS) -> Run:
    """Open a run, finished or not.

    Args:
        run: its folder, its name or id or a prefix of either, or its checkpoint.
        root: folder of run folders, in which names are looked up.

    Raises:
        UsageError: several runs match; lists them.
        UnknownNameError: no run matches.
        RunError: the run is damaged, or the folder is not a run folder.
    """
    return find_any_run(values.name_or_path("run", run), values.path("root", root))


def compare(
    *runs: GivenRun,
    groups: Mapping[str, Sequence[GivenRun]] | None = None,
    rule: str | None = None,
    outcome: str | None = None,
    root: str | Path = RUNS,
) -> list[Comparison]:
    """Compare finished runs on the same documents, as `evalkit compare` does.

    The first run, or without runs the first group, is the baseline A. Each other side is a B that is compared with it.

    Args:
        *runs: runs, each a side of the comparison.
        groups: name → the runs of one side: several seeds, or checkpoints of one model.
        rule: scoring rule; None: the runs' own.
        outcome: "accuracy", "bits_per_byte", "log_loss", "brier" or "margin"; None: accuracy. A margin is that of the
            rule, the others depend on none.
        root: folder of run folders, in which names are looked up.

    Returns:
        A comparison for each side but the first, in their order. Differences are B less A, of fractions, or in
            the unit of the outcome.

    Raises:
        EvalkitError: a run is not found or not finished, a side is named twice, or two sides cannot be paired.
    """
    for name, members in (groups or {}).items():
        if isinstance(members, (str, Path, Run)):
            raise UsageError(f"groups: '{name}' is one run; give a list of runs")
    singles = [_finished(run, root) for run in runs]
    named = [(name, [_finished(run, root) for run in members]) for name, members in (groups or {}).items()]
    return compare_sides(sides_of(singles, named), outcome_key(outcome, rule))


def _finished(given: GivenRun, root: str | Path) -> Run:
    run = given if isinstance(given, Run) else load_run(given, root)
    run.require_finished()
    return run
