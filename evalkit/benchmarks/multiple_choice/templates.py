"""Prompt templates: small YAML files that say how a sequence is put together.

In: `configs/templates/NAME.yaml` or a user's file of the same form. Out: a `Template`. The form:

    description: one line, for `evalkit ls`
    bos: always | tokenizer | never     # "tokenizer": only where the tokenizer adds one by itself
    eos: true | false
    system: the instruction's text      # where a part uses {system}
    score: [segments whose tokens get a log-likelihood]
    parts:                              # concatenated to the letter, whitespace included
      - SEGMENT: "text with {system} {context} {continuation} {gap} {delimiter}"

or `chat: true` in place of bos, eos and parts, for the tokenizer's own chat template.
"""

from __future__ import annotations

import hashlib
import json
import string
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import TemplateError, UnknownNameError
from evalkit.inputs.yaml_reading import read_yaml
from evalkit.resources import resource
from evalkit.scores.table import SEGMENTS

FIELDS = ("system", "context", "continuation", "gap", "delimiter")
"""What a part's text may refer to. `gap` is one space, or what WinoGrande's own sentence has there;
`delimiter` is lm-eval's own separator of context and continuation."""

_KEYS = {"description", "bos", "eos", "system", "score", "parts", "chat"}


@dataclass(frozen=True)
class Part:
    """A stretch of text that belongs to one segment."""

    segment: str
    text: str


@dataclass(frozen=True)
class Template:
    """How a question and one of its choices become a sequence."""

    name: str
    description: str
    bos: str
    eos: bool
    system: str
    score: tuple[str, ...]
    parts: tuple[Part, ...]
    chat: bool = False

    @property
    def content_hash(self) -> str:
        """Hash of all that shapes a sequence: part of a run's specification."""
        content = {k: v for k, v in asdict(self).items() if k not in ("name", "description")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def template_names() -> list[str]:
    """Names of the templates that evalkit ships."""
    return sorted(path.stem for path in resource("configs", "templates").glob("*.yaml"))


def load_template(name: str) -> Template:
    """Read a template by name, or from a user's YAML file.

    Raises:
        UnknownNameError: neither a known name nor a file.
        TemplateError: the file is not a template; says which key is wrong.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise TemplateError(f"template file {name} does not exist")
        return _read(path)
    if name not in template_names():
        raise UnknownNameError("template", name, template_names())
    return _read(resource("configs", "templates", f"{name}.yaml"))


def _read(path: Path) -> Template:
    raw = read_yaml(path, TemplateError, "template file")
    if not isinstance(raw, dict):
        raise TemplateError(f"template file {path} must hold keys and values ({', '.join(sorted(_KEYS))})")
    if unknown := sorted(set(raw) - _KEYS, key=str):
        raise TemplateError(f"template file {path}: unknown key '{unknown[0]}'; known: {', '.join(sorted(_KEYS))}")
    chat = _choice(path, raw, "chat", (True, False), default=False)
    if chat and "parts" in raw:
        raise TemplateError(f"template file {path}: chat takes the tokenizer's own parts; leave out parts, or chat")
    template = Template(
        name=path.stem,
        description=str(raw.get("description", "")),
        bos=_choice(path, raw, "bos", ("always", "tokenizer", "never"), default="always"),
        eos=_choice(path, raw, "eos", (True, False), default=True),
        system=_system(path, raw.get("system", "")),
        score=_scored(path, raw.get("score", list(SEGMENTS))),
        parts=() if chat else _parts(path, raw.get("parts")),
        chat=chat,
    )
    if not chat and not any(part.segment == "continuation" for part in template.parts):
        raise TemplateError(f"template file {path}: no part holds {{continuation}}, so there is nothing to choose by")
    return template


def _choice(path: Path, raw: dict[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = raw.get(key, default)
    # By type as well, since 0 and 1 equal False and True
    if not any(value == one and type(value) is type(one) for one in allowed):
        shown = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
        raise TemplateError(f"template file {path}: {key} is {value!r}; it must be one of {shown}")
    return value


def _system(path: Path, raw: Any) -> str:
    if not isinstance(raw, str):
        raise TemplateError(f"template file {path}: system is {raw!r}; it must be text")
    return raw


def _scored(path: Path, raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or "continuation" not in raw:
        raise TemplateError(f"template file {path}: score must be a list of segments that includes continuation")
    for segment in raw:
        if segment not in SEGMENTS:
            raise TemplateError(f"template file {path}: score: {UnknownNameError('segment', str(segment), SEGMENTS)}")
    return tuple(segment for segment in SEGMENTS if segment in raw)


def _parts(path: Path, raw: Any) -> tuple[Part, ...]:
    if not isinstance(raw, list) or not raw:
        raise TemplateError(f"template file {path}: parts must be a list of 'segment: text'")
    return tuple(_part(path, number, entry) for number, entry in enumerate(raw, start=1))


def _part(path: Path, number: int, entry: Any) -> Part:
    where = f"template file {path}: part {number}"
    if not isinstance(entry, dict) or len(entry) != 1:
        raise TemplateError(f"{where} must be one 'segment: text', not {entry!r}")
    segment, text = next(iter(entry.items()))
    if segment not in SEGMENTS:
        raise TemplateError(f"{where}: {UnknownNameError('segment', str(segment), SEGMENTS)}")
    if not isinstance(text, str):
        raise TemplateError(f"{where}: its text must be a string, not {text!r}")
    try:
        found = [entry[1:] for entry in string.Formatter().parse(text) if entry[1] is not None]
    except ValueError as error:
        raise TemplateError(f"{where}: {error}; write a literal brace twice") from error
    for field, form, conversion in found:
        if field not in FIELDS:
            raise TemplateError(f"{where}: {UnknownNameError('field', str(field), FIELDS)}")
        if form or conversion:
            raise TemplateError(f"{where}: write {{{field}}} without a format; text is taken to the letter")
    if any(field == "continuation" for field, _, _ in found) != (segment == "continuation"):
        raise TemplateError(f"{where}: {{continuation}} belongs in the continuation segment, and only there")
    return Part(segment, text)
