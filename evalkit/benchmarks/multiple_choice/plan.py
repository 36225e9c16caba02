"""What was asked of a suite, made into what the run is.

In: a `Request`. Out: a `ChoicePlan` with its manifest. Nothing here needs torch, so a run that is already finished is
found at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.multiple_choice.suites import Suite, choose_tasks, load_suite, with_fewshot
from evalkit.benchmarks.multiple_choice.templates import Template, load_template
from evalkit.benchmarks.request import Request, circumstances, locate_checkpoint, numerics
from evalkit.data import Documents, Library
from evalkit.data.files import did_you_mean, find
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.models.locate import ATTENTION, Checkpoint, Say
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import LM_EVAL, specification_id
from evalkit.scores.rules import Rule, find_rule
from evalkit.scores.table import SEGMENTS

if TYPE_CHECKING:
    from evalkit.benchmarks.multiple_choice.tasks import Question

DEFAULT_SUITE = "zeroshot8"


@dataclass(frozen=True)
class ChoicePlan:
    """A request with everything found that does not need torch."""

    common: Request
    suite: Suite
    template: Template
    rule: Rule
    checkpoint: Checkpoint
    library: Library
    manifest: dict[str, Any]

    @property
    def unconditional(self) -> bool:
        """Whether choices are also scored without their context."""
        return bool(self.manifest["specification"]["unconditional"])

    @cached_property
    def questions(self) -> dict[str, list[Question]]:
        """Task → its documents, up to the limit."""
        from evalkit.benchmarks.multiple_choice.tasks import load_questions

        return load_questions(self.suite, self.library, self.common.limit)

    @property
    def folder(self) -> Path:
        """The run's folder, whether it exists yet or not."""
        return run_folder(self.common.output, self.checkpoint, self.suite.name, self.template.name, self.manifest)


def plan_suite(request: Request, say: Say) -> ChoicePlan:
    """Find out what a run is, and refuse what cannot be.

    Raises:
        EvalkitError: whatever is wrong with the request, the checkpoint or the documents.
    """
    if request.attention not in ATTENTION:
        raise UnknownNameError("attention implementation", request.attention, ATTENTION)
    suite = with_fewshot(
        choose_tasks(load_suite(request.suite or DEFAULT_SUITE), request.tasks), request.num_fewshot or 0
    )
    template = load_template(request.template or "inst")
    rule = _rule_of(request, template)
    checkpoint = locate_checkpoint(request, say)
    library = Library(request.data_dir, request.allow_unofficial_data, say)
    _check_data_dir(request, suite, library)
    specification, found = _specification(request, suite, template, rule, checkpoint, library, say)
    manifest = {
        "id": specification_id(specification),
        "kind": "multiple_choice",
        "specification": specification,
        "rule": rule.name,
        "groups": {group: list(tasks) for group, tasks in suite.groups.items()},
        "group_sizes": {group: suite.sizes[group] for group in suite.groups},
        **found,
        "template": asdict(template),
        **circumstances(request, checkpoint),
    }
    return ChoicePlan(request, suite, template, rule, checkpoint, library, manifest)


def asks_lm_eval(request: Request, say: Say) -> bool:
    """Whether a request is for lm-eval's tasks and not for a suite; says so where the user did not.

    Raises:
        UsageError: a folder of task files beside a suite, which has its own.
    """
    if request.suite == LM_EVAL:
        return True
    if request.suite is not None:
        if request.include_path is not None:
            raise UsageError(f"--include-path adds lm-eval tasks; suite {request.suite} has its own: leave out --suite")
        return False
    known = load_suite(DEFAULT_SUITE).tasks
    if others := [task for task in request.tasks if task not in known]:
        say(f"{', '.join(others)}: not in suite {DEFAULT_SUITE}, so this is a run of lm-eval's tasks, with its prompts")
    elif request.include_path is not None:
        say("--include-path: this is a run of lm-eval's tasks, with its prompts")
    return bool(others) or request.include_path is not None


def _check_data_dir(request: Request, suite: Suite, library: Library) -> None:
    """A folder that holds none of the documents was meant to hold some."""
    names = {suite.documents.get(task, task) for task in suite.tasks}
    if request.data_dir is not None and all(library.where(name).source != "data-dir" for name in names):
        hint = did_you_mean(
            request.data_dir.expanduser(), lambda folder: sum(find(folder, name) is not None for name in names)
        )
        raise DataError(
            f"--data-dir {request.data_dir} holds no documents of {', '.join(sorted(names))}; "
            f"expected files named <task>.jsonl{hint}"
        )


def _rule_of(request: Request, template: Template) -> Rule:
    """The rule asked for, or the template's: the paper's where whole sequences are scored, else lm-eval's."""
    whole = set(template.score) == set(SEGMENTS)
    rule = find_rule(request.rule or ("ppl" if whole else "acc"))
    absent = [s for s in rule.segments if s not in template.score and s != "unconditional"]
    # A template without an end token or an instruction has nothing to score there
    present = {part.segment for part in template.parts} | ({"end"} if template.eos or template.chat else set())
    if lacking := [s for s in absent if template.chat or s in present]:
        raise UsageError(
            f"rule {rule.name} needs the log-likelihood of {', '.join(lacking)}, "
            f"which template {template.name} does not score; use --template inst or another rule"
        )
    return rule


def _specification(
    request: Request,
    suite: Suite,
    template: Template,
    rule: Rule,
    checkpoint: Checkpoint,
    library: Library,
    say: Say,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that determines the numbers, and where each task's documents and few-shot examples came from."""
    found = {"documents": {task: library.load(suite.documents.get(task, task)) for task in suite.tasks}}
    if suite.num_fewshot:
        found["examples"] = {task: library.load(suite.fewshot[task].documents) for task in suite.tasks}
    specification = {
        **numerics(request, checkpoint, say),
        "suite": suite.name,
        **{kind: {task: loaded.content_hash for task, loaded in sets.items()} for kind, sets in found.items()},
        "template": template.content_hash,
        "unconditional": "unconditional" in rule.segments,
        "num_fewshot": suite.num_fewshot,
    }
    sources = {kind: {task: _source_of(loaded) for task, loaded in sets.items()} for kind, sets in found.items()}
    return specification, sources


def _source_of(documents: Documents) -> dict[str, Any]:
    return {"source": documents.source, "official": documents.official, "count": len(documents.records)}
