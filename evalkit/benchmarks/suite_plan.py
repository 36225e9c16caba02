"""Plan of a multiple-choice run.

In: a `SuiteRequest`. Out: a `ChoicePlan` with its manifest. Nothing here needs torch, so a finished run is found at
once. From top to bottom: the suite of a request, the plan with its documents and rule, and the parts that are scored:
each task under each prompt, of which most runs have one.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.base import RequestPlan
from evalkit.benchmarks.request import SuiteRequest, numerics, plain_manifest, shared_library
from evalkit.cache import remembered
from evalkit.data import Library
from evalkit.data.requests import request_tasks
from evalkit.data.sampling import DocumentSelection, number_of, repeated_prompts
from evalkit.display import Say, doing
from evalkit.errors import DataError, UsageError
from evalkit.models.loading.locate import Checkpoint
from evalkit.requests.requests import RunRequests
from evalkit.runs.continuous import BITS_PER_BYTE, outcome_of
from evalkit.runs.finding import run_folder
from evalkit.runs.rules import Rule, find_rule, of_task
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.prompt_sets import PromptSet, in_orders, load_prompts, orders_of
from evalkit.suites.questions import by_subtask, selected_documents
from evalkit.suites.suites import (
    DEFAULT_SUITE,
    Suite,
    choose_tasks,
    chosen_suite,
    load_suite,
    suite_of,
    with_fewshot,
)
from evalkit.suites.templates import Template, load_template

if TYPE_CHECKING:
    from evalkit.suites.lm_eval_tasks import RandomState, TaskSet
    from evalkit.suites.questions import Question
    from evalkit.suites.request_files import Requests


def resolve_suite(request: SuiteRequest, say: Say) -> Suite | None:
    """Return the suite of a request; None if the request is for lm-eval's tasks with their own prompts and metrics.

    Tasks outside the default suite are run as lm-eval's tasks, unless a template, a rule or prompts are given: then
    they form a suite. `say` is called if the user has not chosen between the two.
    """
    if request.requests is not None:
        return chosen_suite(request.suite, request.requests, request.tasks)
    if request.suite is not None:
        if request.include_path is not None:
            raise UsageError(
                f"--include-path adds lm-eval tasks, but suite {request.suite} has its own; leave out --suite, or name "
                "the folder in your own suite file (task_files)"
            )
        return chosen_suite(request.suite, None, request.tasks)
    default = load_suite(DEFAULT_SUITE)
    others = [task for task in request.tasks if task not in default.tasks]
    if not others and request.include_path is None:
        return choose_tasks(default, request.tasks)
    are_requests = any(task in request_tasks() for task in request.tasks)
    if request.template is not None or request.rule is not None or request.vary or are_requests:
        if not request.tasks:
            raise UsageError("lm-eval's tasks must be named: --tasks sciq,arc_easy")
        return suite_of("tasks", request.tasks, request.include_path)
    why = f"{', '.join(others)}: not in suite {DEFAULT_SUITE}" if others else "--include-path"
    say(
        f"{why}, so this runs lm-eval's tasks with their prompts and metrics; give --template plain or inst to run "
        "multiple-choice tasks under every rule of evalkit"
    )
    return None


def plan_suite(request: SuiteRequest, suite: Suite, say: Say) -> ChoicePlan:
    """Validate a request for a suite and make its plan; its template, rule and examples override the suite's."""
    suite = with_fewshot(suite, suite.num_fewshot if request.num_fewshot is None else request.num_fewshot)
    are_requests = suite.tasks == suite.requested
    template = load_template(request.template or suite.template or ("requests" if are_requests else "inst"))
    prompts = load_prompts(request.vary, template)
    checkpoint = request.model.locate(say)
    library = shared_library(request, say)
    _check_data_dir(request, suite, library)
    others: Mapping[str, TaskSet] = {}
    requests: Mapping[str, Requests] = {}
    randomness = None
    with doing("reading documents"):
        if suite.others or suite.task_files is not None:
            from evalkit.suites.lm_eval_tasks import random_state
            from evalkit.suites.task_questions import load_others

            key = (suite.others, str(suite.task_files), suite.num_fewshot, request.data_dir)
            others = remembered("tasks", key, lambda: load_others(suite, library, say))
        if suite.requested:
            from evalkit.suites.request_files import load_requests

            files = suite.requested, str(suite.requests), request.data_dir, request.allow_unofficial_data
            requests = remembered("requests", files, lambda: load_requests(suite, library, say))
        hashes, sources = _documents(suite, library, others, requests, request.selection)
        if others:
            randomness = remembered("randomness", key, random_state)
    rule, unconditional = _own_key(request.rule or suite.rule, prompts.templates.values(), suite.tasks, requests)
    if request.vary and outcome_of(rule) is not None:
        raise UsageError(
            f"--vary compares accuracies under several prompts, and suite {suite.name} is measured in {rule}; leave "
            "out --vary, or choose --tasks with choices"
        )
    specification = {
        **numerics(request.model, checkpoint, request.limit, say),
        **request.selection.specification,
        "suite": suite.name,
        **hashes,
        "template": template.content_hash,
        "unconditional": unconditional,
        # Requests have their own solved examples
        "num_fewshot": None if suite.requested == suite.tasks else suite.num_fewshot,
    }
    groups = {group: list(tasks) for group, tasks in suite.groups.items()}
    if suite.user_defined:
        specification["groups"] = groups
    if request.control:
        specification["control"] = request.control
    if suite.task_files is not None:
        from evalkit.suites.task_identity import code_hash

        specification["code"] = code_hash(suite.task_files)
    if request.vary:
        specification["prompts"] = prompts.specification
    more = {
        "rule": rule,
        "groups": groups,
        "group_sizes": {group: suite.sizes[group] for group in groups},
        **sources,
        **({"labels": suite.labels, "short": suite.short} if suite.user_defined else {}),
        "template": asdict(template),
        **({"forms": {name: list(tasks) for name, tasks in suite.forms.items()}} if suite.forms else {}),
    }
    kind = "prompt_variants" if request.vary else "multiple_choice"
    manifest = plain_manifest(kind, request, checkpoint, specification, **more)
    if request.vary:
        manifest["prompts"] = prompts.words
    return ChoicePlan(request, suite, prompts, checkpoint, library, others, requests, manifest, randomness)


def _own_key(
    requested: str | None, templates: Collection[Template], tasks: Sequence[str], requests: Mapping[str, Requests]
) -> tuple[str, bool | list[str]]:
    """Return the run's own rule or outcome, and the tasks of which it needs unconditional log-likelihoods.

    The outcome of documents with one gold answer is bits per byte. True: of all tasks; False: of none.
    """
    single = [task for task in tasks if task in requests and requests[task].single]
    key = requested or (BITS_PER_BYTE if single else None)
    if key is not None and (outcome_and_rule := outcome_of(key)) is not None:
        outcome, _ = outcome_and_rule
        if outcome.documents == "single" and len(single) < len(tasks):
            raise UsageError(f"outcome {outcome.name} is of documents with one gold answer; use another --rule")
        if outcome.documents == "choices" and single:
            raise UsageError(
                f"outcome {outcome.name} compares choices, and documents of {single[0]} have one gold answer"
            )
        return key, "ll_unconditional" in outcome.columns
    if single:
        raise UsageError(
            f"rule {key} chooses between several answers, and documents of {single[0]} have one gold answer; use "
            f"--rule {BITS_PER_BYTE}, or other --tasks"
        )
    rule = _rule_of(key, templates)
    if rule.by_task is None:
        return rule.name, "unconditional" in rule.segments
    return rule.name, [task for task in tasks if "unconditional" in of_task(rule, task).segments] or False


def _rule_of(requested: str | None, templates: Collection[Template]) -> Rule:
    """Return the requested rule; default: the paper's if every template scores whole sequences, else lm-eval's."""
    rule = find_rule(requested or ("ppl" if all(template.scores_all for template in templates) else "acc"))
    for template in templates:
        absent = [s for s in rule.segments if s not in template.score and s != "unconditional"]
        # A segment that the template does not have, such as an end token, needs no score
        present = {part.segment for part in template.parts} | ({"end"} if template.eos or template.chat else set())
        if unscored := [s for s in absent if template.chat or s in present]:
            raise UsageError(
                f"rule {rule.name} needs the log-likelihood of {', '.join(unscored)}, "
                f"which template {template.name} does not score; use --template inst or another rule"
            )
    return rule


def _check_data_dir(request: SuiteRequest, suite: Suite, library: Library) -> None:
    """Raise an error if --data-dir has no documents of the suite, which would read other ones unnoticed."""
    if request.data_dir is None:
        return
    names = {suite.documents.get(task, task) for task in suite.pinned}
    if all(library.where(name).source != "data-dir" for name in names):
        raise DataError(
            f"--data-dir {request.data_dir} has no documents of {', '.join(sorted(names) or suite.tasks)}; expected "
            "files named <task>.jsonl of evalkit's own tasks"
        )


def _documents(
    suite: Suite,
    library: Library,
    others: Mapping[str, TaskSet],
    requests: Mapping[str, Requests],
    selection: DocumentSelection,
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, Any]]]:
    """Return the hashes and the sources of the tasks' "documents" and, in few-shot runs, of their "examples"."""
    hashes: dict[str, dict[str, str]] = {}
    sources: dict[str, dict[str, Any]] = {}
    for kind in ("documents", "examples") if suite.num_fewshot else ("documents",):
        hashes[kind], sources[kind] = {}, {}
        for task in suite.pinned:
            name = suite.fewshot[task].documents if kind == "examples" else suite.documents.get(task, task)
            loaded = library.load(name)
            hashes[kind][task] = loaded.content_hash
            count = len(loaded.records)
            about = {"source": loaded.source, "official": loaded.official, "total": count, "count": count}
            sources[kind][task] = about
    for task, other in others.items():
        from evalkit.suites.task_questions import identity_of

        hashes["documents"][task], sources["documents"][task] = identity_of(other, library)
    for task, given in requests.items():
        hashes["documents"][task], sources["documents"][task] = given.content_hash, given.provenance
    for task in suite.tasks:
        about = sources["documents"].pop(task)
        sources["documents"][task] = about | {"count": number_of(selection, about["total"])}
    return hashes, sources


@dataclass(frozen=True)
class ChoicePlan(RequestPlan):
    """A validated request with its suite, documents and manifest, made without torch."""

    request: SuiteRequest
    suite: Suite
    prompts: PromptSet
    checkpoint: Checkpoint
    library: Library
    others: Mapping[str, TaskSet]
    request_files: Mapping[str, Requests]
    manifest: dict[str, Any]
    randomness: RandomState | None
    """State in which the questions of `others` are built; None without them."""

    @property
    def template(self) -> Template:
        return next(iter(self.prompts.templates.values()))

    def unconditional(self, task: str) -> bool:
        """Return whether a task's choices are also scored without the question."""
        of = self.manifest["specification"]["unconditional"]
        return task in of if isinstance(of, list) else bool(of)

    @property
    def folder(self) -> Path:
        template = self.template.name + ("-varied" if self.request.vary else "")
        return run_folder(self.request.output, self.checkpoint, self.suite.name, template, self.manifest)

    @property
    def documents_key(self) -> str:
        specification = self.manifest["specification"]
        names = ("suite", "documents", "examples", "num_fewshot", "limit", "sample", "seed", "unconditional", "code",
                 "control")  # fmt: skip
        about = {name: specification.get(name) for name in names} | {"tasks": list(self.suite.tasks)}
        return json.dumps(about, sort_keys=True)

    @cached_property
    def questions(self) -> dict[str, list[Question]]:
        from evalkit.suites.question_loading import pinned_questions

        def load() -> dict[str, list[Question]]:
            with doing("building questions"):
                selection = self.request.selection
                if self.randomness is None:
                    return pinned_questions(
                        self.suite, self.library, selection, self.request_files, self.request.control
                    )
                self.randomness.restore()
                return self.selected(selection)

        return remembered("questions", self.documents_key, load)

    @cached_property
    def caveats(self) -> dict[str, list[str]]:
        """Task → what makes its accuracy doubtful."""
        caveats = {}
        for task, questions in self.questions.items():
            caveats[task] = repeated_prompts((question.contexts, question.continuations) for question in questions)
        return caveats

    def selected(self, selection: DocumentSelection, estimate: int | None = None) -> dict[str, list[Question]]:
        """Return the questions of a selection of documents; arguments as of `question_loading.load_questions`."""
        from evalkit.suites.question_loading import load_questions

        about = self.others, estimate, self.request_files, self.request.control
        return load_questions(self.suite, self.library, selection, *about)

    @cached_property
    def requests(self) -> RunRequests:
        message = self.prompts.message(
            {part.task: len(part.orders) for part in self.parts if part.template is self.template}
        )
        tokenizer = self.manifest["specification"]["checkpoint"]["tokenizer"]
        return RunRequests(self.steps, message, tokenizer, self.request.token_budget)

    def sampled(self, sample: int) -> RunRequests:
        selection = self.request.selection
        parts = self.parts_of(self.selected(selection, sample))
        return RunRequests([replace(part, sizes=self._sizes(part, selection)) for part in parts])

    def _sizes(self, part: ChoiceRequests, selection: DocumentSelection) -> dict[str, int]:
        """Return subtask → number of its documents in a selection."""
        every = {name: members[0].leaf.documents for name, members in by_subtask(part.questions).items()}
        return {name: len(chosen) for name, chosen in selected_documents(part.task, every, selection).items()}

    def shown_prompts(self, count: int, say: Say) -> Iterator[str]:
        from evalkit.benchmarks.shown_prompts import shown_prompts

        return shown_prompts(self, count, say)

    @cached_property
    def parts(self) -> list[ChoiceRequests]:
        return self.parts_of(self.questions)

    @cached_property
    def steps(self) -> list[ChoiceRequests]:
        """The parts by the first sample that reads their documents; the batches of each are planned by themselves."""
        steps = [step for part in self.parts for step in self._steps_of(part)]
        return [replace(step, settings=self._settings(step)) for step in steps]

    def _settings(self, part: ChoiceRequests) -> tuple[Any, ...]:
        """Return what determines the requests of a part: several orders of the choices are more contexts."""
        count = len(part.questions[0].contexts)
        return self.documents_key, part.journal, count, part.template.content_hash

    def _steps_of(self, part: ChoiceRequests) -> Iterator[ChoiceRequests]:
        samples: Sequence[DocumentSelection] = self.request.selection.steps
        if len(samples) == 1:
            yield part
            return
        subjects = by_subtask(part.questions)
        sizes = {name: members[0].leaf.documents for name, members in subjects.items()}
        first_step: dict[tuple[str, int], int] = {}
        for step, sample in enumerate(samples):
            for name, selected in selected_documents(part.task, sizes, sample).items():
                for number in selected:
                    first_step.setdefault((name, number), step)
        numbers = self._numbers(part.task)
        of_step: list[list[Question]] = [[] for _ in samples]
        for question in part.questions:
            number = numbers.get(question.label, question.doc_id)
            of_step[first_step[question.subtask, number]].append(question)
        first = 0
        for step, questions in enumerate(of_step):
            if questions:
                yield replace(part, questions=questions, step=step, first=first)
            first += len(questions)

    def _numbers(self, task: str) -> dict[str, int]:
        """Return label → number within the subtask of the documents of a request file, whose ids are its own."""
        if task not in self.request_files:
            return {}
        subjects = by_subtask(self.request_files[task].questions()).values()
        return {question.label: number for members in subjects for number, question in enumerate(members)}

    def parts_of(self, questions: Mapping[str, Sequence[Question]]) -> list[ChoiceRequests]:
        """Return the parts of tasks: each under each template; under the run's own with the choices of all orders."""
        parts = []
        for task, members in questions.items():
            orders = orders_of(members, self.prompts.choice_orders)
            for prompt, template in self.prompts.templates.items():
                of_prompt = orders if template is self.template else orders[:1]
                ordered = [in_orders(question, of_prompt) for question in members]
                part = ChoiceRequests(task, template, ordered, prompt, of_prompt, self.unconditional(task))
                parts.append(part)
        only_orders = self.prompts.choice_orders > 1 and len(self.prompts.templates) == 1
        if only_orders and all(len(part.orders) == 1 for part in parts):
            raise UsageError(
                f"--vary choice_order: the prompts of {', '.join(questions)} do not list their options by letter, so "
                "that they have no other order; add a task such as mmlu, or another factor: --vary "
                "template,choice_order"
            )
        return parts
