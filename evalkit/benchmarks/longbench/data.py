"""LongBench's official files: documents, and predictions of its official code.

In: a task, and a folder or the hub's data.zip; or files of predictions. Out: validated documents, whose file is
compared with its official hash (another one is marked as not official); or a generations table, and the reverse, for
the official scorer. Errors name file, line and field.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evalkit.benchmarks.generated import TaskDocuments
from evalkit.benchmarks.longbench.official import template
from evalkit.benchmarks.longbench.protocol import E_TASKS, TASKS, SuiteName, Task
from evalkit.data.sampling import ALL_DOCUMENTS, DocumentSelection, FirstDocuments
from evalkit.data.sources import Hub, Record, text, value, wrong
from evalkit.display import Say, news
from evalkit.errors import DataError, UnknownNameError, UsageError, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, Unreadable, parse_json, read_bytes
from evalkit.runs.folder import MANIFEST

if TYPE_CHECKING:
    import pandas as pd

OFFICIAL_BLOBS: dict[str, str] = {
    "2wikimqa": "4973a61d19d8def6ecc20b92dba0a472e65a825f",
    "2wikimqa_e": "ad9c20133e3a88ab0fcfcc2c5a6492a6df3e89b7",
    "dureader": "6102bef95778c7e204b2d01c2d7b3843ccf8d8f1",
    "gov_report": "6f935674346a6bfa9027950c6851bd81a0a5cda5",
    "gov_report_e": "f1cbe037f78e1dcd17a79cefca009e58e98cba27",
    "hotpotqa": "7f44e50b1a7142585db1fdca0324fd4554cd9c98",
    "hotpotqa_e": "92f0dfba980309eb4d7975a42d422a5098132d1c",
    "lcc": "6d1f0eb98474cb686901cee7e01687d705bc593e",
    "lcc_e": "970d46bda5e170dc987c4d4aa7a603edea9c2a3c",
    "lsht": "9827c5f50fa87c88e16b9f06dd5a18ab9489d52a",
    "multi_news": "83ed3cc49ebbd880d0512d6dfdbad82b6fbf3a71",
    "multi_news_e": "4a65970dd190cb1b37c004fcade17e6dc68e4113",
    "multifieldqa_en": "a219154fb7add8fda8fa4d194e6cf445632ee5fa",
    "multifieldqa_en_e": "71ab54bd1e768b8ac7345e1815b04e4066f84eab",
    "multifieldqa_zh": "c286dc4b15d4b04745f2acfde984f578dd32f5d3",
    "musique": "fc11f706342894d29132f59810882bd99554fa98",
    "narrativeqa": "5446d6580c0fbabc4902baae7fc5d873a5063384",
    "passage_count": "7eb4be842c1c2242ddfe4748e3fb8e40a8d49421",
    "passage_count_e": "b8c8103fc49a40627652f4f5473b14efb382d24a",
    "passage_retrieval_en": "a91f7768b3f836e7aa387ac90945fcc85a0548f7",
    "passage_retrieval_en_e": "a0d178dae58bc849ca098d5d197793fee1d00580",
    "passage_retrieval_zh": "ff1cf3cdfe4b757d79993b04d6bcaba9f1550356",
    "qasper": "b1a8362e1ca5e8c8bc585240af28ff356353976e",
    "qasper_e": "31d3b9fe9e5ed5fab2c2ac53b3f1f5f9f4ab6a20",
    "qmsum": "8efa254509e031d38b5eec2ca8b7e4b1c91707b8",
    "repobench-p": "28d5076b0d4c37a551a2715226808a39174f2c15",
    "repobench-p_e": "1d8bfd7e3ee9cedf741adf2630074306a7a54a35",
    "samsum": "0e173e1fc54651179920ca0feb96a4c54186e85d",
    "samsum_e": "4c6d2e30d90f1462ce64bdbf25c609386bbdefb3",
    "trec": "e37b9a5219b86927df1393a2779b0082ae2b7436",
    "trec_e": "985ae414eeb0337e235592aa3a8e2d9d3d55f3e6",
    "triviaqa": "4c65d9b801d4f8cb1a13943f27f787098c4f412c",
    "triviaqa_e": "194baef10909d002e6c233715bef6b2dfcb99486",
    "vcsum": "db91aa53f5e579c0a0aee8e398596b419a316481",
}
"""File name without suffix → its hash; `_e` files are LongBench-E's."""

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
_PROCESS_HUB = Hub()
_REWORKED = ("question", "answer_prefix", "max_new_tokens")
"""Fields that exist only in re-worked copies, such as the hub's Xnhyacinth/LongBench."""
_CUES = {"trec": "Type:", "triviaqa": "Answer:", "samsum": "Summary:"}
"""Task → the end of the `input` of its few-shot rows, which re-worked copies move to another field."""

Parsed = TypeVar("Parsed")


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
    if suite == "longbench-e" and not task.in_e:
        raise UsageError(f"LongBench-E has no task {task.name}; its tasks are {', '.join(E_TASKS)}")
    name = f"{task.name}_e" if suite == "longbench-e" else task.name
    content, source = _content(task, name, data_dir, say, hub)
    content = content.replace(b"\r\n", b"\n")
    digest = blob_hash(content)
    official_name = next((stem for stem, pinned in OFFICIAL_BLOBS.items() if pinned == digest), None)
    if official_name not in (None, name):
        raise DataError(f"{source}: this is the official file of {official_name}, where {name}'s was expected")
    lines_of: dict[str, int] = {}

    def parse(record: Record, index: int, line: int) -> LongBenchDocument:
        document = _document(task, record, index, official_name is not None, lines_of)
        lines_of[document.id] = line
        return document

    most = selection.count if isinstance(selection, FirstDocuments) else None
    rows = _parse_lines(content, source, task, parse, most)
    return TaskDocuments(rows, source, digest, official_name is not None).selected(task.name, selection)


def _content(task: Task, name: str, data_dir: Path | None, say: Say, hub: Hub) -> tuple[bytes, str]:
    file_name, absent = f"{name}.jsonl", ""
    if data_dir is not None:
        folder = data_dir.expanduser()
        if not folder.is_dir():
            raise DataError(f"--data-dir {data_dir}: expected a folder with <task>.jsonl files, found none there")
        for parent in (folder, folder / "data"):
            path = parent / file_name
            if os.path.lexists(path):  # if it is no readable file, no other source is used either
                with reading_as(f"{path} ({task.name})", "rows", DataError):
                    return read_bytes(path, MOST_DOCUMENT_BYTES), f"data-dir {path}"
        absent = f"no {file_name} in {folder}; "
    archive = hub.file(REPOSITORY, ARCHIVE, say)
    if archive is None:
        raise DataError(
            f"no documents for {name}: {absent}the hub cannot be used ({hub.failure}). Unpack {ARCHIVE} of the dataset "
            f"{REPOSITORY} and give its folder with --data-dir"
        )
    with (
        reading_as(f"{archive} ({task.name})", f"{ARCHIVE}; delete it and try again", DataError),
        zipfile.ZipFile(archive) as opened,
    ):
        [member, *_] = [member for member in opened.namelist() if Path(member).name == file_name]
        return opened.read(member), f"hub {REPOSITORY}, {member}"


def blob_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _parse_lines(
    content: bytes, source: str, task: Task, parse: Callable[[Record, int, int], Parsed], most: int | None = None
) -> list[Parsed]:
    """Parse the first `most` records of JSON lines, without blank ones, by `parse` of record, index and line."""
    parsed: list[Parsed] = []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if len(parsed) == most:
            break
        if line.strip():
            try:
                if not isinstance(record := parse_json(line), dict):
                    raise DataError(f"expected a JSON object, found {type(record).__name__}")
                parsed.append(parse(record, len(parsed), number))
            except (DataError, Unreadable) as error:
                raise DataError(f"{source}, line {number} ({task.name}): {error}") from error
    if not parsed:
        raise DataError(f"{source} ({task.name}): expected JSON lines, found none")
    return parsed


def _document(task: Task, record: Record, index: int, official: bool, lines_of: Mapping[str, int]) -> LongBenchDocument:
    """Return the document of a record; `lines_of`: id, by which a resumed run finds a row, → line, of those before."""
    if not official:
        _reject_another_or_reworked(task, record)
    context = text(record, "context")
    question = text(record, "input", may_be_empty=True)
    answers = _texts(record, "answers")
    if not any(answer.strip() for answer in answers):
        raise wrong("answers", "at least one gold answer", list(answers))
    classes = () if record.get("all_classes") is None else _texts(record, "all_classes")
    if task.metric == "classification" and not set(answers) <= set(classes):
        raise wrong("all_classes", f"the labels of {task.name}, including the gold answer", record.get("all_classes"))
    if task.metric == "retrieval" and not all("Paragraph " in answer for answer in answers):
        raise wrong("answers", "'Paragraph' and a number", list(answers))
    if record.get("_id") is None:
        content = json.dumps([task.name, context, question, list(answers)])
        identity = f"content-{hashlib.sha256(content.encode('ascii')).hexdigest()[:24]}"
    else:
        identity = text(record, "_id")
        if identity in lines_of and not official:
            raise DataError(f"field '_id': {identity!a} is in line {lines_of[identity]} already; were rows appended?")
    names = (identity if copy == 1 else f"{identity}-{copy}" for copy in count(1))
    unique = next(name for name in names if name not in lines_of)
    return LongBenchDocument(task.name, unique, index, context, question, answers, _words(record), classes)


def _words(record: Record) -> int:
    length = value(record, "length", "an integer")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length < 2**31:
        raise wrong("length", "a number of words", length)
    return length


def _texts(record: Record, field: str) -> tuple[str, ...]:
    expected = "a list of strings that is not empty"
    items = value(record, field, expected)
    if not isinstance(items, list) or not items:
        raise wrong(field, expected, items)
    return tuple(text({field: item}, field, may_be_empty=True) for item in items)


def _reject_another_or_reworked(task: Task, record: Record) -> None:
    """Reject another task's rows, and re-worked copies, whose prompts would have the instruction twice or no cue."""
    stored = record.get("dataset", task.name)
    if stored not in (task.name, f"{task.name}_e"):  # LongBench-E's rows have either
        raise DataError(f"field 'dataset': expected '{task.name}', found {ascii(stored)[:60]}: another task's file")
    start = template(task).split("{context}")[0].rstrip()
    context, question, cue = record.get("context"), record.get("input"), _CUES.get(task.name, "")
    if names := [name for name in _REWORKED if name in record]:
        reason = f"it has a field '{names[0]}', official rows do not"
    elif isinstance(context, str) and len(start) > 20 and context.startswith(start):
        reason = "the prompt is already in its 'context'"
    elif isinstance(question, str) and not question.rstrip().endswith(cue):
        reason = f"its 'input' does not end with '{cue}'"
    else:
        return
    raise DataError(f"a re-worked copy of LongBench ({reason}); use the files of data.zip from {REPOSITORY}")


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
    if suite == "longbench-e" and (absent := [name for name in files if not TASKS[name].in_e]):
        skipped = ", ".join(str(files.pop(name)) for name in absent)
        notes.append(f"skipped, since LongBench-E has no such task: {skipped}")
    if not files:
        raise DataError(f"no predictions to score: {'; '.join(notes)}")
    rows_of = {file: _predictions(TASKS[name], file, suite) for name, file in files.items()}
    return pd.DataFrame(list(chain.from_iterable(rows_of.values()))), notes + _miscounted(rows_of, suite)


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
        raise DataError(f"{path}: expected a folder with <task>.jsonl files, found none")
    if other := [file.name for file in files if file.stem in OFFICIAL_BLOBS and _task_of(file) not in TASKS]:
        notes.append(f"skipped, since only the English tasks are scored: {', '.join(other)}")
    return [file for file in files if file.name not in other]


def _task_of(file: Path) -> str:
    return file.stem.removesuffix("_e")


def _predictions(task: Task, path: Path, suite: SuiteName) -> list[dict[str, Any]]:
    def parse(record: Record, index: int, _line: int) -> dict[str, Any]:
        prediction, answers = text(record, "pred", may_be_empty=True), _texts(record, "answers")
        classes = value(record, "all_classes", "a list of labels, or null")
        if classes not in (None, []):
            _texts(record, "all_classes")
        elif task.metric == "classification":
            raise wrong("all_classes", f"the labels of {task.name}", classes)
        return {
            "task": task.name,
            "id": str(index),
            "index": index,
            # The official scorer uses the length for LongBench-E only
            "length": _words(record) if suite == "longbench-e" or "length" in record else None,
            "prediction": prediction,
            "answers": json.dumps(answers),
            "all_classes": json.dumps(classes),
            "truncated": 0,
        }

    with reading_as(f"{path} ({task.name})", "predictions", DataError):
        return _parse_lines(read_bytes(path, MOST_DOCUMENT_BYTES), str(path), task, parse)


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
