"""Predictions in the form of LongBench's own code, read and written.

In: files named after the task, a JSON object a line with `pred`, `answers` and `all_classes`, for LongBench-E `length`
too. Out: a generations table, and what is odd about the files. Or the other way round, for the official scorer.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import pandas as pd

from evalkit.benchmarks.longbench.documents import read_record, words
from evalkit.benchmarks.longbench.pins import OFFICIAL_BLOBS
from evalkit.benchmarks.longbench.protocol import TASKS, SuiteName, Task, find_task
from evalkit.data.fields import text
from evalkit.data.files import did_you_mean
from evalkit.errors import DataError, RunError, UnknownNameError
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, Unreadable, read_bytes
from evalkit.runs.folder import MANIFEST

_FIELDS = ("pred", "answers", "all_classes")


@dataclass(frozen=True)
class Predictions:
    """What was read."""

    generations: pd.DataFrame
    """As `scores` wants it: task, id, index, length, prediction, answers, all_classes, truncated."""
    notes: tuple[str, ...]
    """What the reader of the scores should know: rows that stand there twice, files passed over."""


def read_predictions(paths: Sequence[Path], suite: SuiteName = "longbench") -> Predictions:
    """Read prediction files.

    Args:
        paths: files, `<task>.jsonl` or `<task>_e.jsonl`, or folders of them.
        suite: which benchmark they are of; LongBench's files have a known number of rows.

    Raises:
        UnknownNameError: a file is not named after an English task.
        DataError: a file cannot be read, a line is no prediction, or two files are of one task; names file and line.
    """
    notes: list[str] = []
    files: dict[str, Path] = {}
    absent: list[str] = []
    for path in paths:
        for file in _files(path, notes):
            task = _task_of(file)
            if task.name in files:
                raise DataError(f"{files[task.name]} and {file} are both of {task.name}; give one of them")
            if suite == "longbench-e" and not task.in_e:
                absent.append(str(file))
                continue
            files[task.name] = file
    if absent:
        notes.append(f"passed over, since LongBench-E has no such task: {', '.join(absent)}")
    if not files:
        raise DataError("no predictions to score: " + ("; ".join(notes) or "no files were given"))
    found = {file: _read(find_task(name), file, suite) for name, file in files.items()}
    notes += _miscounted(found, suite)
    return Predictions(pd.DataFrame([row for rows in found.values() for row in rows]), tuple(notes))


def write_predictions(generations: pd.DataFrame, folder: Path) -> list[Path]:
    """Write a generations table as the official scorer reads it, a file for each task; replaces what is there.

    Raises:
        RunError: a file cannot be written.
    """
    written = []
    for name, rows in generations.groupby("task", sort=False):
        path = folder / f"{name}.jsonl"
        lines = [
            {"pred": prediction, "answers": json.loads(answers), "all_classes": json.loads(classes), "length": length}
            for prediction, answers, classes, length in zip(
                rows["prediction"], rows["answers"], rows["all_classes"], rows["length"].tolist(), strict=True
            )
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
    """The file, or a folder's files of English tasks. Files that evalkit does not score there are told."""
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.name == "result.json":  # what the official scorer writes beside them
        notes.append(f"{path} is passed over: it holds scores")
        return []
    if not path.is_dir():
        return [path]
    if (path / MANIFEST).is_file():
        raise DataError(f"{path} is a run of evalkit; use evalkit longbench rescore {path}")
    files = sorted(path.glob("*.jsonl"))
    if not files:
        hint = did_you_mean(path, lambda folder: sum(_bears_task(file) for file in folder.glob("*.jsonl")))
        raise DataError(f"{path}: expected a folder with <task>.jsonl files, found none{hint}")
    other = [file.name for file in files if file.stem not in TASKS and file.stem in OFFICIAL_BLOBS]
    other = [name for name in other if name.removesuffix("_e.jsonl") not in TASKS]
    if other:
        notes.append(f"passed over, since only the English tasks are scored: {', '.join(other)}")
    return [file for file in files if file.name not in other]


def _bears_task(file: Path) -> bool:
    return file.stem.removesuffix("_e") in TASKS


def _task_of(file: Path) -> Task:
    try:
        return find_task(file.stem if file.stem in TASKS else file.stem.removesuffix("_e"))
    except UnknownNameError as error:
        raise UnknownNameError(f"LongBench task in the file name {file.name}:", file.stem, TASKS) from error


def _read(task: Task, path: Path, suite: SuiteName) -> list[dict[str, Any]]:
    try:
        lines = read_bytes(path, MOST_DOCUMENT_BYTES).removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} ({task.name}): cannot be read: {error.strerror or error}") from error
    except Unreadable as error:
        raise DataError(f"{path} ({task.name}): {error}") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(_row(task, line, len(rows), suite))
            except DataError as error:
                raise DataError(f"{path}, line {number} ({task.name}): {error}") from error
    if not rows:
        raise DataError(f"{path} ({task.name}): expected predictions, found none")
    return rows


def _row(task: Task, line: bytes, index: int, suite: SuiteName) -> dict[str, Any]:
    record = read_record(line)
    # The official scorer looks at the length for LongBench-E only
    fields = (*_FIELDS, "length") if suite == "longbench-e" else _FIELDS
    if missing := [field for field in fields if field not in record]:
        raise DataError(f"field '{missing[0]}' is missing; a prediction has {', '.join(fields)}")
    answers, classes = record["answers"], record["all_classes"]
    if not isinstance(record["pred"], str):
        raise DataError(f"field 'pred': expected a string, found {type(record['pred']).__name__}")
    text(record, "pred", may_be_empty=True)
    if not _are_texts(answers):
        raise DataError("field 'answers': expected a list of strings with something in it")
    if not (classes is None or classes == [] or _are_texts(classes)):
        raise DataError("field 'all_classes': expected a list of strings, or null")
    if task.metric == "classification" and not classes:
        raise DataError(f"field 'all_classes': expected the labels of {task.name}")
    return {
        "task": task.name,
        "id": str(index),
        "index": index,
        "length": words(record) if "length" in record else None,
        "prediction": record["pred"],
        "answers": json.dumps(answers),
        "all_classes": json.dumps(classes),
        "truncated": 0,
    }


def _are_texts(found: object) -> bool:
    return isinstance(found, list) and bool(found) and all(isinstance(item, str) for item in found)


def _miscounted(found: Mapping[Path, Sequence[dict[str, Any]]], suite: SuiteName) -> list[str]:
    """A note on files that have not one row for each document, where there are any.

    The official code appends to the file of an earlier run. Documents are distinguished by gold answers and length, as
    the format has no ids; some official documents agree in both, so that it is a rerun only where each of them stands
    there several times, or where there are too many rows. How many LongBench-E has is not known here.
    """
    odd: list[str] = []
    too_many = of_e = False
    for path, rows in found.items():
        copies = Counter((row["answers"], row["length"]) for row in rows)
        times, official = gcd(*copies.values()), find_task(rows[0]["task"]).documents
        if times > 1 and len(rows) > times:
            odd.append(f"{path.name} {len(rows)} for {len(rows) // times} (each {times} times)")
            too_many = True
        elif suite == "longbench" and len(rows) != official:
            odd.append(f"{path.name} {len(rows)} for {official}")
            of_e = of_e or len(rows) > official
    if not odd:
        return []
    advice = "are they LongBench-E's, which are scored with --e, or " if of_e else ""
    advice += "was a later run appended? All are scored, as the official code does, but intervals are then too narrow"
    return [f"more or fewer rows than documents: {', '.join(odd)}" + (f"; {advice}" if too_many or of_e else "")]
