"""Sets of prompts: what `--vary` names → templates, and orders of the options that a prompt lists by letter, as MMLU's.

In: factors, or a YAML file of them, and the run's own template. Out: a `PromptSet`. The keys of a file:

    templates: [inst, dialogue, mine.yaml]     # names, or files beside this one
    system_prompts: ["", "Be brief."]          # of the run's own template; empty: none
    choice_orders: 4                           # rotations of listed options, the original order among them

Under another order the letters stay in their places, the options move, and so does the gold answer. Solved examples
before the question keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.escape import counted
from evalkit.inputs.validated import FileSettings, Listed, NonEmpty, read_settings
from evalkit.paths import resource
from evalkit.suites.templates import Template, load_template

if TYPE_CHECKING:
    from evalkit.suites.questions import Question

Order = tuple[int, ...]
"""At each place of the list, the number of the original option."""
FACTORS = {"template": "templates", "choice_order": "choice_orders", "system_prompt": "system_prompts"}
"""Factor, as on the command line → its key in a file."""
_NO_SYSTEM = "no system prompt"
_MOST = 64
_FORMS = ("{}. {}", "{}) {}", "({}) {}")


@dataclass(frozen=True)
class PromptSet:
    templates: dict[str, Template]
    """Prompt → its template, the run's own first; that one alone, under an empty name, in a run with one prompt."""
    words: dict[str, str]
    """Prompt other than the run's own → in what it differs from that."""
    choice_orders: int = 1
    """Number of rotations of listed options under the own template, the original order among them."""

    @property
    def specification(self) -> dict[str, Any]:
        hashes = {name: template.content_hash for name, template in self.templates.items()}
        return {"templates": hashes, "choice_orders": self.choice_orders}

    def message(self, orders: Mapping[str, int]) -> str:
        """Return the prompts in one line; empty for one prompt. `orders`: task → number of orders of its options."""
        names = f"{counted(len(self.templates), 'template')} for each document: {', '.join(self.templates)}"
        if self.choice_orders == 1:
            return "" if "" in self.templates else names
        listed = [f"{task} {count}" for task, count in orders.items() if count > 1]
        return f"{names}; orders of the options: {', '.join(listed) or 'none, no prompt lists its options'}"


class _VaryFile(FileSettings):
    templates: Annotated[Listed[NonEmpty], Field(max_length=_MOST)] = ()
    system_prompts: Annotated[Listed[str], Field(max_length=_MOST)] = ()
    choice_orders: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _varies_something(self) -> Self:
        if not (self.templates or self.system_prompts or self.choice_orders > 1):
            raise ValueError(f"it varies nothing; give at least one of {', '.join(FACTORS.values())}")
        return self


def load_prompts(vary: Sequence[str], base: Template) -> PromptSet:
    """Return the prompts of a run.

    `vary`: names of factors, whose prompts are the shipped ones; or one YAML file; empty: one prompt. `base`: the run's
    own template. Raises `UsageError` or `TemplateError` if a factor or a template is invalid, or two prompts are alike.
    """
    if not vary:
        return PromptSet({"": base}, {})
    where, path = f"--vary {','.join(vary)}", resource("configs", "variants", "default.yaml")
    if files := [name for name in vary if Path(name).suffix in (".yaml", ".yml")]:
        if len(vary) > 1:
            raise UsageError(f"{where}: give {files[0]} alone; a file names its own factors")
        path = Path(files[0]).expanduser()
        where = f"--vary {path}"
    elif unknown := [name for name in vary if name not in FACTORS]:
        raise UnknownNameError("factor of --vary", unknown[0], [*FACTORS, "a YAML file"])
    content = read_settings(path, _VaryFile, UsageError, "set of prompts")
    if not files:
        content = _VaryFile(**{FACTORS[name]: getattr(content, FACTORS[name]) for name in vary})
    templates, words, names = {base.name: base}, {}, {base.content_hash: base.name}
    for name, template, difference in (
        *_templates(content.templates, path.parent),
        *_system_prompts(where, content.system_prompts, base),
    ):
        same = names.get(template.content_hash)
        if same == base.name:
            continue  # the run's own prompt, which is in the set anyway
        if name in templates:
            raise UsageError(f"{where}: two prompts are named '{name}'; leave one out, or rename the template file")
        if same is not None:
            if difference == _NO_SYSTEM:
                continue  # instruction-line without it is no-instruction
            raise UsageError(f"{where}: '{name}' is the same prompt as '{same}'; leave one out")
        names[template.content_hash], templates[name], words[name] = name, template, difference
    if len(templates) == 1 and content.choice_orders == 1:
        raise UsageError(f"{where}: every prompt is template {base.name} itself; add another one")
    return PromptSet(templates, words, content.choice_orders)


def _templates(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Template, str]]:
    for name in names:
        is_file = Path(name).suffix in (".yaml", ".yml")
        template = load_template(str(folder / Path(name).expanduser()) if is_file else name)
        yield template.name, template, f"template: {template.description or template.name}"


def _system_prompts(where: str, texts: Sequence[str], base: Template) -> Iterator[tuple[str, Template, str]]:
    if texts and not (base.chat or any("{system}" in part.text for part in base.parts)):
        raise UsageError(f"{where}: template {base.name} has no {{system}}; use --template inst")
    # An empty text would leave the spaces and line ends around it
    others = tuple(
        part for part in base.parts if "{system}" not in part.text or part.text.replace("{system}", "").strip()
    )
    for number, text in enumerate(texts, 1):
        parts = base.parts if text else others
        template = replace(base, name=f"{base.name}, system-{number}", system=text, parts=parts)
        yield f"system-{number}", template, f"system prompt: {text}" if text else _NO_SYSTEM


def order_name(order: Order) -> str:
    """Return an order's name: the original letters, in the order in which their options are listed."""
    return "order-" + "".join(ascii_uppercase[option] for option in order)


def orders_of(questions: Sequence[Question], most: int) -> list[Order]:
    """Return the original order of a task's options and its cyclic rotations, at most `most` orders in all.

    The original one alone if the options cannot be reordered, since not every document lists the same number of them.
    """
    options = len(questions[0].choices)
    if most > 1 and any(len(question.choices) != options or _list_of(question) is None for question in questions):
        most = 1
    return [tuple((index + shift) % options for index in range(options)) for shift in range(min(most, options))]


def in_orders(question: Question, orders: Sequence[Order]) -> Question:
    """Return a question with the choices of several orders, one after the other; the gold answer stays as it was."""
    if len(orders) == 1:
        return question
    return replace(
        question,
        contexts=tuple(context for order in orders for context in under_order(question, order).contexts),
        continuations=question.continuations * len(orders),
        gaps=question.gaps * len(orders),
        choices=question.choices * len(orders),
    )


def under_order(question: Question, order: Order) -> Question:
    """Return a question with its options in another order. Raises `DataError` if the context does not list them."""
    if (listed := _list_of(question)) is None:
        raise DataError(f"{question.label}: its context does not list its options by letter; leave out choice_order")
    before, form, options, after = listed
    context = before + _listed(form, [options[option] for option in order]) + after
    return replace(question, contexts=(context,) * len(question.contexts), gold=order.index(question.gold))


def _list_of(question: Question) -> tuple[str, str, list[str], str] | None:
    """Return the text before the list of options, its form, the options, and the text after it; None without a list."""
    options = question.doc.get("choices")
    if isinstance(options, dict):
        options = options.get("text")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        return None
    if question.choices != tuple(ascii_uppercase[: len(options)]) or len(set(question.contexts)) != 1:
        return None
    for form in _FORMS:
        # The last one: solved examples may have the same options
        before, listed, after = question.contexts[0].rpartition(_listed(form, options))
        if listed:
            return before, form, options, after
    return None


def _listed(form: str, options: Sequence[str]) -> str:
    return "\n".join(form.format(*pair) for pair in zip(ascii_uppercase, options, strict=False))
