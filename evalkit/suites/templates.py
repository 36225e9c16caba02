"""Prompt templates: YAML files that define the segments of a sequence, and their rendering as text.

In: `configs/templates/NAME.yaml` or a user's file with the same keys. Out: a `Template`. The keys:

    description: one line, for `evalkit ls`
    bos: always | tokenizer | never     # "tokenizer": only if the tokenizer adds one itself
    eos: true | false
    system: the instruction's text      # inserted for {system}
    separate: true | false              # tokenise the continuation apart from what precedes it; default: false
    score: [segments whose tokens get a log-likelihood]
    parts:                              # concatenated literally, including white space
      - SEGMENT: "text with {system} {context} {continuation} {gap} {delimiter}"

or `chat: true` instead of bos, eos and parts, for the tokenizer's chat template.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator

from evalkit.errors import TemplateError, UnknownNameError, check_known
from evalkit.inputs.validated import FileSettings, Listed, read_settings
from evalkit.inputs.values import text_digest
from evalkit.paths import resource
from evalkit.runs.score_table import SEGMENTS, Segment

if TYPE_CHECKING:
    from evalkit.suites.questions import Question

FIELDS = ("system", "context", "continuation", "gap", "delimiter")
"""Fields of a part's text. `gap` is one space, or the white space of WinoGrande's sentence;
`delimiter` is lm-eval's separator of context and continuation."""


class Piece(NamedTuple):
    """A stretch of a prompt, of one of `SEGMENTS`."""

    segment: str
    text: str


@dataclass(frozen=True)
class Part:
    segment: str
    text: str


@dataclass(frozen=True)
class Template:
    """Rules for building a sequence from a question and one of its choices."""

    name: str
    description: str
    bos: str
    eos: bool
    system: str
    score: tuple[str, ...]
    parts: tuple[Part, ...]
    chat: bool = False
    separate: bool = False

    @property
    def scores_all(self) -> bool:
        """Whether every token of a sequence gets a log-likelihood, so that every rule applies."""
        return set(self.score) == set(SEGMENTS)

    @property
    def content_hash(self) -> str:
        """Hash of everything that affects a sequence; part of a run's specification."""
        content = {k: v for k, v in asdict(self).items() if k not in ("name", "description")}
        if not self.separate:
            del content["separate"]
        return text_digest(json.dumps(content, sort_keys=True))

    def pieces(self, question: Question, choice: int, with_context: bool = True) -> list[Piece]:
        """Return the pieces of one choice's sequence, none of them empty, without BOS and EOS.

        Without the context, a question's own context without its text takes its place, if it has one.
        """
        fields = {
            "system": self.system,
            "context": question.contexts[choice],
            "continuation": question.continuations[choice],
            "gap": question.gaps[choice],
            "delimiter": question.delimiter,
        }
        if not with_context and question.alone:
            fields["context"], with_context = question.alone[choice], True
        parts = [part for part in self.parts if with_context or part.segment != "context"]
        pieces: list[Piece] = []
        for segment, text in ((part.segment, part.text.format_map(fields)) for part in parts):
            if text and not self.separate and segment == "continuation" and pieces and pieces[-1].segment == "context":
                # White space before it is moved to it, as lm-eval does: tokenizers join it to the next word
                before = pieces.pop().text
                kept = before.rstrip()
                pieces += [Piece("context", kept)] if kept else []
                text = before[len(kept) :] + text
            pieces += [Piece(segment, text)] if text else []
        return pieces


def template_names() -> list[str]:
    return sorted(path.stem for path in resource("configs", "templates").glob("*.yaml"))


def load_template(name: str) -> Template:
    """Read a template by name, or from a user's YAML file."""
    if Path(name).suffix in (".yaml", ".yml"):
        return _read(Path(name))
    check_known("template", [name], template_names())
    return _read(resource("configs", "templates", f"{name}.yaml"))


def stored_template(content: Mapping[str, Any]) -> Template:
    parts = tuple(Part(**part) for part in content["parts"])
    return Template(**{**content, "score": tuple(content["score"]), "parts": parts})


def _checked_part(part: dict[Segment, str]) -> dict[Segment, str]:
    [(segment, text)] = part.items()
    fields = [entry[1:] for entry in string.Formatter().parse(text) if entry[1] is not None]
    for field, form, conversion in fields:
        if field not in FIELDS:
            raise ValueError(str(UnknownNameError("field", str(field), FIELDS)))
        if form or conversion:
            raise ValueError(f"write {{{field}}} without a format; text is inserted literally")
    if any(field == "continuation" for field, _, _ in fields) != (segment == "continuation"):
        raise ValueError("{continuation} must be in the continuation segment, and only there")
    return part


def _checked_score(score: tuple[Segment, ...]) -> tuple[Segment, ...]:
    if "continuation" not in score:
        raise ValueError("add continuation, since choices are compared by it")
    return score


class _TemplateFile(FileSettings):
    description: str = ""
    bos: Literal["always", "tokenizer", "never"] = "always"
    eos: bool = True
    system: str = ""
    score: Annotated[Listed[Segment], AfterValidator(_checked_score)] = get_args(Segment)
    parts: Listed[Annotated[dict[Segment, str], AfterValidator(_checked_part)]] = ()
    chat: bool = False
    separate: bool = False


def _read(path: Path) -> Template:
    content = read_settings(path, _TemplateFile, TemplateError, "template file")
    if content.chat and "parts" in content.model_fields_set:
        raise TemplateError(f"template file {path}: chat uses the tokenizer's chat template; leave out parts, or chat")
    if not content.chat and not any("continuation" in part for part in content.parts):
        raise TemplateError(f"template file {path}: no part has {{continuation}}; add it, since choices differ by it")
    settings = dict(content) | {
        "score": tuple(segment for segment in SEGMENTS if segment in content.score),
        "parts": tuple(Part(segment, text) for part in content.parts for segment, text in part.items()),
    }
    return Template(name=path.stem, **settings)
