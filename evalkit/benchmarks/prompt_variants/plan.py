"""Plan of a run under several prompts.

In: a `SuiteRequest` with `vary`. Out: a `VariedPlan` with its manifest. Nothing here needs torch.

Prompts that begin alike are scored in one tree: the orders of a document's options, which share instruction, preamble
and question. Other prompts differ from their first words on, so each is planned like a run of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import click
from pydantic import Field, model_validator

from evalkit.benchmarks.multiple_choice.encoded import prompt_text
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, TaskPart, plan_suite, resolve_suite, rule_of
from evalkit.benchmarks.multiple_choice.prompts import Prompter
from evalkit.benchmarks.multiple_choice.scoring import task_tokens
from evalkit.benchmarks.multiple_choice.tasks import Question, load_questions
from evalkit.benchmarks.multiple_choice.templates import Template, load_template
from evalkit.benchmarks.prompt_variants import PROMPT_VARIANTS
from evalkit.benchmarks.prompt_variants.orders import Order, in_orders, order_name, orders_of, under_order
from evalkit.benchmarks.request import SuiteRequest, TaskTokens
from evalkit.benchmarks.session import load_model
from evalkit.data.sampling import FirstDocuments
from evalkit.display import Say
from evalkit.errors import UnknownNameError, UsageError
from evalkit.escape import counted
from evalkit.inputs.validated import FileSettings, Listed, NonEmpty, read_settings
from evalkit.models.spec import window_of
from evalkit.paths import resource
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import specification_id

FACTORS = {"template": "templates", "choice_order": "choice_orders", "system_prompt": "system_prompts"}
"""Factor, as on the command line → its key in a file."""
_NO_SYSTEM = "no system prompt"
_MOST = 64
"""Most templates, or system prompts, of a set."""


@dataclass(frozen=True)
class PromptVariant:
    """A prompt other than the run's own."""

    name: str
    """Unique in its set, such as "dialogue" or "system-2"."""
    template: Template
    words: str
    """In what it differs from the run's own prompt."""


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run."""

    base: Template
    """The run's own template."""
    variants: tuple[PromptVariant, ...]
    """Other templates, and the base with other system prompts."""
    choice_orders: int
    """Number of rotations of listed options under the base, the original order among them; 1: that order alone."""

    @property
    def templates(self) -> dict[str, Template]:
        """Return prompt → its template, the base first; without orders of the options."""
        return {self.base.name: self.base} | {one.name: one.template for one in self.variants}

    @property
    def specification(self) -> dict[str, Any]:
        """Return what determines the prompts, as part of a run's specification."""
        hashes = {name: template.content_hash for name, template in self.templates.items()}
        return {"templates": hashes, "choice_orders": self.choice_orders}


class _VaryFile(FileSettings):
    """Schema of a set's file, see the module docstring."""

    templates: Annotated[Listed[NonEmpty], Field(max_length=_MOST)] = ()
    system_prompts: Annotated[Listed[str], Field(max_length=_MOST)] = ()
    choice_orders: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _varies_something(self) -> Self:
        if not (self.templates or self.system_prompts or self.choice_orders > 1):
            raise ValueError(f"it varies nothing; give at least one of {', '.join(FACTORS.values())}")
        return self


def load_prompts(vary: Sequence[str], base: Template) -> PromptSet:
    """Return the prompts of a run."""
    if files := [name for name in vary if Path(name).suffix in (".yaml", ".yml")]:
        if len(vary) > 1:
            raise UsageError(f"--vary {','.join(vary)}: give {files[0]} alone; a file names its own factors")
        path = Path(files[0]).expanduser()
        return _prompt_set(f"--vary {path}", read_settings(path, _VaryFile, UsageError, "set of prompts"), path, base)
    for name in vary:
        if name not in FACTORS:
            raise UnknownNameError("factor of --vary", name, [*FACTORS, "a YAML file"])
    path = resource("configs", "variants", "default.yaml")
    every = read_settings(path, _VaryFile, UsageError, "set of prompts")
    chosen = _VaryFile(**{FACTORS[name]: getattr(every, FACTORS[name]) for name in vary})
    return _prompt_set(f"--vary {','.join(vary)}", chosen, path, base)


def _prompt_set(where: str, content: _VaryFile, path: Path, base: Template) -> PromptSet:
    found = [*_templates(content.templates, path.parent), *_system_prompts(where, content.system_prompts, base)]
    known = {base.name: base.content_hash}
    variants = []
    for one in found:
        if one.template.content_hash == base.content_hash:
            continue  # the run's own prompt, which is in the set anyway
        if one.name in known:
            raise UsageError(f"{where}: two prompts are named '{one.name}'; leave one out, or rename the template file")
        if one.template.content_hash in known.values():
            if one.words == _NO_SYSTEM:
                continue  # instruction-line without it is no-instruction
            same = next(name for name, content_hash in known.items() if content_hash == one.template.content_hash)
            raise UsageError(f"{where}: '{one.name}' is the same prompt as '{same}'; leave one out")
        known[one.name] = one.template.content_hash
        variants.append(one)
    if not variants and content.choice_orders == 1:
        raise UsageError(f"{where}: every prompt is template {base.name} itself; add another one")
    return PromptSet(base, tuple(variants), content.choice_orders)


def _templates(names: Sequence[str], folder: Path) -> Iterator[PromptVariant]:
    for name in names:
        is_file = Path(name).suffix in (".yaml", ".yml")
        template = load_template(str(folder / Path(name).expanduser()) if is_file else name)
        yield PromptVariant(template.name, template, f"template: {template.description or template.name}")


def _system_prompts(where: str, texts: Sequence[str], base: Template) -> Iterator[PromptVariant]:
    if texts and not (base.chat or any("{system}" in part.text for part in base.parts)):
        raise UsageError(
            f"{where}: template {base.name} has no {{system}}, so system prompts cannot be varied; use --template "
            "inst, or leave out system_prompt"
        )
    # An empty text would leave the spaces and line ends around it
    others = tuple(
        part for part in base.parts if "{system}" not in part.text or part.text.replace("{system}", "").strip()
    )
    for number, text in enumerate(texts, 1):
        parts = base.parts if text else others
        template = replace(base, name=f"{base.name}, system-{number}", system=text, parts=parts)
        yield PromptVariant(f"system-{number}", template, f"system prompt: {text}" if text else _NO_SYSTEM)


@dataclass(frozen=True)
class VariedPlan(ChoicePlan):
    """The plan of a suite under its own template, with further prompts."""

    prompts: PromptSet

    @cached_property
    def orders(self) -> dict[str, list[Order]]:
        """Task → the orders of its options, the original one first.

        Raises:
            UsageError: nothing else is varied, and no task's prompts list their options.
        """
        found = {task: orders_of(members, self.prompts.choice_orders) for task, members in self.questions.items()}
        self.check_orders(found)
        return found

    def check_orders(self, found: Mapping[str, Sequence[Order]]) -> None:
        """Raise a `UsageError` if nothing is varied: no task's prompts list their options, and there is one template.

        Args:
            found: task → the orders of its options.
        """
        if not self.prompts.variants and all(len(orders) == 1 for orders in found.values()):
            raise UsageError(
                f"--vary choice_order: the prompts of {', '.join(found)} do not list their options by letter, so that "
                "they have no other order; add a task such as mmlu, or another factor: --vary template,choice_order"
            )

    @property
    def message(self) -> str:
        """The prompts in one line, for the user."""
        names = ", ".join(self.prompts.templates)
        named = f"{counted(len(self.prompts.templates), 'template')} for each document: {names}"
        if self.prompts.choice_orders == 1:
            return named
        listed = {task: len(orders) for task, orders in self.orders.items() if len(orders) > 1}
        orders = ", ".join(f"{task} {count}" for task, count in listed.items()) or "none, no prompt lists its options"
        return f"{named}; orders of the options: {orders}"

    @cached_property
    def parts(self) -> list[TaskPart]:
        """What is scored: each task under each template; under the run's own with the choices of all orders."""
        return [part for task in self.questions for part in self._parts_of(task)]

    def _parts_of(self, task: str) -> list[TaskPart]:
        members, orders = self.questions[task], self.orders[task]
        ordered = [in_orders(one, orders) for one in members]
        return [
            TaskPart(task, template, ordered if name == self.template.name else members, name)
            for name, template in self.prompts.templates.items()
        ]

    @property
    def folder(self) -> Path:
        """The run folder, which may not exist yet."""
        template = f"{self.template.name}-varied"
        return run_folder(self.request.output, self.checkpoint, self.suite.name, template, self.manifest)


def plan_varied(request: SuiteRequest, say: Say) -> VariedPlan:
    """Validate a request and make its plan.

    Raises:
        EvalkitError: the request, the prompts, the checkpoint or the documents are invalid.
    """
    if request.log_samples:
        raise UsageError("--log-samples writes lm-eval's files, which have one prompt; leave it out, or --vary")
    # Without a rule lm-eval's tasks would be run by their own metrics
    suite = resolve_suite(replace(request, rule=request.rule or "acc"), say)
    assert suite is not None
    prompts = load_prompts(request.vary, load_template(request.template or suite.template or "inst"))
    templates = prompts.templates.values()
    rule = request.rule or suite.rule or ("ppl" if all(one.scores_all for one in templates) else "acc")
    for template in templates:
        rule_of(rule, template)
    plan = plan_suite(replace(request, rule=rule), suite, say)
    specification = plan.manifest["specification"] | {"prompts": prompts.specification}
    manifest = plan.manifest | {
        "id": specification_id(specification),
        "kind": PROMPT_VARIANTS,
        "specification": specification,
        "prompts": {one.name: one.words for one in prompts.variants},
    }
    own = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return VariedPlan(**own | {"manifest": manifest}, prompts=prompts)


def estimated_prompts(plan: VariedPlan, tokenizer: Any, sample: int, say: Say) -> list[TaskTokens]:
    """Return the estimates for each task; arguments as in `Benchmark.token_counts`."""
    window = window_of(plan.request.model, plan.checkpoint, tokenizer, say)
    prompters = {name: Prompter(one, tokenizer, window, say) for name, one in plan.prompts.templates.items()}
    found = load_questions(plan.suite, plan.library, plan.request.selection, plan.others, sample)
    orders = {task: orders_of(questions, plan.prompts.choice_orders) for task, questions in found.items()}
    plan.check_orders(orders)
    estimates = []
    for task, questions in found.items():
        ordered = [in_orders(one, orders[task]) for one in questions]
        parts = [
            task_tokens(plan, prompter, task, ordered if name == plan.template.name else questions)
            for name, prompter in prompters.items()
        ]
        estimates.append(_sum(parts))
    return estimates


def _sum(parts: Sequence[TaskTokens]) -> TaskTokens:
    """Return the tokens of a task under all prompts: no tree joins two templates."""
    sums = {name: sum(getattr(one, name) for one in parts) for name in ("rows", "alone", "distinct")}
    return replace(parts[0], **sums)


def varied_prompts(plan: VariedPlan, count: int, say: Say) -> Iterator[str]:
    """Yield the prompts; arguments and errors as of `Benchmark.prompts`."""
    loaded = load_model(plan, say)
    found = load_questions(plan.suite, plan.library, FirstDocuments(count), plan.others)
    for name, template in plan.prompts.templates.items():
        prompter = Prompter(template, loaded.tokenizer, loaded.window, say)
        for questions in found.values():
            for shown, members in _by_order(plan, name, questions):
                for encoded in prompter.encode(members, plan.unconditional):
                    yield click.style(f"prompt {shown}", bold=True) + "\n" + prompt_text(encoded, loaded.tokenizer)


def _by_order(plan: VariedPlan, name: str, questions: list[Question]) -> Iterator[tuple[str, list[Question]]]:
    """Yield the questions under a template, then those of other orders under the run's own."""
    yield name, questions
    if name == plan.template.name:
        for order in orders_of(questions, plan.prompts.choice_orders)[1:]:
            yield order_name(order), [under_order(one, order) for one in questions]
