"""Documents as people read them: the prompts of a plan, and those of a finished run with their choices and scores.

In: a plan, or a finished run. Out: text; or a `ChoiceView` of each task, whose prompts are rendered again from the
documents' source, without checkpoint, tokenizer or network. They are used only if the documents and their choices are
those that were scored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalkit.benchmarks.document_views import (
    CUT,
    AnsweredDocument,
    AnswerView,
    ChoiceText,
    ChoiceView,
    DocumentKey,
    TaskView,
    Texts,
    choice_text,
    common_prefix,
)
from evalkit.benchmarks.lm_eval_files import NO_SAMPLES, stored_texts
from evalkit.cache import remembered
from evalkit.data import Library
from evalkit.data.requests import request_tasks
from evalkit.data.sampling import selection_of
from evalkit.display import Say, doing
from evalkit.errors import DataError, EvalkitError
from evalkit.reporting.decimals import fixed
from evalkit.runs.accuracies import available_rules, with_choices
from evalkit.runs.continuous import BITS_PER_BYTE, OUTCOMES
from evalkit.runs.folder import Run
from evalkit.runs.rules import single_answers
from evalkit.suites.suites import pinned_tasks, suite_of, with_fewshot
from evalkit.suites.templates import Piece, stored_template

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.suites.questions import Question

_WITHOUT_TEMPLATE = "the texts are those of lm-eval's sample files, without the template's own texts"
_WITHOUT_MARKERS = "the markers of the tokenizer's chat template are left out"
_BOS, _EOS = "[BOS]", "[EOS]"
_REQUESTS = "requests "
"""Beginning of the source of a user's own requests."""


def choice_views(run: Run, tasks: Collection[str], say: Say) -> Iterator[TaskView]:
    """Yield the tasks of a finished run. Arguments and errors: see `FinishedResults.views`.

    Documents with one gold answer have no decisions: their score is the gold answer's log-likelihood.
    """
    rules, single = tuple(available_rules(with_choices(run.scores))), single_answers(run.scores)
    for task, table in run.scores.groupby("task", sort=False):
        if tasks and task not in tasks:
            continue
        read = partial(_texts, run, str(task), table, say)
        if task in single:
            texts, problem = read()
            scale = OUTCOMES[BITS_PER_BYTE].scale.named("log-likelihood of the gold answer in bits per byte")
            documents = [_measured(row, texts.get((row["subtask"], row["doc_id"]))) for row in table.to_dict("records")]
            yield AnswerView(str(task), scale, documents, problem)
        else:
            yield ChoiceView(str(task), table.reset_index(drop=True), rules, read)


def _measured(row: Mapping[Any, Any], text: ChoiceText | None) -> AnsweredDocument:
    bits = row["ll_continuation"] / math.log(2) / row["bytes"]
    facts = {"log-likelihood": fixed(row["ll_continuation"], 3), "bytes": f"{row['bytes']:,}"}
    if not math.isnan(row["greedy"]):
        facts["greedy decoding gives it"] = "yes" if row["greedy"] else "no"
    facts |= {CUT: f"{row['truncated']:,} tokens of the context"} if row["truncated"] else {}
    prompt = tuple(piece for piece in text.common if piece.segment != "continuation") if text else ()
    references = text.options if text else ()
    return AnsweredDocument(row["subtask"], str(row["doc_id"]), references, "", bits, prompt, facts)


def _texts(run: Run, task: str, table: pd.DataFrame, say: Say) -> tuple[Texts, str]:
    """Return a task's texts, and why there are none or how they differ from what was scored."""
    # The prompts of an imported run are none of evalkit's, or its documents a selection
    if isinstance(run.manifest["template"], str) or "selection" in run.manifest["specification"]:
        return stored_texts(run, table), "the texts are those of the imported log"
    try:
        questions = _questions(run, task, say)
        # They differ after a change of a task file or of lm-eval
        built = [
            (question.subtask, question.doc_id, choice, len(question.choices), question.gold, len(option))
            for question in questions
            for choice, option in enumerate(question.choices)
        ]
        columns = ["subtask", "doc_id", "choice", "choices", "gold", "chars"]
        if built != list(table[columns].itertuples(index=False, name=None)):
            raise DataError(f"this version of evalkit builds other questions of {task} than those that were scored")
        return _rendered(run, questions, table), _WITHOUT_MARKERS if run.manifest["template"].get("chat") else ""
    except EvalkitError as error:
        texts = stored_texts(run, table)
        return texts, f"{error}; {_WITHOUT_TEMPLATE if texts else NO_SAMPLES}"


def _rendered(run: Run, questions: Sequence[Question], table: pd.DataFrame) -> Texts:
    """Return the texts of questions, with BOS and EOS where the run's sequences have them.

    A template with `bos: tokenizer` has BOS if the tokenizer adds it; the run does not say, so it is left out.
    """
    template, loaded = stored_template(run.manifest["template"]), run.manifest.get("loaded") or {}
    bos, eos = (loaded.get(name) is not None for name in ("bos_id", "eos_id"))
    # Some chat templates have no system turn
    instruction = template.system if table["n_instruction"].any() else ""

    def pieces(question: Question, choice: int) -> list[Piece]:
        if template.chat:
            texts = {"instruction": instruction, "context": question.contexts[choice]}
            texts["continuation"] = question.continuations[choice]
            return [Piece(segment, text) for segment, text in texts.items() if text]
        rendered = template.pieces(question, choice)
        # A continuation without a context is predicted from BOS or EOS under every template
        if (bos and template.bos == "always") or not rendered or rendered[0].segment == "continuation":
            rendered.insert(0, Piece("special", _BOS if bos else _EOS))
        return [*rendered, Piece("end", _EOS)] if eos and template.eos else rendered

    def rendered(question: Question) -> ChoiceText:
        options = question.choices
        if len(set(question.contexts)) > 1:  # WinoGrande's contexts have them: the words in which they differ
            start = common_prefix(question.contexts).rfind(" ") + 1
            options = tuple(context[start:] for context in question.contexts)
        return choice_text([pieces(question, choice) for choice in range(len(question.contexts))], options)

    return _RenderedTexts(questions, rendered)


class _RenderedTexts(Mapping[DocumentKey, ChoiceText]):
    """Texts that are rendered when they are first used."""

    def __init__(self, questions: Sequence[Question], render: Callable[[Question], ChoiceText]) -> None:
        self._questions = {(question.subtask, question.doc_id): question for question in questions}
        self._render, self._rendered = render, dict[DocumentKey, ChoiceText]()

    def __getitem__(self, key: DocumentKey) -> ChoiceText:
        if key not in self._rendered:
            self._rendered[key] = self._render(self._questions[key])
        return self._rendered[key]

    def __iter__(self) -> Iterator[DocumentKey]:
        return iter(self._questions)

    def __len__(self) -> int:
        return len(self._questions)


def _questions(run: Run, task: str, say: Say) -> list[Question]:
    """Return the questions of a pinned task as the run had them, from a local source; nothing is downloaded."""
    from evalkit.suites.question_loading import pinned_questions

    specification = run.manifest["specification"]
    control, selection = specification.get("control"), selection_of(specification)
    source = run.manifest["documents"][task]["source"]
    if source.startswith(_REQUESTS) or task in request_tasks():
        key = task, source, json.dumps([specification["documents"][task], control, selection.specification])
        return remembered("questions of views", key, lambda: _requested(run, task, source, say), most=1)
    if task not in pinned_tasks():
        raise DataError(f"the task files of {task} are not evalkit's own, so its documents are not read again")
    suite = with_fewshot(suite_of("documents", [task]), specification.get("num_fewshot", 0))
    expected = {suite.documents.get(task, task): specification["documents"][task]}
    if suite.num_fewshot:
        expected[suite.fewshot[task].documents] = specification["examples"][task]

    def load() -> list[Question]:
        problems: list[str] = []
        for library in _libraries(run.manifest, say):
            lacking = []
            for name, content_hash in expected.items():
                if library.where(name).source == "absent":
                    why = "are not on this machine: evalkit data --fetch downloads the official ones"
                    lacking.append(f"the documents of {name} {why}")
                elif (loaded := library.load(name)).content_hash != content_hash:
                    hashes = f"(content hash {loaded.content_hash[:12]}) are not those that were scored"
                    lacking.append(f"the documents of {name} from {loaded.source} {hashes} ({content_hash[:12]})")
            if not lacking:
                with doing(f"rendering {task}"):
                    return pinned_questions(suite, library, selection, control=control)[task]
            problems += lacking
        raise DataError("; ".join(dict.fromkeys(problems)))

    # Runs of the same documents are read one after the other
    about = [specification.get(name) for name in ("num_fewshot", "limit", "sample", "seed", "control")]
    return remembered("questions of views", (task, json.dumps([expected, about])), load, most=1)


def _requested(run: Run, task: str, source: str, say: Say) -> list[Question]:
    """Return the questions of a task of requests as the run had them; nothing is downloaded."""
    from evalkit.suites.question_loading import pinned_questions
    from evalkit.suites.request_files import are_here, load_requests

    specification, is_own = run.manifest["specification"], source.startswith(_REQUESTS)
    files = {task: Path(source.removeprefix(_REQUESTS))} if is_own else {}
    suite = suite_of("documents", [task]).model_copy(update={"requests": files})
    for library in _libraries(run.manifest, say):
        if not is_own and not are_here(task, library):
            raise DataError(f"the requests of {task} are not on this machine: evalkit data --fetch downloads them")
        requests = load_requests(suite, library, say)
        if requests[task].content_hash == specification["documents"][task]:
            about = selection_of(specification), requests, specification.get("control")
            return pinned_questions(suite, library, *about)[task]
    raise DataError(f"the requests of {task} from {source} are not those that were scored")


def _libraries(manifest: Mapping[str, Any], say: Say) -> Iterator[Library]:
    """Yield the run's --data-dir if it still exists, then the pinned documents."""
    sources = [about["source"] for kind in ("documents", "examples") for about in manifest.get(kind, {}).values()]
    files = [Path(path) for kind, _, path in (source.partition(" ") for source in sources) if kind == "data-dir"]
    for folder in dict.fromkeys(file.parent for file in files if file.parent.is_dir()):
        yield Library(folder, allow_unofficial=True, say=say)
    yield Library(say=say)
