"""One synthetic record per task and set of examples, with the original dataset's fields, and writers for them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_RECORDS: dict[str, Record] = {
    "winogrande": {"qID": "X-1", "sentence": "The jug did not fit the crate because the _ was too wide.",
                   "option1": "jug", "option2": "crate", "answer": "1"},
    "arc_easy": {"id": "T_1", "question": "Which of these is a gas?",
                 "choices": {"text": ["iron", "helium", "salt"], "label": ["A", "B", "C"]}, "answerKey": "B"},
    "arc_challenge": {"id": "T_2", "question": "What carries sound?", "answerKey": "1",
                      "choices": {"text": ["air", "nothing", "vacuum", "void"], "label": ["1", "2", "3", "4"]}},
    "hellaswag": {"ind": 3, "activity_label": "Baking", "ctx_a": "She opens the oven.", "ctx_b": "",
                  "endings": ["It is cold.", "She takes out bread.", "It flies.", "He sings."], "label": "1"},
    "piqa": {"goal": "Dry a cup.", "sol1": "Use a towel.", "sol2": "Use a pond.", "label": 0},
    "openbookqa": {"id": "9-1", "question_stem": "A candle gives", "answerKey": "B",
                   "choices": {"text": ["rain", "light", "iron", "wool"], "label": ["A", "B", "C", "D"]}},
    "boolq": {"question": "is the moon a star", "title": "Moon",
              "passage": "The Moon is a satellite. -- It orbits.\nQuestion: none.", "answer": False},
    "mmlu": {"subject": "virology", "question": "How many?", "choices": ["one", "two", "three", "four"], "answer": 3},
    "mmlu_dev": {"subject": "virology", "question": "How few?", "choices": ["none", "one", "two", "three"],
                 "answer": 1},
    "mmlu_validation": {"subject": "virology", "question": "How few?", "choices": ["none", "one", "two", "three"],
                 "answer": 1},
}  # fmt: skip


def sample(task: str, **changes: Any) -> Record:
    """Return a new record of a task, with some fields changed."""
    return copy.deepcopy(_RECORDS[task]) | changes


def write(folder: Path, task: str, *records: Record) -> Path:
    path = folder / f"{task}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
