"""RULER: 13 tasks of retrieval, tracking, counting and questions, at each length, made for the checkpoint's tokenizer.

In: a `RulerRequest`. Out: a run folder with

answers.parquet   one row for each task, length and sample, with both scores
results.json      scores of each task at each length, means by length, and the effective length
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from evalkit.benchmarks import generated
from evalkit.benchmarks.base import ListedSuite, lazy
from evalkit.benchmarks.generated import (
    DocumentPlan,
    FinishedAnswers,
    GeneratedBenchmark,
    TaskDocuments,
    answer_columns,
)
from evalkit.benchmarks.outcomes import Measure, Metric
from evalkit.benchmarks.request import Request
from evalkit.benchmarks.results import of_run
from evalkit.cache import source_digest, stored
from evalkit.display import Say
from evalkit.errors import DataError, ScoringError, UnknownNameError, UsageError, check_known
from evalkit.inputs.settings import setting
from evalkit.inputs.values import text_digest, with_matches
from evalkit.longcontext.ruler import results
from evalkit.longcontext.ruler.data import CHOICES, TASKS, WHEELS, RulerData, RulerTask
from evalkit.longcontext.ruler.results import BITS, CHOICE, SCORE, SCORES, VALUE
from evalkit.longcontext.ruler.samples import CannotBuild, Sample, numbered, samples
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.requests.requests import Generate
from evalkit.requests.rows import GeneratedRow

if TYPE_CHECKING:
    import pandas as pd

_VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""
_MODEL_TEMPLATES = {"plain": "base", "inst": "meta-chat"}
_CONTROL = re.compile(r"[\x00-\x1f]")
_LIKELIHOODS = {
    CHOICE: Measure(
        SCORES[CHOICE].scale,
        f"the gold answer among {CHOICES} has the fewest bits per byte, in %",
        graded=False,
    ),
    BITS: Measure(
        SCORES[BITS].scale,
        "bits per byte of the gold answer after the text, lower is better",
        graded=True,
    ),
}


@dataclass(frozen=True)
class RulerRequest(Request):
    """Settings of a RULER run."""

    tasks: tuple[str, ...] = setting((), "Only these of the 13, separated by commas.", "all")
    lengths: tuple[int, ...] = setting(
        (),
        "Tokens of prompt and answer, such as 4096 or 4k, separated by commas.",
        "1k,2k,4k,… up to the context window",
    )
    samples: int = setting(50, "Samples of each task at each length; RULER has 500.")
    seed: int = setting(42, "Seed of the samples; RULER's is 42.", least=0)
    template: Literal["plain", "inst"] = setting(
        "plain", "plain (RULER's base), or inst: [INST] … [/INST] around the prompt, before the answer's beginning."
    )


class RulerDocument(NamedTuple):
    text: str
    references: Sequence[str]
    choices: Sequence[str]
    """Possible answers as they follow the text: the gold one, then those of other samples."""
    new_tokens: int
    tokens: int
    """Tokens of the prompt, special tokens included, and of the longest answer that it may have."""
    depth: float | None
    source: str


class FinishedRuler(FinishedAnswers):
    checked = ("prompt_sha256",)
    continuous = BITS
    report = of_run("evalkit.longcontext.ruler.results:run_report")
    figures = lazy("evalkit.longcontext.ruler.results:run_figures")

    def metrics(self, rule: str | None = None) -> list[Metric]:
        measures, metrics = self.measures(), []
        if rule not in (None, *measures):
            raise UnknownNameError(f"rule of run {self.run.folder}", str(rule), measures)
        for name, measure in measures.items():
            if rule in (None, self.run.kind, name):
                score = VALUE if name == self.run.kind else name
                for task in self.run.stored["tasks"]:
                    chance = task["chance"] if name == CHOICE else None
                    values = task["n"], task[score], task[SCORES[score].error]
                    metrics.append(Metric(measure.scale, task["task"], *values, chance=chance))
        return metrics

    def measures(self) -> Mapping[str, Measure]:
        words = "score, the share of the right answers that are in the generated text, in %"
        return {self.run.kind: Measure(SCORES[VALUE].scale, words, graded=True)} | _LIKELIHOODS

    def groups(self) -> Mapping[str, Sequence[str]]:
        return results.by_length(self.run.manifest["documents"])

    def sample_of(self, task: str) -> str:
        return results.sample_of(task)

    def answers(self) -> pd.DataFrame:
        table = self.run.table(results.ANSWERS, ("task", "id", "source", "references", "answer", "score"))
        return table.assign(references=table["references"].map(json.loads).map(tuple))


class Ruler(GeneratedBenchmark):
    kind = results.RULER
    request: type[Request] = RulerRequest
    results_form = results.RulerResults
    files = (results.ANSWERS,)
    read = FinishedRuler

    def plan(self, request: Any, say: Say) -> DocumentPlan:
        checkpoint = request.model.locate(say)
        context = generated.context_of(request.model, checkpoint, self.kind)
        lengths = _lengths(request.lengths, context)
        tasks, settings, more = self.documents(request, checkpoint, lengths, context, say)
        chat = getattr(request, "chat", False)
        plan = generated.generated_plan(self.kind, request, checkpoint, context, tasks, settings, say, chat)
        return replace(plan, manifest=plan.manifest | more)

    def documents(
        self, request: Any, checkpoint: Checkpoint, lengths: Sequence[int], context: int, say: Say
    ) -> tuple[dict[str, TaskDocuments], dict[str, Any], dict[str, Any]]:
        """Return documents by task and length, further entries of the specification, and of the manifest.

        "not_built" in the manifest has a line for each reason why tasks cannot be built.
        """
        chosen = with_matches(request.tasks, TASKS)
        check_known("RULER task", chosen, TASKS)
        maker, tasks, reasons = _Maker(request, checkpoint, say), dict[str, TaskDocuments](), dict[str, list[str]]()
        for length in lengths:
            for name in dict.fromkeys(chosen) or TASKS:
                try:
                    tasks[results.name_at(name, length)] = maker.documents(name, length, context)
                except CannotBuild as error:
                    reasons.setdefault(f"cannot be built at {results.short(length)}: {error}", []).append(name)
        not_built = [f"{', '.join(names)} {reason}" for reason, names in reasons.items()]
        for line in not_built:
            say(line)
        if not tasks:
            raise DataError("; ".join(not_built))
        more = {"template": {"name": request.template}} | ({"not_built": not_built} if not_built else {})
        return tasks, {"template": request.template, "version": _VERSION}, more

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[Generate]:
        from evalkit.generation.prompts import Prompt, Stops, prompt_tokens

        context, requests = plan.manifest["context"], []
        for number, document in enumerate(plan.tasks[task]):
            text, choices = document.text, document.choices
            chat = plan.manifest["specification"]["chat"]
            tokens = prompt_tokens(tokenizer, text, chat)
            if chat:  # an answer is a turn of its own
                answers = tokenizer([*choices], add_special_tokens=False).input_ids
                sequences = [[*tokens, *answer] for answer in answers]
            else:
                sequences = [prompt_tokens(tokenizer, text + choice) for choice in choices]
            stops = Stops(ends, pattern=self.pattern(task, document.references), unsearched_tail=1)
            prompt = Prompt(number, np.asarray(tokens, np.int64), document.new_tokens, stops)
            try:
                prompt = prompt.with_answers(sequences, context)
            except ScoringError as error:
                raise ScoringError(f"{task} sample {number}: {error}") from error
            requests.append(Generate(str(number), prompt, text_digest(text)))
        return requests

    def pattern(self, task: str, references: Sequence[str]) -> str:
        """Return a pattern that matches a text with the highest score, to end its generation; empty if it might not."""
        if not all(reference.isascii() and reference.isprintable() for reference in references):
            return ""
        quoted = map(re.escape, references)
        if results.is_question(task):
            return f"(?ai){'|'.join(quoted)}"
        return r"(?ais)\A" + "".join(f"(?=.*{text})" for text in quoted)

    def score(self, task: str, answer: str, references: Sequence[str]) -> float:
        return match_score(answer, references, results.is_question(task))

    def table_row(self, task: str, document: RulerDocument, answer: GeneratedRow) -> dict[str, Any]:
        stored = {"answer" if name == "text" else name: value for name, value in answer_columns(answer).items()}
        nats = json.loads(answer.logprobs)
        bits = [-n / math.log(2) / len(text.encode()) for text, n in zip(document.choices, nats, strict=True)]
        return {
            "task": task,
            "length": results.length_of(task),
            "depth": document.depth,
            # Questions about one document are not independent
            "source": document.source or answer.document,
            **stored,
            "references": json.dumps(document.references, ensure_ascii=False),
            SCORE: self.score(task, answer.text, document.references),
            CHOICE: float(all(bits[0] < other for other in bits[1:])),
            BITS: bits[0],
            "chance": 1 / len(bits),
            "choices": json.dumps(document.choices, ensure_ascii=False),
            "logprobs": answer.logprobs,
        }

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        return results.results_of(table, results.size_of(self.kind))

    def suites(self) -> dict[str, ListedSuite]:
        return {self.kind: ListedSuite("RULER: retrieval, tracking, counting and questions in long texts, by length")}


def cached_documents(key: Sequence[Any], make: Callable[[], list[RulerDocument] | str]) -> list[RulerDocument]:
    """Return documents from evalkit's cache, or make them. Raises `CannotBuild` if there is a reason instead."""
    content = stored("ruler-samples", json.dumps([*key, source_digest("longcontext/ruler")]), make)
    if isinstance(content, str):
        raise CannotBuild(content)
    return [RulerDocument(*fields) for fields in content]


class _Maker:
    """Documents of a request, made with the checkpoint's tokenizer, which is loaded at most once."""

    def __init__(self, request: RulerRequest, checkpoint: Checkpoint, say: Say) -> None:
        self._request, self._checkpoint, self._say = request, checkpoint, say
        wheels = [wheel.sha256 for wheel in WHEELS]
        self._key = [fingerprint(checkpoint).tokenizer, request.seed, request.template, request.samples, *wheels]

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_alone(self._checkpoint, self._say)

    @cached_property
    def _data(self) -> tuple[RulerData, Mapping[str, RulerTask]]:
        self._say("making RULER's samples for this tokenizer")
        data = RulerData(self._say)
        return data, data.tasks(_MODEL_TEMPLATES[self._request.template])

    def _size(self, text: str, is_prompt: bool = False) -> int:
        return len(self._tokenizer(text, add_special_tokens=is_prompt, verbose=False).input_ids)

    def documents(self, name: str, length: int, context: int) -> TaskDocuments:
        """Return a task's documents of a length. Raises `CannotBuild`."""
        documents = cached_documents([*self._key, name, length], lambda: self._made(name, length))
        if (longest := max(document.tokens for document in documents)) > context:
            raise CannotBuild(
                f"a prompt and its answer have {longest:,} tokens, the context window {context:,} (--context)"
            )
        digest = text_digest(json.dumps(documents))
        return TaskDocuments(documents, f"{WHEELS[0]}, seed {self._request.seed}", digest)

    def _made(self, name: str, length: int) -> str | list[RulerDocument]:
        """Return documents, or the reason why they cannot be built."""
        (data, tasks), documents = self._data, []
        task, made = tasks[name], list[Sample]()
        drawn = samples(data, task, length, self._request.seed, self._size)
        try:
            for sample in islice(drawn, max(self._request.samples, CHOICES)):
                made.append(sample)
        except CannotBuild as error:
            if len(made) < self._request.samples:
                return str(error)
        answers = [_gold(task, sample) for sample in made]
        for number, sample in enumerate(made[: self._request.samples]):
            gold, *others = dict.fromkeys(answers[number:] + answers[:number])
            right = {reference.lower() for reference in sample.references} if task.family == "qa" else set()
            choices = [gold, *(text for text in others if text.strip().lower() not in right)][:CHOICES]
            tokens = self._size(sample.text, True) + max(task.new_tokens, *map(self._size, choices))
            fields = sample.text, sample.references, choices, task.new_tokens, tokens, sample.depth, sample.source
            documents.append(RulerDocument(*fields))
        return documents


def match_score(answer: str, references: Sequence[str], is_any: bool) -> float:
    """Return the share of the references that occur in an answer, or whether any does; RULER's score, from 0 to 1."""
    said = _CONTROL.sub("\n", answer.strip()).strip().lower()
    matches = [reference.lower() in said for reference in references]
    return float(any(matches)) if is_any else sum(matches) / len(matches)


def _gold(task: RulerTask, sample: Sample) -> str:
    """Return the gold answer as it follows the prompt; of vt and cwe as in the solved example of the prompt."""
    if task.family == "common_words_extraction":
        return numbered(sample.references)
    if task.family == "variable_tracking":
        return " " + " ".join(sample.references)
    return " " + (sample.references[0] if task.family == "qa" else ", ".join(sample.references))


def _lengths(requested: Sequence[int], context: int) -> list[int]:
    """Return the sorted lengths, by default doubled from 1,024 up to the context window."""
    doubled = (1024 << power for power in range(context.bit_length()))
    lengths = sorted({*requested} or {length for length in doubled if length <= context})
    if not lengths or lengths[-1] > context:
        raise UsageError(
            f"--lengths {lengths[-1] if lengths else 'by default'}: the model's context window is {context} "
            "tokens, and texts are not cut; give shorter lengths, or a longer --context"
        )
    return lengths
