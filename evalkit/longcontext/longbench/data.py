"""LongBench's official files: documents, and predictions of its official code.

In: a task, and a folder or the hub's data.zip; or files of predictions. Out: validated documents, whose file is
compared with its official hash (another one is marked as not official); or a generations table, and the reverse, for
the official scorer. Errors name file, line and field.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSelection, FirstDocuments
from evalkit.data.sources import Hub, json_lines
from evalkit.display import Say, news
from evalkit.errors import DataError, UnknownNameError, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, read_bytes
from evalkit.inputs.validated import Stored, validated
from evalkit.inputs.values import LONGEST_TEXT, text_digest
from evalkit.longcontext.longbench.official import template
from evalkit.longcontext.longbench.protocol import E_TASKS, TASKS, SuiteName, Task

if TYPE_CHECKING:
    import pandas as pd

_BLOBS = {
    "2wikimqa": ("4973a61d19d8def6ecc20b92dba0a472e65a825f", "ad9c20133e3a88ab0fcfcc2c5a6492a6df3e89b7"),
    "dureader": ("6102bef95778c7e204b2d01c2d7b3843ccf8d8f1",),
    "gov_report": ("6f935674346a6bfa9027950c6851bd81a0a5cda5", "f1cbe037f78e1dcd17a79cefca009e58e98cba27"),
    "hotpotqa": ("7f44e50b1a7142585db1fdca0324fd4554cd9c98", "92f0dfba980309eb4d7975a42d422a5098132d1c"),
    "lcc": ("6d1f0eb98474cb686901cee7e01687d705bc593e", "970d46bda5e170dc987c4d4aa7a603edea9c2a3c"),
    "lsht": ("9827c5f50fa87c88e16b9f06dd5a18ab9489d52a",),
    "multi_news": ("83ed3cc49ebbd880d0512d6dfdbad82b6fbf3a71", "4a65970dd190cb1b37c004fcade17e6dc68e4113"),
    "multifieldqa_en": ("a219154fb7add8fda8fa4d194e6cf445632ee5fa", "71ab54bd1e768b8ac7345e1815b04e4066f84eab"),
    "multifieldqa_zh": ("c286dc4b15d4b04745f2acfde984f578dd32f5d3",),
    "musique": ("fc11f706342894d29132f59810882bd99554fa98",),
    "narrativeqa": ("5446d6580c0fbabc4902baae7fc5d873a5063384",),
    "passage_count": ("7eb4be842c1c2242ddfe4748e3fb8e40a8d49421", "b8c8103fc49a40627652f4f5473b14efb382d24a"),
    "passage_retrieval_en": ("a91f7768b3f836e7aa387ac90945fcc85a0548f7", "a0d178dae58bc849ca098d5d197793fee1d00580"),
    "passage_retrieval_zh": ("ff1cf3cdfe4b757d79993b04d6bcaba9f1550356",),
    "qasper": ("b1a8362e1ca5e8c8bc585240af28ff356353976e", "31d3b9fe9e5ed5fab2c2ac53b3f1f5f9f4ab6a20"),
    "qmsum": ("8efa254509e031d38b5eec2ca8b7e4b1c91707b8",),
    "repobench-p": ("28d5076b0d4c37a551a2715226808a39174f2c15", "1d8bfd7e3ee9cedf741adf2630074306a7a54a35"),
    "samsum": ("0e173e1fc54651179920ca0feb96a4c54186e85d", "4c6d2e30d90f1462ce64bdbf25c609386bbdefb3"),
    "trec": ("e37b9a5219b86927df1393a2779b0082ae2b7436", "985ae414eeb0337e235592aa3a8e2d9d3d55f3e6"),
    "triviaqa": ("4c65d9b801d4f8cb1a13943f27f787098c4f412c", "194baef10909d002e6c233715bef6b2dfcb99486"),
    "vcsum": ("db91aa53f5e579c0a0aee8e398596b419a316481",),
}
"""Task → the hashes of its file, and of that of LongBench-E."""
OFFICIAL_BLOBS: dict[str, str] = {
    name: blob for task, blobs in _BLOBS.items() for name, blob in zip((task, f"{task}_e"), blobs, strict=False)
}
"""File name without suffix → its hash; `_e` files are LongBench-E's."""

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
_PROCESS_HUB = Hub()
_REWORKED = ("question", "answer_prefix", "max_new_tokens")
"""Fields that exist only in re-worked copies, such as the hub's Xnhyacinth/LongBench."""
_CUES = {"trec": "Type:", "triviaqa": "Answer:", "samsum": "Summary:"}
"""Task → the end of the `input` of its few-shot rows, which re-worked copies move to another field."""


@dataclass(frozen=True)
class LongBenchDocument:
    task: str
    id: str
    """The official `_id`; if it is missing, a hash of the content that determines the evaluation."""
    index: int
    context: str
    input: str
    """The question; for few-shot tasks the last, unanswered example; empty where a task has none."""
    answers: tuple[str, ...]
    """Gold answers, of which any one is correct."""
    length: int
    """The stored length in words, which determines the bucket of LongBench-E's rows."""
    all_classes: tuple[str, ...]
    """The labels of a classification task; empty for others."""


_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
_NotBlank = Annotated[_Text, Field(pattern=r"\S")]
_Texts = Annotated[list[_Text], Field(min_length=1)]
_Words = Annotated[int, Field(ge=0, lt=2**31)]


class _Row(Stored):
    context: _NotBlank
    input: _Text
    answers: _Texts
    length: _Words
    all_classes: _Texts | None = None
    id: _NotBlank | None = Field(None, alias="_id")


class _Prediction(Stored):
    pred: _Text
    answers: _Texts
    all_classes: list[_Text] | None
    length: _Words | None = None


def load_rows(
    task: Task,
    data_dir: Path | None = None,
    selection: DocumentSelection = ALL_DOCUMENTS,
    suite: SuiteName = "longbench",
    say: Say = news,
    hub: Hub = _PROCESS_HUB,
) -> TaskDocuments:
    """Load the selected documents of one task, from a folder with `<task>.jsonl` (LongBench-E: `<task>_e.jsonl`).

    The file is in the folder or in its subfolder `data`; a task without one is loaded from the cache or the hub, about
    which `say` is called. Its digest is git's hash of the whole file with line feeds as line ends.
    """
    name = f"{task.name}_e" if suite == "longbench-e" else task.name
    content, source = _content(task, name, data_dir, say, hub)
    content = content.replace(b"\r\n", b"\n")
    digest = blob_hash(content)
    official_name = next((stem for stem, pinned in OFFICIAL_BLOBS.items() if pinned == digest), None)
    if official_name not in (None, name):
        raise DataError(f"{source}: this is the official file of {official_name}, where {name}'s was expected")
    most = selection.count if isinstance(selection, FirstDocuments) else None
    documents: dict[str, LongBenchDocument] = {}
    for where, record in _records(content, source, task, most):
        document = _document(task, record, where, documents, official_name is not None)
        documents[document.id] = document
    total = sum(bool(line.strip()) for line in content.split(b"\n"))
    loaded = TaskDocuments([*documents.values()], source, digest, official_name is not None, total)
    return loaded.selected(task.name, selection)


def _content(task: Task, name: str, data_dir: Path | None, say: Say, hub: Hub) -> tuple[bytes, str]:
    file_name, absent = f"{name}.jsonl", "no documents: "
    if data_dir is not None:
        folder = data_dir.expanduser()
        if not folder.is_dir():
            raise DataError(f"--data-dir {data_dir}: is no folder")
        for parent in (folder, folder / "data"):
            path = parent / file_name
            if os.path.lexists(path):  # if it is no readable file, no other source is used either
                with reading_as(f"{path} ({task.name})", "rows", DataError):
                    return read_bytes(path, MOST_DOCUMENT_BYTES), f"data-dir {path}"
        absent = f"no file of that name with the ending {file_name.removeprefix(task.name)} in {folder}; "
    archive = hub.file(REPOSITORY, ARCHIVE, say)
    if archive is None:
        raise DataError(f"{absent}the hub cannot be used ({hub.failure}); give the folder of {ARCHIVE} with --data-dir")
    with (
        reading_as(f"{archive} ({task.name})", f"{ARCHIVE}; delete it and try again", DataError),
        zipfile.ZipFile(archive) as opened,
    ):
        [member, *_] = [member for member in opened.namelist() if Path(member).name == file_name]
        return opened.read(member), f"hub {REPOSITORY}, {member}"


def blob_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _records(content: bytes, source: str, task: Task, most: int | None = None) -> list[tuple[str, Any]]:
    """Return the first `most` records of JSON lines, each after file, line and task for messages."""
    records = list(islice(json_lines(content, source, task.name), most))
    if not records:
        raise DataError(f"{source} ({task.name}): expected JSON lines, found none")
    return [(f"{source}, {line} ({task.name})", record) for line, record in records]


def _document(
    task: Task, record: Any, where: str, known: Mapping[str, LongBenchDocument], official: bool
) -> LongBenchDocument:
    """Return the document of a record; `known`: those before, by the id that a resumed run finds them by."""
    if not official:
        _reject_another_or_reworked(task, validated(record, dict[str, Any], DataError, where), where)
    row = validated(record, _Row, DataError, where)
    if not any(answer.strip() for answer in row.answers):
        raise DataError(f"{where}: 'answers' has no gold answer")
    if task.metric == "classification" and not set(row.answers) <= set(row.all_classes or ()):
        raise DataError(f"{where}: 'all_classes' lacks the gold answer {row.answers!a:.60}")
    if task.metric == "retrieval" and not all("Paragraph " in answer for answer in row.answers):
        raise DataError(f"{where}: 'answers' is {row.answers!a:.60}; expected 'Paragraph' and a number")
    if row.id in known and not official:
        raise DataError(f"{where}: '_id' {row.id!a:.60} is that of an earlier row; were rows appended?")
    content = json.dumps([task.name, row.context, row.input, row.answers])
    identity = row.id or f"content-{text_digest(content)[:24]}"
    names = (identity if copy == 1 else f"{identity}-{copy}" for copy in count(1))
    unique, classes = next(name for name in names if name not in known), tuple(row.all_classes or ())
    return LongBenchDocument(
        task.name, unique, len(known), row.context, row.input, tuple(row.answers), row.length, classes
    )


def _reject_another_or_reworked(task: Task, record: Mapping[str, Any], where: str) -> None:
    """Reject another task's rows, and re-worked copies, whose prompts would have the instruction twice or no cue."""
    stored = record.get("dataset", task.name)
    if stored not in (task.name, f"{task.name}_e"):  # LongBench-E's rows have either
        raise DataError(f"{where}: 'dataset' is {stored!a:.60}, expected '{task.name}': another task's file")
    start, cue = template(task).split("{context}")[0].rstrip(), _CUES.get(task.name, "")
    if names := [name for name in _REWORKED if name in record]:
        reason = f"it has a field '{names[0]}', official rows do not"
    elif len(start) > 20 and str(record.get("context")).startswith(start):
        reason = "the prompt is already in its 'context'"
    elif not str(record.get("input")).rstrip().endswith(cue):
        reason = f"its 'input' does not end with '{cue}'"
    else:
        return
    raise DataError(f"{where}: a re-worked copy of LongBench ({reason}); use the files of data.zip from {REPOSITORY}")


def read_predictions(paths: Sequence[Path], suite: SuiteName = "longbench") -> tuple[pd.DataFrame, list[str]]:
    """Read the official code's files `<task>.jsonl` or `<task>_e.jsonl`, or folders of them.

    A line is a JSON object with `pred`, `answers`, `all_classes` and, for LongBench-E, `length`. Returns a generations
    table (see `results`), and notes on irregular files, to print with the scores.
    """
    import pandas as pd

    notes: list[str] = []
    files: dict[str, Path] = {}
    for file in chain.from_iterable(_files(path, notes) for path in paths):
        if (name := _task_of(file)) not in TASKS:
            raise UnknownNameError(f"LongBench task in the file name {file.name}:", file.stem, TASKS)
        if name in files:
            raise DataError(f"{files[name]} and {file} are both of {name}; give one of them")
        files[name] = file
    if suite == "longbench-e" and (absent := [name for name in files if name not in E_TASKS]):
        skipped = ", ".join(str(files.pop(name)) for name in absent)
        notes.append(f"skipped, since LongBench-E has no such task: {skipped}")
    if not files:
        none = f"{', '.join(map(str, paths))}: no .jsonl file of predictions for a LongBench task"
        raise DataError("; ".join([none, *notes]))
    rows_of = {file: _predictions(TASKS[name], file, suite) for name, file in files.items()}
    return pd.DataFrame(list(chain.from_iterable(rows_of.values()))), notes + _miscounted(rows_of, suite)


def _files(path: Path, notes: list[str]) -> list[Path]:
    """Return the file, or a folder's files of English tasks; add a note on files that evalkit does not score."""
    if path.name == "result.json":  # written by the official scorer to the same folder
        notes.append(f"{path} is skipped: it contains scores")
        return []
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.jsonl"))
    if other := [file.name for file in files if file.stem in OFFICIAL_BLOBS and _task_of(file) not in TASKS]:
        notes.append(f"skipped, since only the English tasks are scored: {', '.join(other)}")
    return [file for file in files if file.name not in other]


def _task_of(file: Path) -> str:
    return file.stem.removesuffix("_e")


def _predictions(task: Task, path: Path, suite: SuiteName) -> list[dict[str, Any]]:
    with reading_as(f"{path} ({task.name})", "predictions", DataError):
        content = read_bytes(path, MOST_DOCUMENT_BYTES)
    rows = []
    for index, (where, record) in enumerate(_records(content, str(path), task)):
        line = validated(record, _Prediction, DataError, where)
        if task.metric == "classification" and not line.all_classes:
            raise DataError(f"{where}: 'all_classes' lacks the labels of {task.name}")
        if suite == "longbench-e" and line.length is None:  # of which LongBench-E has buckets
            raise DataError(f"{where}: it lacks 'length'")
        about = {"task": task.name, "id": str(index), "index": index, "length": line.length, "prediction": line.pred}
        texts = {"answers": json.dumps(line.answers), "all_classes": json.dumps(line.all_classes)}
        rows.append(about | texts | {"truncated": 0})
    return rows


def _miscounted(rows_of: Mapping[Path, Sequence[dict[str, Any]]], suite: SuiteName) -> list[str]:
    """Return a note on files that do not have one row for each document: the official code appends to earlier runs.

    Documents are identified by gold answers and length. Some official documents agree in both, so a file counts as a
    rerun only if every document occurs several times, or if it has too many rows.
    """
    irregular, is_longer = list[str](), False
    for path, rows in rows_of.items():
        copies = Counter((row["answers"], row["length"]) for row in rows)
        times, official = gcd(*copies.values()), TASKS[rows[0]["task"]].documents
        if times > 1 and len(rows) > times:
            irregular.append(f"{path.name} {len(rows)} for {len(rows) // times} (each {times} times)")
            is_longer = True
        elif suite == "longbench" and len(rows) != official:
            irregular.append(f"{path.name} {len(rows)} for {official}")
            is_longer = is_longer or len(rows) > official
    advice = "; score LongBench-E's files with --e" if suite == "longbench" else ""
    advice += "; delete rows of appended runs: all are scored, as in the official code, and intervals are too narrow"
    note = f"more or fewer rows than documents: {', '.join(irregular)}{advice * is_longer}"
    return [note] if irregular else []


def write_predictions(generations: pd.DataFrame, folder: Path) -> list[Path]:
    """Write a generations table for the official scorer, a file for each task; existing files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in generations.groupby("task", sort=False):
        columns = (rows["prediction"], rows["answers"], rows["all_classes"], rows["length"].tolist())
        lines = [
            {"pred": prediction, "answers": json.loads(answers), "all_classes": json.loads(classes), "length": length}
            for prediction, answers, classes, length in zip(*columns, strict=True)
        ]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        written.append(folder / f"{name}.jsonl")
        written[-1].write_bytes(content.encode())
    return written
