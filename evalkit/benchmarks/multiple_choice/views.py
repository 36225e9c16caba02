"""Documents of a finished suite as people read them: prompts by segment, choices, scores.

In: a finished run. Out: a `ChoiceView` of each task. Prompts are rendered again from the documents' source, without
checkpoint, tokenizer or network. They are used only if the documents and their choices are those that were scored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.document_views import ChoiceText, ChoiceView, DocumentKey, Piece, choice_text, common_prefix
from evalkit.benchmarks.lm_eval.views import NO_SAMPLES, stored_texts
from evalkit.benchmarks.multiple_choice.suites import Suite, pinned_tasks, suite_of, with_fewshot
from evalkit.benchmarks.multiple_choice.templates import Template, stored_template
from evalkit.benchmarks.request import remembered
from evalkit.data import Library
from evalkit.data.sampling import selection_of
from evalkit.display import Say, doing
from evalkit.errors import DataError, EvalkitError
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.multiple_choice.tasks import Question

Texts = Mapping[DocumentKey, ChoiceText]

_WITHOUT_TEMPLATE = "the texts are those of lm-eval's sample files, without the template's own texts"
_WITHOUT_MARKERS = "the markers of the tokenizer's chat template are left out"
_BOS, _EOS = "[BOS]", "[EOS]"


def choice_views(run: Run, tasks: Collection[str], say: Say) -> Iterator[ChoiceView]:
    """Yield the tasks of a finished run. Arguments and errors: see `Benchmark.views`."""
    scores = run.scores
    rules = tuple(available_rules(scores))
    sources = _Sources(run, say)
    for task, table in scores.groupby("task", sort=False):
        if not tasks or task in tasks:
            texts, problem = _texts(run, str(task), table, sources)
            yield ChoiceView(str(task), table.reset_index(drop=True), rules, texts, problem)


def _texts(run: Run, task: str, table: pd.DataFrame, sources: _Sources) -> tuple[Texts, str]:
    """Return a task's texts, and why there are none or how they differ from what was scored."""
    if _only_in_log(run):
        return stored_texts(run, table), "the texts are those of the imported log"
    if task in pinned_tasks():
        try:
            questions = sources.questions(task)
            _check_questions(task, questions, table)
        except EvalkitError as error:
            problem = str(error)
        else:
            renderer = _QuestionTexts(run, table)
            texts = {(question.subtask, question.doc_id): renderer.text(question) for question in questions}
            return texts, _WITHOUT_MARKERS if renderer.template.chat else ""
    else:
        problem = f"the task files of {task} are not evalkit's own, so its documents are not read again"
    if texts := stored_texts(run, table):
        return texts, f"{problem}; {_WITHOUT_TEMPLATE}"
    return {}, f"{problem}; {NO_SAMPLES}"


def _only_in_log(run: Run) -> bool:
    """Return whether the prompts of an imported run are none of evalkit's, or its documents a selection."""
    return isinstance(run.manifest["template"], str) or "selection" in run.manifest["specification"]


class _QuestionTexts:
    """Texts of a run's questions, with BOS and EOS where the run's sequences have them.

    A template with `bos: tokenizer` has BOS if the tokenizer adds it; the run does not say, so it is left out.
    """

    def __init__(self, run: Run, table: pd.DataFrame) -> None:
        from evalkit.benchmarks.multiple_choice.templates import Renderer

        self.template: Template = stored_template(run.manifest["template"])
        loaded = run.manifest.get("loaded") or {}
        bos, eos = (loaded.get(name) is not None for name in ("bos_id", "eos_id"))
        self._starts = bos and self.template.bos == "always"
        self._ends = eos and self.template.eos
        self._first = Piece("special", _BOS if bos else _EOS)
        self._last = Piece("end", _EOS)
        # Some chat templates have no system turn
        self._instruction = self.template.system if table["n_instruction"].any() else ""
        self._renderer = Renderer(self.template.parts, self.template.system)

    def text(self, question: Question) -> ChoiceText:
        """Return the text of a question."""
        pieces = self._chat_pieces if self.template.chat else self._pieces
        return choice_text([pieces(question, choice) for choice in range(len(question.contexts))], _options(question))

    def _pieces(self, question: Question, choice: int) -> list[Piece]:
        pieces = self._renderer.pieces(question, choice)
        # A continuation without a context is predicted from BOS or EOS under every template
        if self._starts or not pieces or pieces[0].segment == "continuation":
            pieces.insert(0, self._first)
        if self._ends:
            pieces.append(self._last)
        return pieces

    def _chat_pieces(self, question: Question, choice: int) -> list[Piece]:
        texts = (self._instruction, question.contexts[choice], question.continuations[choice])
        segments = ("instruction", "context", "continuation")
        return [Piece(segment, text) for segment, text in zip(segments, texts, strict=True) if text]


def _options(question: Question) -> tuple[str, ...]:
    """Return the answer options; where the contexts have them (WinoGrande), the words in which these differ."""
    if len(set(question.contexts)) == 1:
        return question.choices
    start = common_prefix(question.contexts).rfind(" ") + 1
    return tuple(context[start:] for context in question.contexts)


class _Sources:
    """Local sources of a run's documents. Nothing is downloaded."""

    def __init__(self, run: Run, say: Say) -> None:
        self._manifest, self._say = run.manifest, say
        self._specification: Mapping[str, Any] = run.manifest["specification"]

    def questions(self, task: str) -> list[Question]:
        """Return the questions of a pinned task as the run had them."""
        names = ("documents", "examples", "num_fewshot", "limit", "sample", "seed")
        key = (task, json.dumps([self._specification.get(name) for name in names], sort_keys=True))
        # Runs of the same documents are read one after the other
        return remembered("questions of views", key, lambda: self._load(task), most=1)

    def _load(self, task: str) -> list[Question]:
        from evalkit.benchmarks.multiple_choice.stored import pinned_questions

        suite = with_fewshot(suite_of("documents", [task]), self._specification.get("num_fewshot", 0))
        library = self._library_with(suite, task)
        with doing(f"rendering {task}"):
            return pinned_questions(suite, library, selection_of(self._specification))[task]

    def _library_with(self, suite: Suite, task: str) -> Library:
        """Return the first library that has the documents, and the examples, of a task as they were scored."""
        expected = {suite.documents.get(task, task): self._specification["documents"][task]}
        if suite.num_fewshot:
            expected[suite.fewshot[task].documents] = self._specification["examples"][task]
        problems: list[str] = []
        for library in self._libraries:
            found = [why for name, content in expected.items() if (why := _why_not(library, name, content))]
            if not found:
                return library
            problems += found
        raise DataError("; ".join(dict.fromkeys(problems)))

    @cached_property
    def _libraries(self) -> list[Library]:
        """The run's --data-dir if it still exists, then the pinned documents."""
        found = [self._manifest.get(kind, {}).values() for kind in ("documents", "examples")]
        places = [one["source"].partition(" ")[::2] for sources in found for one in sources]
        folders = dict.fromkeys(Path(place).parent for kind, place in places if kind == "data-dir")
        own = [Library(folder, allow_unofficial=True, say=self._say) for folder in folders if folder.is_dir()]
        return [*own, Library(say=self._say)]


def _why_not(library: Library, name: str, content_hash: str) -> str:
    """Return why a library does not have the documents with a content hash; empty if it does."""
    if library.where(name).source == "absent":
        return f"the documents of {name} are not on this machine: evalkit data --fetch downloads the official ones"
    loaded = library.load(name)
    if loaded.content_hash != content_hash:
        return (
            f"the documents of {name} from {loaded.source} (content hash {loaded.content_hash[:12]}) are not those "
            f"that were scored ({content_hash[:12]})"
        )
    return ""


def _check_questions(task: str, questions: Sequence[Question], table: pd.DataFrame) -> None:
    """Raise a `DataError` if questions and score table differ, as after a change of a task file or of lm-eval."""
    first = table[table["choice"] == 0]
    stored = zip(*(first[name].tolist() for name in ("subtask", "doc_id", "choices", "gold")), strict=True)
    found = [(one.subtask, one.doc_id, len(one.choices), one.gold) for one in questions]
    sizes = [len(option) for question in questions for option in question.choices]
    if found != list(stored) or sizes != table["chars"].tolist():
        raise DataError(f"this version of evalkit builds other questions of {task} than those that were scored")
