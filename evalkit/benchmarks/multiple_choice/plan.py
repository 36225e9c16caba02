"""Plan of a multiple-choice run.

In: a `SuiteRequest`. Out: a `ChoicePlan` with its manifest. Nothing here needs torch, so a finished run is found at
once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.suites import Suite, choose_tasks, load_suite, suite_of, with_fewshot
from evalkit.benchmarks.multiple_choice.templates import Template, load_template
from evalkit.benchmarks.request import DEFAULT_SUITE, SuiteRequest, numerics, provenance, remembered, shared_library
from evalkit.data import Documents, Library
from evalkit.data.files import did_you_mean, find
from evalkit.display import Say, doing
from evalkit.errors import DataError, UsageError
from evalkit.models.locate import Checkpoint
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL, specification_id
from evalkit.runs.rules import Rule, find_rule

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.calls import RandomState
    from evalkit.benchmarks.lm_eval.catalogue import TaskSet
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.runs.journal import FinishedRows, Key


@dataclass(frozen=True)
class TaskPart:
    """Documents of a task under one template: the whole task, unless a run has several prompts."""

    task: str
    template: Template
    questions: Sequence[Question]
    prompt: str = ""
    """Name of the prompt, if a run has several."""

    @property
    def journal(self) -> str:
        """Name of the part in the journal."""
        return f"{self.task} {self.prompt}" if self.prompt else self.task

    def key_of(self, question: Question) -> Key:
        """Return a document's key in the journal."""
        return self.journal, question.subtask, question.doc_id

    def is_missing(self, finished: FinishedRows) -> bool:
        """Return whether a document has no scores."""
        return any(self.key_of(question) not in finished for question in self.questions)


@dataclass(frozen=True)
class ChoicePlan:
    """A validated request with its suite, documents and manifest, made without torch."""

    request: SuiteRequest
    suite: Suite
    template: Template
    rule: Rule
    checkpoint: Checkpoint
    library: Library
    others: Mapping[str, TaskSet]
    """The suite's tasks that are not pinned, as loaded by lm-eval."""
    manifest: dict[str, Any]
    randomness: RandomState | None
    """State in which the questions of `others` are built; None without them."""

    @property
    def unconditional(self) -> bool:
        """Whether to score choices without their context too."""
        return bool(self.manifest["specification"]["unconditional"])

    @cached_property
    def questions(self) -> dict[str, list[Question]]:
        """Task → its selected documents."""
        return remembered("questions", self.documents_key, self._load_questions)

    @property
    def parts(self) -> list[TaskPart]:
        """What is scored: the documents of each task under the template."""
        return [TaskPart(task, self.template, members) for task, members in self.questions.items()]

    @property
    def message(self) -> str:
        """See `Planned.message`."""
        return ""

    @property
    def documents_key(self) -> str:
        """What the questions depend on."""
        specification = self.manifest["specification"]
        names = ("suite", "documents", "examples", "num_fewshot", "limit", "sample", "seed", "unconditional", "code")
        about = {name: specification.get(name) for name in names} | {"tasks": list(self.suite.tasks)}
        return json.dumps(about, sort_keys=True)

    def _load_questions(self) -> dict[str, list[Question]]:
        with doing("building questions"):
            from evalkit.benchmarks.multiple_choice.stored import pinned_questions
            from evalkit.benchmarks.multiple_choice.tasks import load_questions

            if self.randomness is None:
                return pinned_questions(self.suite, self.library, self.request.selection)
            self.randomness.restore()
            return load_questions(self.suite, self.library, self.request.selection, self.others)

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        return run_folder(self.request.output, self.checkpoint, self.suite.name, self.template.name, self.manifest)


def plan_suite(request: SuiteRequest, suite: Suite, say: Say) -> ChoicePlan:
    """Validate a request for a suite and make its plan.

    Args:
        request: its template, rule and number of examples override the suite's.
        suite: see `resolve_suite`.
        say: called with messages for the user.

    Raises:
        EvalkitError: the request, the checkpoint or the documents are invalid.
    """
    shots = suite.num_fewshot if request.num_fewshot is None else request.num_fewshot
    suite = with_fewshot(suite, shots)
    template = load_template(request.template or suite.template or "inst")
    rule = rule_of(request.rule or suite.rule, template)
    checkpoint = request.model.locate(say)
    library = shared_library(request, say)
    _check_data_dir(request, suite, library)
    _refuse_shadowing_tasks(suite)
    with doing("reading documents"):
        key = (suite.others, str(suite.task_files), suite.num_fewshot, request.data_dir)
        others = remembered("tasks", key, lambda: _load_others(suite, library, say))
        specification, found = _specification(request, suite, template, rule, checkpoint, library, others, say)
        randomness = remembered("randomness", key, _random_state) if others else None
    manifest = {
        "id": specification_id(specification),
        "kind": "multiple_choice",
        "specification": specification,
        "rule": rule.name,
        "groups": {group: list(tasks) for group, tasks in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        **found,
        **({"labels": suite.labels, "short": suite.short} if suite.user_defined else {}),
        "template": asdict(template),
        **provenance(request.model, checkpoint),
    }
    return ChoicePlan(request, suite, template, rule, checkpoint, library, others, manifest, randomness)


def resolve_suite(request: SuiteRequest, say: Say) -> Suite | None:
    """Return the suite of a request; None if the request is for lm-eval's tasks with their own prompts and metrics.

    Tasks outside the default suite are run as lm-eval's tasks, unless a template or a rule is given: then they form a
    suite. `say` is called if the user has not chosen between the two.

    Raises:
        UsageError: the options contradict each other.
    """
    chooses = request.template not in (None, "plain") or request.rule is not None
    if request.suite not in (None, LM_EVAL):
        if request.include_path is not None:
            raise UsageError(
                f"--include-path adds lm-eval tasks, but suite {request.suite} has its own; leave out --suite, or name "
                "the folder in your own suite file (task_files)"
            )
        return choose_tasks(load_suite(str(request.suite)), request.tasks)
    default = load_suite(DEFAULT_SUITE)
    others = [task for task in request.tasks if task not in default.tasks]
    if request.suite is None and not others and request.include_path is None:
        return choose_tasks(default, request.tasks)
    if chooses and request.suite == LM_EVAL:
        option = f"--template {request.template}" if request.rule is None else f"--rule {request.rule}"
        raise UsageError(
            f"{option}: --suite lm_eval runs tasks with their own prompts and metrics; leave out --suite to run "
            "multiple-choice tasks with evalkit's"
        )
    if chooses:
        if not request.tasks:
            raise UsageError("lm-eval's tasks must be named: --tasks sciq,arc_easy")
        return suite_of("tasks", request.tasks, request.include_path)
    if request.suite is None:
        why = f"{', '.join(others)}: not in suite {DEFAULT_SUITE}" if others else "--include-path"
        say(
            f"{why}, so this runs lm-eval's tasks with their prompts and metrics; give --template inst or --rule to "
            "run multiple-choice tasks with evalkit's"
        )
    return None


def _random_state() -> RandomState:
    from evalkit.benchmarks.lm_eval.calls import random_state

    return random_state()


def _load_others(suite: Suite, library: Library, say: Say) -> dict[str, TaskSet]:
    """Load the tasks that are not pinned, one by one; raise a `UsageError` for tasks that are not multiple choice."""
    if not suite.others:
        return {}
    from evalkit.benchmarks.lm_eval.catalogue import load_tasks
    from evalkit.benchmarks.lm_eval.plan import set_seeds
    from evalkit.benchmarks.multiple_choice.tasks import refuse_without_choices

    set_seeds()
    found = {}
    for task in suite.others:
        found[task] = load_tasks((task,), suite.task_files, suite.num_fewshot, library, say)
        refuse_without_choices(task, found[task].tasks)
        for leaf in found[task].tasks.values():
            # The specification includes the content of the examples only if their number is set
            leaf.set_config(key="num_fewshot", value=suite.num_fewshot)
    return found


def _refuse_shadowing_tasks(suite: Suite) -> None:
    """Raise a `UsageError` if a task in the user's folder has the name of a pinned task."""
    if suite.task_files is None:
        return
    from evalkit.benchmarks.lm_eval.catalogue import names_in

    defined = names_in(suite.task_files)
    if clash := [task for task in suite.pinned if task in defined]:
        raise UsageError(
            f"task {clash[0]} is in {suite.task_files} and among evalkit's own tasks; rename the task in your folder"
        )


def _check_data_dir(request: SuiteRequest, suite: Suite, library: Library) -> None:
    """Raise an error if --data-dir has no documents of the suite, which is a mistake."""
    names = {suite.documents.get(task, task) for task in suite.pinned}
    if request.data_dir is not None and not names:
        raise UsageError(
            f"--data-dir {request.data_dir}: is for evalkit's own tasks, and none of these is one "
            f"({', '.join(suite.tasks)}); leave it out, since a task file names its own documents"
        )
    if request.data_dir is not None and all(library.where(name).source != "data-dir" for name in names):
        hint = did_you_mean(
            request.data_dir.expanduser(), lambda folder: sum(find(folder, name) is not None for name in names)
        )
        raise DataError(
            f"--data-dir {request.data_dir} has no documents of {', '.join(sorted(names))}; "
            f"expected files named <task>.jsonl{hint}"
        )


def rule_of(requested: str | None, template: Template) -> Rule:
    """Return the requested rule; default: the paper's if the template scores whole sequences, else lm-eval's.

    Raises:
        UsageError: there is no such rule, or the template does not score what it needs.
    """
    rule = find_rule(requested or ("ppl" if template.scores_all else "acc"))
    absent = [s for s in rule.segments if s not in template.score and s != "unconditional"]
    # A segment that the template does not have, such as an end token, needs no score
    present = {part.segment for part in template.parts} | ({"end"} if template.eos or template.chat else set())
    if unscored := [s for s in absent if template.chat or s in present]:
        raise UsageError(
            f"rule {rule.name} needs the log-likelihood of {', '.join(unscored)}, "
            f"which template {template.name} does not score; use --template inst or another rule"
        )
    return rule


def _specification(
    request: SuiteRequest,
    suite: Suite,
    template: Template,
    rule: Rule,
    checkpoint: Checkpoint,
    library: Library,
    others: Mapping[str, TaskSet],
    say: Say,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification, and the sources of each task's documents and few-shot examples."""
    found = {"documents": {task: library.load(suite.documents.get(task, task)) for task in suite.pinned}}
    if suite.num_fewshot:
        found["examples"] = {task: library.load(suite.fewshot[task].documents) for task in suite.pinned}
    hashes = {kind: {task: loaded.content_hash for task, loaded in sets.items()} for kind, sets in found.items()}
    sources = {kind: {task: _source_of(loaded) for task, loaded in sets.items()} for kind, sets in found.items()}
    for task, loaded in others.items():
        hashes["documents"][task], sources["documents"][task] = _about(loaded, library)
    sources["documents"] = {task: sources["documents"][task] for task in suite.tasks}
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        **request.selection.specification,
        "suite": suite.name,
        **hashes,
        "template": template.content_hash,
        "unconditional": "unconditional" in rule.segments,
        "num_fewshot": suite.num_fewshot,
    }
    if suite.user_defined:
        specification["groups"] = {group: list(tasks) for group, tasks in suite.groups.items()}
    if suite.task_files is not None:
        from evalkit.benchmarks.lm_eval.plan import code_hash

        specification["code"] = code_hash(suite.task_files)
    return specification, sources


def _about(loaded: TaskSet, library: Library) -> tuple[str, dict[str, Any]]:
    """Return the hash of lm-eval's task with its documents, and the source of the documents."""
    from evalkit.benchmarks.lm_eval.plan import source_of, task_specification

    leaves = loaded.tasks
    sources = [source_of(leaf, name in loaded.pinned, library) for name, leaf in leaves.items()]
    contents = [[name, task_specification(leaf, None)] for name, leaf in leaves.items()]
    text = json.dumps(contents, sort_keys=True, ensure_ascii=False)
    about = {
        "source": "; ".join(dict.fromkeys(one["source"] for one in sources)),
        "official": all(one["official"] for one in sources),
        "count": sum(one["count"] for one in sources),
    }
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), about


def _source_of(documents: Documents) -> dict[str, Any]:
    return {"source": documents.source, "official": documents.official, "count": len(documents.records)}
