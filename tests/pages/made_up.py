"""A made-up page with documents: two runs, tasks of choices and of answers, hostile names and texts."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evalkit.pages.documents import DocumentData
from evalkit.pages.page import Page, PageFigure, Panel
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.suites.templates import Piece

HOSTILE = "</script><img src=x onerror=document.title='attacked'>"
RULES = ("ppl", "sum")
SEGMENTS = ["special", "instruction", "context", "continuation", "end"]
_TYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32, "f8": np.float64}
_VOCABULARY = ("water", "energy", "cell", "light", "force", "planet", "rock", "plant", "which", "of", "the", "likely")


def block(header: Mapping[str, Any], arrays: Mapping[str, tuple[str, NDArray[Any]]]) -> str:
    """Return a block: length, header, arrays at multiples of 8 bytes; gzip; base64."""
    listed, body = {}, b""
    for name, (kind, values) in arrays.items():
        body += b"\0" * (-len(body) % 8)
        listed[name] = [kind, len(body), len(values)]
        body += values.astype(np.dtype(_TYPES[kind]).newbyteorder("<")).tobytes()
    text = json.dumps({**header, "arrays": listed}).encode()
    text += b" " * (-(4 + len(text)) % 8)
    return base64.b64encode(gzip.compress(len(text).to_bytes(4, "little") + text + body, 6)).decode()


class Choices:
    """A task of four choices; document numbers are 0, 1, … in each subject."""

    def __init__(self, documents: int, subjects: int, words: int, seed: int) -> None:
        made = np.random.default_rng(seed)
        self.n, self.subtask = documents, np.arange(documents) % subjects
        self.ids = [number // subjects for number in range(documents)]
        self.gold = made.integers(4, size=documents)
        self.predictions = {
            f"{run}/{rule}": np.where(made.random(documents) < 0.6, self.gold, made.integers(4, size=documents))
            for run in (0, 1)
            for rule in RULES
        }
        self.margins = {
            name: np.where(chosen == self.gold, 1, -1) * made.exponential(size=documents)
            for name, chosen in self.predictions.items()
        }
        self.ties = {name: made.random(documents) < 0.1 for name in self.predictions}
        self.ll = {run: -made.exponential(5, size=documents * 4 * 5) for run in (0, 1)}
        self.tokens = {run: made.integers(1, 20, size=documents * 4 * 5) for run in (0, 1)}
        self.truncated = {run: (made.random(documents * 4) < 0.02) * 7 for run in (0, 1)}
        draws = made.integers(len(_VOCABULARY), size=(documents, words))
        self.texts = [" ".join(_VOCABULARY[word] for word in row) for row in draws]

    def block(self) -> str:
        options = [[f"option {number} {choice}" for choice in range(4)] for number in range(self.n)]
        options[0][1] = HOSTILE
        prompt = {
            "runs": [0, 1],
            "common": [
                [[0, "<s>"], [1, "Answer the question.\n"], [2, f"Document {number}: <b>{text}</b>\n"]]
                for number, text in enumerate(self.texts)
            ],
            "choices": [[[[3, f" {text}"], [4, "</s>"]] for text in row] for row in options],
        }
        header = {"ids": self.ids, "options": options, "prompts": [prompt], "problem": ""}
        arrays: dict[str, tuple[str, NDArray[Any]]] = {
            "subtask": ("u2", self.subtask),
            "gold": ("u2", self.gold),
            "choices": ("u2", np.full(self.n, 4)),
        }
        for name in self.predictions:
            arrays[f"{name}/prediction"] = ("u2", self.predictions[name])
            arrays[f"{name}/tie"] = ("u1", self.ties[name])
            arrays[f"{name}/margin"] = ("f4", self.margins[name])
        for run in (0, 1):
            arrays[f"{run}/ll"] = ("f4", self.ll[run])
            arrays[f"{run}/n"] = ("u2", self.tokens[run])
            arrays[f"{run}/truncated"] = ("u2", self.truncated[run])
        return block(header, arrays)

    def right(self, run: int, rule: str) -> NDArray[np.bool_]:
        """[documents] whether the run's prediction is the gold choice."""
        right: NDArray[np.bool_] = self.predictions[f"{run}/{rule}"] == self.gold
        return right


def answers_block() -> str:
    """Return three answered documents; the second run has no answer to the last."""
    runs = {
        str(run): {
            "answers": [f"answer {run} <i>0</i>", "Paris", "x" if run == 0 else None],
            "facts": [{"stop": "end token", "prompt tokens": 812 + run}] * 3,
        }
        for run in (0, 1)
    }
    prompt = [[-1, "A long report about Paris.\n"], [2, "What is the capital?"]]
    header = {"ids": ["q/1", "q/2", "q/3"], "references": [["zero"], ["Paris", "the city"], []],
              "prompts": [prompt, prompt, []], "runs": runs}  # fmt: skip
    scores = {"0": [0.25, 1, np.nan], "1": [0.5, 0, np.nan]}
    arrays = {"subtask": ("u2", np.zeros(3))} | {f"{run}/score": ("f8", np.array(s)) for run, s in scores.items()}
    return block(header, arrays)


def documents(tasks: Sequence[tuple[str, Choices, Sequence[str]]], answers: bool = True) -> DocumentData:
    """Return the explorer's data; the tasks are (name, choices, subjects)."""
    entries = [
        {"task": name, "label": name, "kind": "choices", "block": number, "documents": task.n, "of": task.n,
         "runs": [0, 1], "rules": list(RULES), "subtasks": list(subjects), "official": None, "metric": "accuracy"}
        for number, (name, task, subjects) in enumerate(tasks)
    ]  # fmt: skip
    blocks = [task.block() for _, task, _ in tasks]
    if answers:
        entries.append({"task": "qasper", "label": "qasper", "kind": "answers", "block": len(blocks), "documents": 3,
                        "of": 200, "runs": [0, 1], "rules": [], "subtasks": ["qasper"], "official": False,
                        "metric": "F1"})  # fmt: skip
        blocks.append(answers_block())
    runs = [{"name": HOSTILE, "id": "a1", "rule": "ppl"}, {"name": "baseline", "id": "b2", "rule": "ppl"}]
    return DocumentData({"runs": runs, "segments": SEGMENTS, "tasks": entries}, blocks)


TABLE = simple_table(
    "results", ["run", "checkpoint", "arc_easy", "mmlu"],
    [[HOSTILE, "models/a", "61.2", "34.5"], ["baseline", "models/b", "58.9", "-"]], texts=2,
    title="Accuracy in percent",
)  # fmt: skip
FIGURE = PageFigure(
    "forest", f"Differences & intervals of {HOSTILE}.",
    '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="120" viewBox="0 0 300 120">'
    '<line x1="150" x2="150" y1="5" y2="115" stroke="#888"/><circle cx="190" cy="60" r="6" fill="#246"/>'
    '<text x="10" y="64" font-size="13">arc_easy</text></svg>',
)  # fmt: skip
PROMPT = (Piece("special", "<s>"), Piece("instruction", "Answer.\n"), Piece("context", "1 < 2 &\n"),
          Piece("context", "so:"), Piece("continuation", " yes"), Piece("end", "</s>"))  # fmt: skip


def page(data: DocumentData | None = None, title: str = f"Results of {HOSTILE}") -> Page:
    report = Report(
        tables=(TABLE,), verdict=("A is ahead on arc_easy.", "Nothing else differs."), facts=("rule: ppl",),
        notes=("* best of the column",),
    )  # fmt: skip
    how = Panel("how-a", "How the runs were made", reports=(Report(tables=(TABLE,)),),
                prompts=(("arc_easy/0", PROMPT),))  # fmt: skip
    chapters = {
        "Overview": (Panel("results-table", "Results", reports=(report,)), Panel("making", "Making", panels=(how,))),
        "Comparisons": (
            Panel("forest-plot", "Differences", (Report((), verdict=("A is ahead.",)),), (FIGURE,)),
            Panel("refused", "Others", (Report((), facts=("They do not compare.",)),)),
        ),
        "Results": (),
        "Documents": (),
        "Sources": (Panel("licences", "Licences", reports=(Report(tables=(), facts=("ARC: CC BY-SA 4.0",)),)),),
    }
    return Page(title, "Made by evalkit 0.9 on 1 December 2026.", chapters, data)
