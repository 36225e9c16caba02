"""Synthetic rows and predictions of LongBench, its official prompt, and the reading of JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

INPUTS = {
    "trec": "Question: Who ?\nType:",
    "triviaqa": "Passage:\nx\nQuestion:\ny\nAnswer:\n",
    "samsum": "A: hi\nSummary: ",
}
ANSWERS = {"trec": "Person", "passage_retrieval_en": "Paragraph 3", "passage_count": "7"}


def record(task: str = "hotpotqa", number: int = 0, **changes: Any) -> dict[str, Any]:
    """Return a valid row in the official format; a change to None removes the field."""
    made = {
        "input": INPUTS.get(task, f"Question {number}?"),
        "context": f"Document {number} of {task}.",
        "answers": [ANSWERS.get(task, f"answer {number}")],
        "length": 1000 * number + 5,
        "dataset": task,
        "language": "en",
        "all_classes": ["Person", "Place"] if task == "trec" else None,
        "_id": f"{task}-{number}",
    }
    return {key: value for key, value in (made | changes).items() if value is not None or key == "all_classes"}


def write(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def read(predictions: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in predictions.read_text(encoding="utf-8").split("\n")[:-1]]


def prediction(pred: Any, answers: Any, length: Any = 10, all_classes: Any = None) -> dict[str, Any]:
    return {"pred": pred, "answers": answers, "all_classes": all_classes, "length": length}


def generations(task: str, *pairs: tuple[str, str], lengths: list[int] | None = None) -> pd.DataFrame:
    """Return a generations table of (prediction, gold answer) pairs."""
    lines = [{"prediction": pred, "answers": json.dumps([answer])} for pred, answer in pairs]
    about = {"task": task, "length": lengths or 10, "all_classes": "null", "truncated": 0}
    return pd.DataFrame(lines).assign(**about)


def official_prompt(tokenizer: Any, prompt: str, max_length: int) -> list[int]:
    """Steps 2, 3 and 5 of LongBench's `pred.py`, written out."""
    tokenized = tokenizer(prompt, truncation=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(tokenized) > max_length:
        half = int(max_length / 2)
        prompt = tokenizer.decode(tokenized[:half], skip_special_tokens=True) + tokenizer.decode(
            tokenized[-half:], skip_special_tokens=True
        )
    return [int(token) for token in tokenizer(prompt, truncation=False, verbose=False).input_ids]
