"""Predictions in the file format of LongBench's official code.

In: files named after the task, with one JSON object per line with `pred`, `answers` and `all_classes`, for LongBench-E
also `length`. Out: a generations table, and notes on irregular files. Also the reverse, for the official scorer.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from evalkit.benchmarks.longbench.data import OFFICIAL_BLOBS, parse_lines, texts, words
from evalkit.benchmarks.longbench.protocol import TASKS, SuiteName, Task
from evalkit.data.sources import Record, did_you_mean, text, value, wrong
from evalkit.errors import DataError, RunError, UnknownNameError, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, read_bytes
from evalkit.runs.folder import MANIFEST


class Predictions(NamedTuple):
    """The content of prediction files."""

    generations: pd.DataFrame
    """A generations table, see `scores`."""
    notes: tuple[str, ...]
    """Notes on irregular files, to print with the scores."""


def read_predictions(paths: Sequence[Path], suite: SuiteName = "longbench") -> Predictions:
    """Read prediction files, `<task>.jsonl` or `<task>_e.jsonl`, or folders of them."""
    notes: list[str] = []
    files: dict[str, Path] = {}
    for file in chain.from_iterable(_files(path, notes) for path in paths):
        if (name := _task_of(file)) not in TASKS:
            raise UnknownNameError(f"LongBench task in the file name {file.name}:", file.stem, TASKS)
        if name in files:
            raise DataError(f"{files[name]} and {file} are both of {name}; give one of them")
        files[name] = file
    if suite == "longbench-e" and (absent := [name for name in files if not TASKS[name].in_e]):
        skipped = ", ".join(str(files.pop(name)) for name in absent)
        notes.append(f"skipped, since LongBench-E has no such task: {skipped}")
    if not files:
        raise DataError("no predictions to score: " + ("; ".join(notes) or "no files were given"))
    rows_of = {file: _read(TASKS[name], file, suite) for name, file in files.items()}
    notes += _miscounted(rows_of, suite)
    return Predictions(pd.DataFrame(list(chain.from_iterable(rows_of.values()))), tuple(notes))


def write_predictions(generations: pd.DataFrame, folder: Path) -> list[Path]:
    """Write a generations table for the official scorer, a file for each task; existing files are replaced."""
    written = []
    for name, rows in generations.groupby("task", sort=False):
        path = folder / f"{name}.jsonl"
        columns = (rows["prediction"], rows["answers"], rows["all_classes"], rows["length"].tolist())
        lines = [
            {"pred": prediction, "answers": json.loads(answers), "all_classes": json.loads(classes), "length": length}
            for prediction, answers, classes, length in zip(*columns, strict=True)
        ]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from error
        written.append(path)
    return written


def _files(path: Path, notes: list[str]) -> list[Path]:
    """Return the file, or a folder's files of English tasks; add a note on files that evalkit does not score."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.name == "result.json":  # written by the official scorer to the same folder
        notes.append(f"{path} is skipped: it contains scores")
        return []
    if not path.is_dir():
        return [path]
    if (path / MANIFEST).is_file():
        raise DataError(f"{path} is a run of evalkit; use evalkit longbench rescore {path}")
    files = sorted(path.glob("*.jsonl"))
    if not files:
        hint = did_you_mean(path, lambda beneath: sum(_task_of(file) in TASKS for file in beneath.glob("*.jsonl")))
        raise DataError(f"{path}: expected a folder with <task>.jsonl files, found none{hint}")
    if other := [file.name for file in files if file.stem in OFFICIAL_BLOBS and _task_of(file) not in TASKS]:
        notes.append(f"skipped, since only the English tasks are scored: {', '.join(other)}")
    return [file for file in files if file.name not in other]


def _task_of(file: Path) -> str:
    return file.stem.removesuffix("_e")


def _read(task: Task, path: Path, suite: SuiteName) -> list[dict[str, Any]]:
    def parse(record: Record, index: int, line: int) -> dict[str, Any]:
        prediction, answers = text(record, "pred", may_be_empty=True), texts(record, "answers")
        classes = value(record, "all_classes", "a list of labels, or null")
        if classes not in (None, []):
            texts(record, "all_classes")
        elif task.metric == "classification":
            raise wrong("all_classes", f"the labels of {task.name}", classes)
        return {
            "task": task.name,
            "id": str(index),
            "index": index,
            # The official scorer uses the length for LongBench-E only
            "length": words(record) if suite == "longbench-e" or "length" in record else None,
            "prediction": prediction,
            "answers": json.dumps(answers),
            "all_classes": json.dumps(classes),
            "truncated": 0,
        }

    with reading_as(f"{path} ({task.name})", "predictions", DataError):
        return parse_lines(read_bytes(path, MOST_DOCUMENT_BYTES), str(path), task, "predictions", parse, None)


def _miscounted(rows_of: Mapping[Path, Sequence[dict[str, Any]]], suite: SuiteName) -> list[str]:
    """Return a note on files that do not have one row for each document, if there are any.

    The official code appends to the file of an earlier run. Documents are identified by gold answers and length. Some
    official documents agree in both, so a file counts as a rerun only if every document occurs several times, or if it
    has too many rows. The number of LongBench-E's documents is not known here.
    """
    irregular: list[str] = []
    advice = ""
    for path, rows in rows_of.items():
        copies = Counter((row["answers"], row["length"]) for row in rows)
        times, official = gcd(*copies.values()), TASKS[rows[0]["task"]].documents
        is_rerun = times > 1 and len(rows) > times
        if is_rerun:
            irregular.append(f"{path.name} {len(rows)} for {len(rows) // times} (each {times} times)")
        elif suite == "longbench" and len(rows) != official:
            irregular.append(f"{path.name} {len(rows)} for {official}")
        if is_rerun or (suite == "longbench" and len(rows) > official):
            advice = (
                "; delete rows of appended runs: all are scored, as in the official code, and intervals are too narrow"
            )
            advice = f"; score LongBench-E's files with --e{advice}" if suite == "longbench" else advice
    return [f"more or fewer rows than documents: {', '.join(irregular)}{advice}"] if irregular else []
