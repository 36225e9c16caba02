"""Synthetic rows and predictions, and runs over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.benchmarks.longbench.benchmark import LongBench, LongBenchRequest
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.runs.folder import Run

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
    """Write a file of JSON lines; bytes are written verbatim."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in records]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def prediction(pred: Any, answers: Any, length: Any = 10, all_classes: Any = None) -> dict[str, Any]:
    """Return a line in the format of the official code's output."""
    return {"pred": pred, "answers": answers, "all_classes": all_classes, "length": length}


def generations(task: str, *pairs: tuple[str, str], lengths: list[int] | None = None) -> pd.DataFrame:
    """Return a generations table of (prediction, gold answer) pairs."""
    return pd.DataFrame(
        {
            "task": task,
            "id": [str(number) for number in range(len(pairs))],
            "index": range(len(pairs)),
            "length": lengths or [10] * len(pairs),
            "prediction": [pred for pred, _ in pairs],
            "answers": [json.dumps([answer]) for _, answer in pairs],
            "all_classes": "null",
            "truncated": 0,
        }
    )


def request(model: Path, rows: Path, output: Path, *tasks: str, **options: Any) -> LongBenchRequest:
    """Return a request without context extension, in float32."""
    named = {"tasks": tasks or ("qasper", "trec", "samsum", "lcc"), "max_prompt_tokens": 600}
    common = {"data_dir": rows, "output": output, "dtype": "float32", "context": "none"}
    return request_of(LongBenchRequest, model, common | named | options)


def evaluate_longbench(request: LongBenchRequest, progress: Progress) -> Run:
    return run_plan(LongBench().plan(request, progress.say), progress)
