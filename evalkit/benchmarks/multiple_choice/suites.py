"""Suites: which tasks are run together, how, and which averages are taken of them.

In: `configs/suites/NAME.yaml`, or a user's own file. Out: a `Suite`. Nothing heavy is imported: listing suites starts
at once.

    description: what I care about
    groups: {Science: [arc_easy, sciq], Language: [my_task]}      # average → its tasks
    labels: {sciq: SciQ}                                          # how tasks are printed
    short: {arc_easy: ARCe}                                       # the same in narrow tables
    template: inst
    rule: ppl
    num_fewshot: 0
    task_files: my_tasks                                          # a folder of lm-eval task files, beside this file

A task is one that evalkit has pinned, or any of lm-eval's (its catalogue, or the task files) whose documents have
choices and one right answer. Options of the command line win over what a suite says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, Strict

from evalkit.benchmarks.outcomes import Label
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import FileSettings, Listed, Named, read_settings
from evalkit.resources import resource

TASK_DIR = ("tasks", "zeroshot8")
"""evalkit's own lm-eval task files, whose documents are pinned."""
_TAKEN = ("lm_eval", "longbench", "longbench-e", "needle", "tasks")
"""Names that runs of other kinds have where a suite's stands."""


class Examples(FileSettings):
    """Where a task's few-shot examples come from."""

    documents: str
    """Name of the document set that holds them."""
    most: int
    """How many it has for each subject."""


class _SuiteFile(FileSettings):
    """See the module."""

    description: str = ""
    groups: Annotated[Named[Annotated[Listed[str], Field(min_length=1)]], Field(min_length=1)]
    labels: Named[str] = Field(default_factory=dict)
    short: Named[str] = Field(default_factory=dict)
    template: str | None = None
    rule: str | None = None
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    task_files: Annotated[Path, Strict(False)] | None = None
    # Of evalkit's own alone
    fills: str | None = None
    stands_for: Named[str] = Field(default_factory=dict)
    documents: Named[str] = Field(default_factory=dict)
    fewshot: Named[Examples] = Field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """A named list of tasks with the averages that are taken of them."""

    name: str
    description: str
    groups: dict[str, tuple[str, ...]]
    """Average's name → its tasks, in the order they are printed."""
    sizes: dict[str, int]
    """Average's name → how many tasks it is over where none is left out."""
    documents: dict[str, str] = field(default_factory=dict)
    """Pinned task → name of its documents, where the two differ."""
    fewshot: dict[str, Examples] = field(default_factory=dict)
    """Pinned task → its few-shot examples, where there are pinned ones."""
    num_fewshot: int = 0
    """How many of them stand before each question."""
    labels: dict[str, str] = field(default_factory=dict)
    """Task → how it is printed; by its own name where it has none."""
    short: dict[str, str] = field(default_factory=dict)
    """The same in narrow tables; the label where it has none."""
    template: str | None = None
    rule: str | None = None
    task_files: Path | None = None
    """The user's folder of lm-eval task files."""
    fills: str | None = None
    """Another suite whose tables its runs fill, under a note."""
    stands_for: dict[str, str] = field(default_factory=dict)
    """Task → the other suite's, in whose column it stands."""
    own: bool = False
    """Whether it is the user's, so that its groups are part of what a run is."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, in the order they are run and printed."""
        return tuple(task for tasks in self.groups.values() for task in tasks)

    @property
    def pinned(self) -> tuple[str, ...]:
        """Those whose documents evalkit has pinned."""
        return tuple(task for task in self.tasks if task in pinned_tasks())

    @property
    def others(self) -> tuple[str, ...]:
        """Those that lm-eval loads."""
        return tuple(task for task in self.tasks if task not in pinned_tasks())


@cache
def shipped_suites() -> dict[str, Suite]:
    """The suites that evalkit ships, by name."""
    return {path.stem: _suite(path.stem, path) for path in sorted(resource("configs", "suites").glob("*.yaml"))}


def suite_names() -> list[str]:
    """Names of the suites that evalkit ships."""
    return list(shipped_suites())


@cache
def pinned_tasks() -> dict[str, str]:
    """Tasks whose documents evalkit has pinned → name of the documents."""
    suites = shipped_suites().values()
    return {task: suite.documents.get(task, task) for suite in suites for task in suite.tasks}


@cache
def task_labels() -> dict[str, tuple[str, str]]:
    """Tasks of evalkit's suites → (label, short label)."""
    suites = shipped_suites().values()
    return {task: (name, suite.short.get(task, name)) for suite in suites for task, name in suite.labels.items()}


def label(task: str, labels: dict[str, str] | None = None) -> str:
    """How a task is printed: as a run's own suite has it, or evalkit's suites, or by its name."""
    return (labels or {}).get(task) or task_labels().get(task, (task, task))[0]


def short_label(task: str, short: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> str:
    """The same in narrow tables; the run's own label where it has no shorter one."""
    return (short or {}).get(task) or (labels or {}).get(task) or task_labels().get(task, (task, task))[1]


def label_of(task: str, labels: dict[str, str] | None = None, short: dict[str, str] | None = None) -> Label:
    """Both."""
    return Label(label(task, labels), short_label(task, short, labels))


def load_suite(name: str) -> Suite:
    """Read one suite: of evalkit's own by its name, else from a file that ends in .yaml or .yml.

    Raises:
        UnknownNameError: there is no suite of that name.
        UsageError: the file cannot be read, or is not of the form above; names the key.
    """
    if name in shipped_suites():
        return shipped_suites()[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return _of_user(Path(name).expanduser())
    raise UnknownNameError("suite", name, [*suite_names(), "lm_eval"])


def suite_of(name: str, tasks: Sequence[str], task_files: Path | None = None) -> Suite:
    """A suite of tasks that were named one by one. Raises `UsageError` where one is named twice."""
    refuse_twice(tasks)
    suite = Suite(name, "", {"Average": tuple(tasks)}, {"Average": len(tasks)}, task_files=task_files, own=True)
    return _with_pinned(suite)


def _of_user(path: Path) -> Suite:
    suite = _suite(path.stem, path)
    where = f"suite {path}"
    if path.stem in (*suite_names(), *_TAKEN):
        raise UsageError(f"{where}: '{path.stem}' is the name of another suite; give the file one of its own")
    if twice := [task for task in suite.tasks if suite.tasks.count(task) > 1]:
        raise UsageError(f"{where}: task {twice[0]} stands twice among its groups; leave one out")
    for kind in ("labels", "short"):
        if unknown := [task for task in getattr(suite, kind) if task not in suite.tasks]:
            raise UsageError(f"{where}, {kind}: {UnknownNameError('task', unknown[0], suite.tasks)}")
    if suite.documents or suite.fewshot or suite.fills or suite.stands_for:
        raise UsageError(
            f"{where}: 'documents', 'fewshot', 'fills' and 'stands_for' are for evalkit's own suites; leave them out"
        )
    files = suite.task_files and path.parent / suite.task_files
    return _with_pinned(replace(suite, task_files=files, own=True))


def _with_pinned(suite: Suite) -> Suite:
    """With the documents and examples of evalkit's own tasks."""
    documents = {task: name for task, name in pinned_tasks().items() if task in suite.tasks and name != task}
    examples = {
        task: found for one in shipped_suites().values() for task, found in one.fewshot.items() if task in suite.tasks
    }
    return replace(suite, documents=documents, fewshot=examples)


def _suite(name: str, path: Path) -> Suite:
    content = read_settings(path, _SuiteFile, UsageError, "suite")
    return Suite(name=name, sizes={group: len(tasks) for group, tasks in content.groups.items()}, **dict(content))


def choose_tasks(suite: Suite, chosen: tuple[str, ...]) -> Suite:
    """The suite with only the chosen tasks (all where none is named), in the suite's order.

    Raises:
        UnknownNameError: a chosen task is not in the suite.
    """
    if not chosen:
        return suite
    for task in chosen:
        if task not in suite.tasks:
            raise UnknownNameError("task", task, suite.tasks)
    refuse_twice(chosen)
    groups = {g: tuple(t for t in tasks if t in chosen) for g, tasks in suite.groups.items()}
    return replace(suite, groups={group: tasks for group, tasks in groups.items() if tasks})


def refuse_twice(tasks: Sequence[str]) -> None:
    """Raise a `UsageError` where a task is named twice."""
    if len(set(tasks)) != len(tasks):
        raise UsageError(f"a task is named twice: {', '.join(tasks)}")


def with_fewshot(suite: Suite, shots: int) -> Suite:
    """The suite with solved examples before each question.

    Raises:
        UsageError: a pinned task has no examples, or not so many; it names the way that is open.
    """
    if shots and (without := [task for task in suite.pinned if task not in suite.fewshot]):
        raise UsageError(
            f"suite {suite.name} has no few-shot examples for {', '.join(without)}: they lie in splits that only the "
            f"Hugging Face hub has; leave such tasks out with --tasks, or take the examples from the hub with "
            f"--suite lm_eval --tasks {','.join(without)} --num-fewshot {shots}"
        )
    for task, examples in suite.fewshot.items():
        if task in suite.tasks and shots > examples.most:
            raise UsageError(
                f"--num-fewshot is {shots}, but {task} has no more than {examples.most} examples for each subject"
            )
    return replace(suite, num_fewshot=shots)
