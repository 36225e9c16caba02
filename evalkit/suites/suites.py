"""Suites: named lists of tasks with averages, a template and a rule.

In: `configs/suites/NAME.yaml`, or a user's file. Out: a `Suite`. No slow import, so that suites are listed at once.

    description: what I care about
    groups: {Science: [arc_easy, sciq], Language: [my_task]}      # average → its tasks
    labels: {sciq: SciQ}                                          # printed names of tasks
    short: {arc_easy: ARCe}                                       # shorter names, for narrow tables
    template: inst
    rule: ppl
    num_fewshot: 0
    task_files: my_tasks                                          # a folder of lm-eval task files, next to this file
    requests: {my_task: my.jsonl}                                 # a file of requests (`data.requests`) for each task
    forms: {ARC-Easy: [arc_easy_cloze, arc_easy_letters]}         # tasks of which the better one counts

or of tasks whose answers are generated (kind `answers`), each with its settings (`AnswerSettings`):

    answers: {my_task: {requests: my.jsonl, metric: f1, max_new_tokens: 32, until: ["\\n"], truncate: middle}}
    groups: {Mine: [my_task]}                                     # optional
    chat: true                                                    # prompts in the tokenizer's chat template

A task is one of evalkit's pinned tasks, a file of requests, or any task of lm-eval (of its catalogue, or of the task
files) whose documents have choices and one right answer. Command-line options override a suite's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, Strict, model_validator

from evalkit.data.requests import has_prompts, request_tasks
from evalkit.errors import UnknownNameError, UsageError, check_known
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.inputs.values import with_matches
from evalkit.paths import resource

if TYPE_CHECKING:
    from evalkit.data import HubSplit

DEFAULT_SUITE = "zeroshot8"
TASK_DIR = ("tasks", "zeroshot8")
"""evalkit's own lm-eval task files, whose documents are pinned."""
_RESERVED_NAMES = ("lm_eval", "longbench", "longbench-e", "needle", "ruler", "tasks")
_SHIPPED_ONLY = ("documents", "fewshot", "fills", "stands_for")
_SCORED_ONLY = ("template", "rule", "num_fewshot", "task_files", "requests", "forms")
"""Keys of suites whose tasks have scored answers."""


class Label(NamedTuple):
    """Printed names of a task; the short one is for narrow tables."""

    full: str
    short: str


class Examples(FileSettings):
    """Source of a task's few-shot examples."""

    documents: str
    most: int


class AnswerSettings(FileSettings):
    """How the answers of a task are generated and scored."""

    metric: NonEmpty = "exact_match"
    """Name of a metric of generated answers."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 32
    """Maximum length of an answer, in tokens."""
    until: Listed[NonEmpty] = ("\n",)
    """Texts that end an answer and are not part of it."""
    truncate: Literal["middle"] | None = None
    """"middle": a prompt that is too long for the context window loses its middle; None: it is an error."""


class AnswerTask(AnswerSettings):
    """A task whose answers are generated."""

    requests: Annotated[Path, Strict(False)]
    """File of its prompts and references."""


class _SuiteFile(FileSettings):
    description: str = ""
    groups: Annotated[Named[Annotated[Listed[str], Field(min_length=1)]], Field(min_length=1)]
    labels: Named[str] = Field(default_factory=dict)
    short: Named[str] = Field(default_factory=dict)
    template: str | None = None
    rule: str | None = None
    num_fewshot: Annotated[int, Field(ge=0)] = 0
    task_files: Annotated[Path, Strict(False)] | None = None
    requests: Named[Annotated[Path, Strict(False)]] = Field(default_factory=dict)
    """Task → file of its requests."""
    forms: Named[Listed[str]] = Field(default_factory=dict)
    """Name → the tasks that are its forms; the form counts in which the model is more often right."""
    answers: Named[AnswerTask] = Field(default_factory=dict)
    """Tasks whose answers are generated; a suite with any has no others."""
    chat: bool = False
    """Whether their prompts are put into the tokenizer's chat template."""
    # Only for evalkit's own suites
    fills: str | None = None
    """Another suite whose tables this suite's runs fill, with a note."""
    stands_for: Named[str] = Field(default_factory=dict)
    """Task → the task of that suite whose column it fills."""
    documents: Named[str] = Field(default_factory=dict)
    """Pinned task → name of its document set, if different."""
    fewshot: Named[Examples] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _default_groups(cls, content: Any) -> Any:
        answers = content.get("answers") if isinstance(content, dict) else None
        if isinstance(answers, dict) and answers and "groups" not in content:
            return content | {"groups": {"Average": list(map(str, answers))}}
        return content


class Suite(_SuiteFile):
    """A named list of tasks with averages, a template and a rule."""

    name: str
    sizes: dict[str, int]
    """Average → number of its tasks in the full suite."""
    user_defined: bool = False
    """Whether a user defined it; its groups are then part of a run's specification."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks, in the order in which they are run and printed."""
        return tuple(task for tasks in self.groups.values() for task in tasks)

    def averages(self) -> dict[str, tuple[str, ...]]:
        """Return average → its tasks; the last one, over all tasks, is "Average"."""
        return {**self.groups, "Average": self.tasks}

    @property
    def pinned(self) -> tuple[str, ...]:
        """Tasks of lm-eval whose documents evalkit has pinned."""
        return tuple(task for task in self.tasks if task in pinned_tasks() and task not in self.requests)

    @property
    def requested(self) -> tuple[str, ...]:
        """Tasks that are requests: the user's files, and evalkit's own."""
        return tuple(task for task in self.tasks if task in self.requests or task in request_tasks())

    @property
    def others(self) -> tuple[str, ...]:
        """Tasks that lm-eval loads from its catalogue or from task files."""
        return tuple(task for task in self.tasks if task not in (*self.pinned, *self.requested))


@cache
def shipped_suites() -> dict[str, Suite]:
    return {path.stem: _read(path) for path in sorted(resource("configs", "suites").glob("*.yaml"))}


@cache
def pinned_tasks() -> dict[str, str]:
    """Return task → name of its document set, for the tasks of lm-eval whose documents evalkit has pinned."""
    suites, requests = shipped_suites().values(), request_tasks()
    return {task: suite.documents.get(task, task)
            for suite in suites for task in suite.tasks if task not in requests}  # fmt: skip


def dataset_of(task: str) -> HubSplit | None:
    """Return the hub dataset of a task whose documents evalkit has pinned; None for other tasks."""
    from evalkit.data import TASKS

    documents = pinned_tasks().get(task)
    return None if documents is None else TASKS[documents].hub


def filled(suite: str) -> tuple[str, dict[str, str]]:
    """Return the suite whose tables a suite's runs fill, and task → the task of that suite whose column it fills."""
    shipped = shipped_suites().get(suite)
    return (shipped.fills, shipped.stands_for) if shipped and shipped.fills else (suite, {})


def label_of(task: str, manifest: Mapping[str, Any] | None = None) -> Label:
    """Return a task's labels: from the run's own suite, else from evalkit's suites, else the task's name."""
    labels, short = ((manifest or {}).get(kind, {}) for kind in ("labels", "short"))
    full = brief = task
    for suite in shipped_suites().values():
        if task in suite.labels:
            full = suite.labels[task]
            brief = suite.short.get(task, full)
    if task in request_tasks():
        full = brief = request_tasks()[task].label
    return Label(labels.get(task) or full, short.get(task) or labels.get(task) or brief)


def load_suite(name: str) -> Suite:
    """Return one of evalkit's suites by name, or read a suite from a .yaml or .yml file."""
    if name in shipped_suites():
        return shipped_suites()[name]
    path = Path(name).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        raise UnknownNameError("suite", name, [*shipped_suites(), "lm_eval"])
    suite, where = _read(path), f"suite {path}"
    if suite.name in (*shipped_suites(), *_RESERVED_NAMES):
        raise UsageError(f"{where}: '{suite.name}' is the name of another suite; rename the file")
    if twice := [task for task in suite.tasks if suite.tasks.count(task) > 1]:
        raise UsageError(f"{where}: task {twice[0]} is in the groups twice; leave one out")
    for kind in ("labels", "short"):
        if unknown := [task for task in getattr(suite, kind) if task not in suite.tasks]:
            raise UsageError(f"{where}, {kind}: {UnknownNameError('task', unknown[0], suite.tasks)}")
    if reserved := [kind for kind in _SHIPPED_ONLY if getattr(suite, kind)]:
        raise UsageError(f"{where}: '{reserved[0]}' is for evalkit's own suites; leave it out")
    if unknown := [task for tasks in ([*suite.requests], *suite.forms.values()) for task in tasks
                   if task not in suite.tasks]:  # fmt: skip
        raise UsageError(f"{where}: {UnknownNameError('task', unknown[0], suite.tasks)}")
    if taken := [task for task in suite.requests if task in (*pinned_tasks(), *request_tasks())]:
        raise UsageError(f"{where}, requests: {taken[0]} is the name of one of evalkit's own tasks; use another name")
    if suite.answers:
        return _of_answers(suite, path)
    if suite.chat:
        raise UsageError(f"{where}: 'chat' is for 'answers'; choices have template: chat")
    files = suite.task_files and path.parent / suite.task_files
    requests = {task: path.parent / file for task, file in suite.requests.items()}
    return _user_defined(suite.model_copy(update={"task_files": files, "requests": requests}))


def _of_answers(suite: Suite, path: Path) -> Suite:
    """Return a user's suite of generated answers; `UsageError` if it has tasks or settings of another kind too."""
    if scored := [key for key in _SCORED_ONLY if getattr(suite, key)]:
        raise UsageError(
            f"suite {path}: '{scored[0]}' is for scored answers, and 'answers' are generated; write a suite of each"
        )
    for task in suite.tasks:
        if task not in suite.answers:
            raise UsageError(f"suite {path}, groups: {UnknownNameError('task of answers', task, suite.answers)}")
    for task in suite.answers:
        if task not in suite.tasks:
            raise UsageError(f"suite {path}: task {task} is in no group; add it, or leave out 'groups'")
    answers = {
        task: about.model_copy(update={"requests": path.parent / about.requests})
        for task, about in suite.answers.items()
    }
    return suite.model_copy(update={"answers": answers, "user_defined": True})


def _read(path: Path) -> Suite:
    content = read_settings(path, _SuiteFile, UsageError, "suite")
    return Suite(name=path.stem, sizes={group: len(tasks) for group, tasks in content.groups.items()}, **dict(content))


def requests_suite(file: Path) -> Suite:
    """Return the suite of a user's file of requests, one task that is named after the file."""
    name = file.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    if not name or name in (*shipped_suites(), *_RESERVED_NAMES, *pinned_tasks(), *request_tasks()):
        raise UsageError(f"--requests {file}: '{name}' is the name of another task or suite; rename the file")
    suite = suite_of(name, [name])
    if has_prompts(file):
        return suite.model_copy(update={"answers": {name: AnswerTask(requests=file)}})
    return suite.model_copy(update={"requests": {name: file}, "template": "requests"})


def chosen_suite(suite: str | None, requests: Path | None, tasks: Sequence[str]) -> Suite:
    """Return the suite of a name or file with the chosen tasks; or that of a file of requests, if one is given."""
    if requests is None:
        assert suite is not None
        return choose_tasks(load_suite(suite), tasks)
    if suite or tasks:
        raise UsageError(
            "--requests FILE is a task of its own; leave out --suite and --tasks, or name the file in a suite"
        )
    return requests_suite(requests)


def suite_of(name: str, tasks: Sequence[str], task_files: Path | None = None) -> Suite:
    refuse_duplicate_tasks(tasks)
    groups, sizes = {"Average": tuple(tasks)}, {"Average": len(tasks)}
    return _user_defined(Suite(name=name, groups=groups, sizes=sizes, task_files=task_files))


def _user_defined(suite: Suite) -> Suite:
    documents = {task: name for task, name in pinned_tasks().items() if task in suite.tasks and name != task}
    fewshot = {
        task: examples
        for shipped in shipped_suites().values()
        for task, examples in shipped.fewshot.items()
        if task in suite.tasks
    }
    return suite.model_copy(update={"documents": documents, "fewshot": fewshot, "user_defined": True})


def choose_tasks(suite: Suite, chosen: Sequence[str]) -> Suite:
    """Return the suite with the chosen tasks only, named or by a pattern, in its order; all tasks if none is chosen."""
    if not chosen:
        return suite
    chosen = with_matches(chosen, suite.tasks)
    check_known("task", chosen, suite.tasks)
    refuse_duplicate_tasks(chosen)
    groups = {name: tuple(task for task in tasks if task in chosen) for name, tasks in suite.groups.items()}
    # Of a task without one of its forms there is no better form
    forms = {name: tasks for name, tasks in suite.forms.items() if all(task in chosen for task in tasks)}
    return suite.model_copy(update={"groups": {name: tasks for name, tasks in groups.items() if tasks},
                                    "forms": forms})  # fmt: skip


def refuse_duplicate_tasks(tasks: Sequence[str]) -> None:
    if len(set(tasks)) != len(tasks):
        raise UsageError(f"a task is named twice in {', '.join(tasks)}; leave one out")


def with_fewshot(suite: Suite, shots: int) -> Suite:
    """Return the suite with solved examples before each question; `UsageError` if a pinned task has too few."""
    if shots and suite.requested:
        raise UsageError(
            f"the requests of {suite.requested[0]} have their own solved examples; leave out --num-fewshot"
        )
    if shots and (without := [task for task in suite.pinned if task not in suite.fewshot]):
        raise UsageError(
            f"suite {suite.name} has no few-shot examples for {', '.join(without)}: their splits are only on the "
            f"Hugging Face hub; leave these tasks out with --tasks, or take the examples from the hub with "
            f"--suite lm_eval --tasks {','.join(without)} --num-fewshot {shots}"
        )
    for task, examples in suite.fewshot.items():
        if task in suite.tasks and shots > examples.most:
            raise UsageError(f"--num-fewshot is {shots}, but {task} has at most {examples.most} examples")
    return suite.model_copy(update={"num_fewshot": shots})
