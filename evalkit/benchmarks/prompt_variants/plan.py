"""Plan of a run under several prompts.

In: a `SuiteRequest` with `vary`. Out: a `VariedPlan` with its manifest. Nothing here needs torch.

Prompts that begin alike are scored in one tree: the orders of a document's options, which share instruction, preamble
and question. Other prompts differ from their first words on, so each is planned like a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

from evalkit.benchmarks.multiple_choice.parts import TaskPart
from evalkit.benchmarks.multiple_choice.plan import ChoicePlan, plan_suite, resolve_suite, rule_of
from evalkit.benchmarks.multiple_choice.templates import load_template
from evalkit.benchmarks.prompt_variants import PROMPT_VARIANTS
from evalkit.benchmarks.prompt_variants.orders import Order, in_orders, orders_of
from evalkit.benchmarks.prompt_variants.prompt_sets import PromptSet, load_prompts
from evalkit.benchmarks.suite_request import SuiteRequest
from evalkit.brief import counted
from evalkit.errors import UsageError
from evalkit.models.locate import Say
from evalkit.runs.finding import run_folder
from evalkit.runs.folder import specification_id


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
