"""The needle test: RULER's scores of a number hidden in a text, on a grid of lengths and depths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from evalkit.benchmarks.base import ListedSuite
from evalkit.benchmarks.generated import TaskDocuments
from evalkit.benchmarks.request import Request
from evalkit.display import Say
from evalkit.errors import UsageError
from evalkit.inputs.settings import setting
from evalkit.longcontext.ruler import results
from evalkit.longcontext.ruler.benchmark import FinishedRuler, Ruler, RulerDocument, cached_documents
from evalkit.longcontext.ruler.haystack import Haystack, NeedleCase
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import Checkpoint
from evalkit.models.loading.spec import tokenizer_alone

NEEDLE = "needle"
_VERSION = 3
"""Increased with every change of evalkit that changes a number of this benchmark."""
_NEW_TOKENS = 32
"""Maximum length of an answer: a sentence with seven digits, each of which may be a token."""
_MAX_CASES = 100_000


@dataclass(frozen=True)
class NeedleRequest(Request):
    """Settings of a needle test."""

    lengths: tuple[int, ...] = setting(
        (),
        "Tokens of prompt and answer, such as 4096 or 4k, separated by commas.",
        "1k,2k,4k,… up to the context window",
    )
    depths: tuple[float, ...] = setting(
        (0.0, 25.0, 50.0, 75.0, 100.0), "Positions of the needle, in percent of the text."
    )
    repeats: int = setting(3, "Texts for each length and depth.")
    text: Path | None = setting(None, "Text file to hide needles in.", "sentences made by evalkit")
    chat: bool = setting(False, "Put prompts into the tokenizer's chat template, for models tuned to chat.")


class FinishedNeedle(FinishedRuler):
    checked = ("references",)
    prompt_settings: ClassVar = {"text": "text"}


class Needle(Ruler):
    kind = NEEDLE
    request = NeedleRequest
    read = FinishedNeedle

    def documents(
        self, request: NeedleRequest, checkpoint: Checkpoint, lengths: Sequence[int], context: int, say: Say
    ) -> tuple[dict[str, TaskDocuments], dict[str, Any], dict[str, Any]]:
        haystack, depths = Haystack(request.text), sorted(set(request.depths))
        if not depths or not all(0 <= depth <= 100 for depth in depths):
            shown = ", ".join(f"{depth:g}" for depth in depths)
            raise UsageError(f"--depths {shown}: expected percentages from 0 to 100")
        if (needles := len(lengths) * len(depths) * request.repeats) > _MAX_CASES:
            raise UsageError(f"{needles:,} needles, more than the maximum of {_MAX_CASES:,}; lower --repeats")
        settings = {"version": _VERSION, "lengths": lengths, "depths": depths, "repeats": request.repeats}
        settings |= {"text": haystack.identity}
        tasks, tokenizer = {}, cache(lambda: tokenizer_alone(checkpoint, say))
        for length in lengths:
            cases = [NeedleCase(length, *case) for case in product(depths, range(request.repeats))]
            key = [fingerprint(checkpoint).tokenizer, request.chat, length, *settings.values()]
            make = partial(_documents, cases, haystack, tokenizer, request.chat)
            tasks[results.name_at(NEEDLE, length)] = TaskDocuments(cached_documents(key, make), haystack.source)
        return tasks, settings, {}

    def pattern(self, task: str, references: Sequence[str]) -> str:
        return rf"(?<!\d){references[0]}[^\d,]"

    def score(self, task: str, answer: str, references: Sequence[str]) -> float:
        """Return whether the secret occurs as a number, with or without commas between thousands."""
        numbers = re.findall(r"\d+", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer))
        return float(references[0] in numbers)

    def suites(self) -> dict[str, ListedSuite]:
        return {NEEDLE: ListedSuite("retrieval of a number from a long text, by length and depth")}


def _documents(
    cases: Sequence[NeedleCase], haystack: Haystack, load: Callable[[], Any], chat: bool
) -> list[RulerDocument]:
    from evalkit.generation.prompts import prompt_tokens

    tokenizer, documents = load(), []
    size = cache(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))

    def whole(text: str) -> int:
        """Return the tokens of a prompt and its answer."""
        return len(prompt_tokens(tokenizer, text, chat)) + _NEW_TOKENS

    for case in cases:
        text = haystack.prompt(case, whole, size, cue=not chat)
        # In a chat, an answer is a turn of its own
        choices = [secret if chat else f" {secret}" for secret in (case.secret, *case.others)]
        documents.append(RulerDocument(text, [case.secret], choices, _NEW_TOKENS, whole(text), case.depth, ""))
    return documents
