"""RULER: 13 tasks of retrieval, tracking, counting and questions, at each length, made for the checkpoint's tokenizer.

In: a `RulerRequest`. Out: a run folder with

answers.parquet   one row for each task, length and sample, with both scores
results.json      scores of each task at each length, means by length, and the effective length
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from evalkit.benchmarks import generated
from evalkit.benchmarks.base import lazy
from evalkit.benchmarks.generated import DocumentPlan, GeneratedAnswer, GenerationRequest, TaskDocuments
from evalkit.benchmarks.outcomes import Measure, Metric
from evalkit.benchmarks.request import Request
from evalkit.benchmarks.ruler import results
from evalkit.benchmarks.ruler.data import TASKS, WHEELS, RulerData, RulerTask
from evalkit.benchmarks.ruler.retrieval import (
    CHOICES,
    RetrievalBenchmark,
    likelihood_columns,
    match_score,
    with_answers,
)  # fmt: skip
from evalkit.benchmarks.ruler.samples import CannotBuild, Sample, SampleMaker, numbered
from evalkit.cache import read_cached_bytes, source_digest, write_cached_bytes
from evalkit.display import Say
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.inputs.settings import setting
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.runs.folder import Run

if TYPE_CHECKING:
    import pandas as pd

_VERSION = 1
"""Increased with every change of evalkit that changes a number of this benchmark."""
_BLOCK = 20
"""Samples among which the other answers are chosen, so that they do not depend on the number of samples."""
_MODEL_TEMPLATES = {"plain": "base", "inst": "meta-chat"}
_CACHED = "ruler-samples"


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
    depth: float | None
    source: str


class Ruler(RetrievalBenchmark):
    kind = results.RULER
    request = RulerRequest
    results_form = results.RulerResults
    files = (results.ANSWERS,)
    checked = ("prompt_sha256",)
    report = lazy("evalkit.benchmarks.ruler.results:ruler_report")
    figures = lazy("evalkit.benchmarks.ruler.results:run_figures")

    def plan(self, request: RulerRequest, say: Say) -> DocumentPlan:
        """Make the plan; its manifest's optional "not_built" has a line for each reason why tasks cannot be built."""
        checkpoint = request.model.locate(say)
        context = generated.context_of(request.model, checkpoint, self.kind)
        lengths = _lengths(request.lengths, context)
        for name in request.tasks:
            if name not in TASKS:
                raise UnknownNameError("RULER task", name, TASKS)
        maker, tasks, names = _Maker(request, checkpoint, say), dict[str, TaskDocuments](), dict[str, list[str]]()
        for length in lengths:
            for name in request.tasks or TASKS:
                try:
                    tasks[results.name_at(name, length)] = maker.documents(name, length)
                except CannotBuild as error:
                    names.setdefault(f"cannot be built at {results.short(length)}: {error}", []).append(name)
        not_built = [f"{', '.join(of_reason)} {reason}" for reason, of_reason in names.items()]
        for line in not_built:
            say(line)
        if not tasks:
            raise DataError("; ".join(not_built))
        settings = {"template": request.template, "version": _VERSION}
        plan = generated.generated_plan(self.kind, request, checkpoint, context, tasks, settings, say)
        more = {"template": {"name": request.template}} | ({"not_built": not_built} if not_built else {})
        return replace(plan, manifest=plan.manifest | more)

    def generation_requests(
        self, plan: DocumentPlan, task: str, ends: frozenset[int], tokenizer: Any
    ) -> list[GenerationRequest]:
        from evalkit.generation.prompts import Prompt, Stops

        context, requests = plan.manifest["context"], []
        for number, document in enumerate(plan.tasks[task]):
            texts = [document.text, *(document.text + choice for choice in document.choices)]
            tokens, *sequences = tokenizer(texts, verbose=False).input_ids
            stops = Stops(ends, pattern=_pattern(document.references, results.is_any(task)), unsearched_tail=1)
            prompt = Prompt(number, np.asarray(tokens, np.int64), document.new_tokens, stops)
            prompt = with_answers(prompt, sequences, context, f"{task} sample {number}")
            digest = hashlib.sha256(document.text.encode()).hexdigest()
            requests.append(GenerationRequest(str(number), prompt, digest))
        return requests

    def table_row(self, task: str, document: RulerDocument, answer: GeneratedAnswer) -> dict[str, Any]:
        stored = {"answer" if name == "text" else name: value for name, value in answer.columns().items()}
        return {
            "task": task,
            "length": results.length_of(task),
            "depth": document.depth,
            # Questions about one document are not independent
            "source": document.source or answer.id,
            **stored,
            "references": json.dumps(document.references, ensure_ascii=False),
            "score": match_score(answer.text, document.references, results.is_any(task)),
            **likelihood_columns(document.choices, answer.logprobs),
        }

    def results(self, plan: DocumentPlan, table: pd.DataFrame) -> dict[str, Any]:
        return results.results_of(table, len(plan.request.tasks or TASKS))

    def own_metrics(self, run: Run) -> list[Metric]:
        return [
            Metric(task["task"], self.metric, task["n"], task["score"], task["stderr"]) for task in run.stored["tasks"]
        ]

    def measure(self) -> Measure:
        return Measure("RULER's score, the share of the right answers that are in the generated text, in %", True)

    def groups(self, run: Run) -> Mapping[str, Sequence[str]]:
        return results.by_length(run.manifest["documents"])

    def answers(self, run: Run) -> pd.DataFrame:
        table = run.table(results.ANSWERS, ("task", "id", "source", "references", "answer", "score"))
        return table.assign(references=table["references"].map(json.loads).map(tuple))

    def suites(self) -> Mapping[str, str]:
        return {self.kind: "RULER: retrieval, tracking, counting and questions in long texts, by length"}


class _Maker:
    """Documents of a request, from the cache or made with the checkpoint's tokenizer, which is loaded at most once."""

    def __init__(self, request: RulerRequest, checkpoint: Checkpoint, say: Say) -> None:
        from evalkit.models.loading.fingerprint import fingerprint

        self._request, self._checkpoint, self._say = request, checkpoint, say
        wheels = [wheel.sha256 for wheel in WHEELS]
        self._key = [fingerprint(checkpoint).tokenizer, request.seed, request.template, *wheels]
        self._key.append(source_digest("benchmarks/ruler"))

    @cached_property
    def _samples(self) -> tuple[SampleMaker, Mapping[str, RulerTask]]:
        self._say("making RULER's samples for this tokenizer")
        tokenizer, data = tokenizer_alone(self._checkpoint, self._say), RulerData(self._say)

        def tokens(text: str) -> int:
            return len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

        return SampleMaker(data, self._request.seed, tokens), data.tasks(_MODEL_TEMPLATES[self._request.template])

    def documents(self, name: str, length: int) -> TaskDocuments:
        """Return a task's documents of a length. Raises `CannotBuild`."""
        count = -(-self._request.samples // _BLOCK) * _BLOCK
        key = json.dumps([*self._key, name, length, count])
        if (stored := read_cached_bytes(_CACHED, key)) is None:
            stored = memoryview(zlib.compress(json.dumps(self._made(name, length, count)).encode()))
            write_cached_bytes(_CACHED, key, stored)
        content = json.loads(zlib.decompress(stored))
        if isinstance(content, str):
            raise CannotBuild(content)
        documents = [RulerDocument(*fields) for fields in content[: self._request.samples]]
        digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
        return TaskDocuments(documents, f"{WHEELS[0]}, seed {self._request.seed}", digest)

    def _made(self, name: str, length: int, count: int) -> str | list[RulerDocument]:
        """Return documents, or the reason why they cannot be built."""
        maker, tasks = self._samples
        task = tasks[name]
        try:
            samples = list(islice(maker.samples(task, length), count))
        except CannotBuild as error:
            return str(error)
        documents = []
        for start in range(0, count, _BLOCK):
            block = [_gold(task, sample) for sample in samples[start : start + _BLOCK]]
            for number, sample in enumerate(samples[start : start + _BLOCK]):
                following = block[number:] + block[:number]
                right = {reference.lower() for reference in sample.references} if task.family == "qa" else set()
                others = [text for text in dict.fromkeys(following[1:]) if text.strip().lower() not in right]
                choices = (following[0], *(text for text in others if text != following[0]))[:CHOICES]
                documents.append(
                    RulerDocument(sample.text, sample.references, choices, task.new_tokens, sample.depth, sample.source)
                )
        return documents


def _gold(task: RulerTask, sample: Sample) -> str:
    """Return the gold answer as it follows the prompt; of vt and cwe as in the solved example of the prompt."""
    if task.family == "common_words_extraction":
        return numbered(sample.references)
    if task.family == "variable_tracking":
        return " " + " ".join(sample.references)
    return " " + (sample.references[0] if task.family == "qa" else ", ".join(sample.references))


def _pattern(references: Sequence[str], is_any: bool) -> str:
    """Return a pattern that matches a text with the highest score, to end its generation; empty if it might not."""
    if not all(reference.isascii() and reference.isprintable() for reference in references):
        return ""
    quoted = map(re.escape, references)
    return "(?ais)" + ("|".join(quoted) if is_any else "".join(f"(?=.*{text})" for text in quoted))


def _lengths(requested: Sequence[int], context: int) -> list[int]:
    """Return the sorted lengths, by default doubled from 1,024 up to the context window."""
    lengths = sorted(
        {*requested} or {1024 << power for power in range(context.bit_length()) if 1024 << power <= context}
    )
    if not lengths or not all(1 <= length <= context for length in lengths):
        raise UsageError(
            f"--lengths {','.join(map(str, requested)) or 'by default'}: the model's context window is {context} "
            "tokens, and texts are not cut; give shorter ones, or a longer --context"
        )
    return lengths
