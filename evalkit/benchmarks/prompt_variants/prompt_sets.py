"""Sets of prompts: the run's own template, and variants that differ from it in one factor each.

In: `--vary`, factors of `configs/variants/default.yaml` or a file with the same keys, and the run's template. Out: a
`PromptSet`. The keys of a file:

    templates: [inst, my_template.yaml]     # names, or files next to this one
    system_prompts: ["", "Be brief."]       # in place of the template's own
    choice_orders: 4                        # rotations of listed options, the original order among them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from evalkit.benchmarks.multiple_choice.templates import Template, load_template
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import FileSettings, Listed, NonEmpty, read_settings
from evalkit.resources import resource

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
    """Return the prompts of a run.

    Args:
        vary: factors, or one YAML file.
        base: the run's own template.

    Raises:
        UnknownNameError: there is no such factor or template.
        UsageError: the file is invalid, it varies nothing, or two prompts have the same name.
        TemplateError: a template's file is invalid.
    """
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
