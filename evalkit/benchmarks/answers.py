"""Results of finished runs with generated answers, each of which has one score.

In: a run's table of answers. Out: its documents, for comparison and as people read them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from evalkit.benchmarks.outcomes import Comparable, GradedAnswers, Measure
from evalkit.benchmarks.results import FinishedResults

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.document_views import TaskView
    from evalkit.display import Say


def share_measure(name: str) -> Measure:
    """Return the measure of scores from 0 to 1, such as "exact match"."""
    return Measure(f"{name} in %", True, name)


class FinishedAnswers(FinishedResults):
    """Base class of the results of runs with generated answers."""

    checked: ClassVar[tuple[str, ...]]
    """Columns of `answers` that must be equal for two documents to be the same."""
    prompt_settings: ClassVar[Mapping[str, str]] = {}
    """Name in messages → entry of the specification that makes other prompts of the same documents."""
    continuous: ClassVar[str] = ""
    """Rule of the continuous measure that is reported beside the others, if there is one."""

    @abstractmethod
    def answers(self) -> pd.DataFrame:
        """Return columns task, id, source (of dependent documents), references, answer, score and `checked`."""

    @property
    def metric_names(self) -> dict[str, str]:
        """Task → name of its metric, such as "exact match"."""
        return {task["task"]: task.get("metric", "score") for task in self.run.stored["tasks"]}

    def measures(self) -> Mapping[str, Measure]:
        """Return rule → measure of the documents; the benchmark's own, under its name, comes first."""
        return {self.run.kind: share_measure(next(iter(self.metric_names.values())))}

    def groups(self) -> Mapping[str, Sequence[str]]:
        return {"Average": tuple(self.run.manifest["documents"])}

    def sample_of(self, task: str) -> str:
        """Return the common name of tasks that ask the same questions; empty if no other task does."""
        return ""

    @cached_property
    def comparable(self) -> Comparable:
        return _ComparableAnswers(self)

    def views(self, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
        from evalkit.benchmarks.document_views import answer_views

        yield from answer_views(self.answers(), tasks, self.metric_names.__getitem__)


class _ComparableAnswers(GradedAnswers):
    def __init__(self, results: FinishedAnswers) -> None:
        super().__init__(results.run, results.answers, results.checked, results.groups(), results.measures())
        self._results = results

    def sample_of(self, task: str) -> str:
        return self._results.sample_of(task)

    def beside(self, rule: str) -> str | None:
        continuous = self._results.continuous
        return continuous if continuous in self.rules and rule != continuous else None

    def must_agree(self, task: str) -> dict[str, str]:
        specification = self.run.manifest["specification"]
        settings = {name: str(specification[entry]) for name, entry in self._results.prompt_settings.items()}
        hashes = {"documents": str(specification["documents"].get(task, ""))} if "documents" in specification else {}
        return settings | hashes
