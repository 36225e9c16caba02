"""Suites: which tasks are run together and which averages are taken of them.

In: `configs/suites/NAME.yaml`. Out: a `Suite`. Nothing heavy is imported: listing suites starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.reading import read_yaml
from evalkit.resources import resource


@dataclass(frozen=True)
class Examples:
    """Where a task's few-shot examples come from."""

    documents: str
    """Name of the document set that holds them."""
    most: int
    """How many it has for each subject."""


@dataclass(frozen=True)
class Suite:
    """A named list of tasks with the averages the paper takes."""

    name: str
    description: str
    task_dir: Path
    """Folder of the lm-eval task files."""
    groups: dict[str, tuple[str, ...]]
    """Average's name → its tasks, in the order they are printed."""
    sizes: dict[str, int]
    """Average's name → how many tasks it is over where none is left out."""
    documents: dict[str, str]
    """Task → name of its documents, where the two differ."""
    fewshot: dict[str, Examples]
    """Task → its few-shot examples, where there are pinned ones."""
    num_fewshot: int = 0
    """How many of them stand before each question."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, in the order they are run and printed."""
        return tuple(task for tasks in self.groups.values() for task in tasks)


def suite_names() -> list[str]:
    """Names of the suites that evalkit ships."""
    return sorted(path.stem for path in resource("configs", "suites").glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """Read one suite.

    Raises:
        UnknownNameError: there is no suite of that name.
    """
    if name not in suite_names():
        raise UnknownNameError("suite", name, [*suite_names(), "lm_eval"])
    raw = read_yaml(resource("configs", "suites", f"{name}.yaml"), UsageError, "suite")
    return Suite(
        name=name,
        description=raw["description"],
        task_dir=resource(*Path(raw["tasks"]).parts),
        groups={group: tuple(tasks) for group, tasks in raw["groups"].items()},
        sizes={group: len(tasks) for group, tasks in raw["groups"].items()},
        documents=raw.get("documents", {}),
        fewshot={task: Examples(**examples) for task, examples in raw.get("fewshot", {}).items()},
    )


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
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"a task is named twice: {', '.join(chosen)}")
    groups = {g: tuple(t for t in tasks if t in chosen) for g, tasks in suite.groups.items()}
    return replace(suite, groups={group: tasks for group, tasks in groups.items() if tasks})


def with_fewshot(suite: Suite, shots: int) -> Suite:
    """The suite with solved examples before each question.

    Raises:
        UsageError: a task has no examples, or not so many; it names the way that is open.
    """
    if shots and (without := [task for task in suite.tasks if task not in suite.fewshot]):
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
