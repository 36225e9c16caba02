"""The bridge from evalkit's pinned documents to lm-eval's tasks.

The task files under `tasks/` name `dataset` as their `custom_dataset`, so that both evalkit and
`lm_eval --include_path tasks` read the same checked documents. On lm-eval's command line the folder of
`--data-dir` is given as `--metadata '{"data_dir": "FOLDER"}'` or as `EVALKIT_DATA_DIR`.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from evalkit.data.fields import Record
from evalkit.errors import DataError
from evalkit.inputs import values

if TYPE_CHECKING:
    from evalkit.data import Library


def dataset(
    documents: str,
    split: str,
    subject: str | None = None,
    library: Library | None = None,
    data_dir: str | None = None,
    examples: str | None = None,
    num_fewshot: int | None = None,
    in_turn: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Give lm-eval the documents of one task.

    Args:
        documents: name of the document set, as in `evalkit.data.TASKS`.
        split: the split's name that the task file expects.
        subject: keep only the documents of this MMLU subject.
        library: where evalkit itself loads from; without it one is opened on `data_dir`.
        data_dir: folder of `<task>.jsonl` files, else `EVALKIT_DATA_DIR`.
        examples: name of the documents that few-shot examples are taken from; they become the split `dev`.
        num_fewshot: how many are wanted; none are loaded for 0. None, as on lm-eval's own command line, which does
            not tell a data set of its `--num_fewshot`: those that are on this machine are loaded.
        in_turn: a field; the documents stand in turns, one of each of its values, so that the first ones are of all.

    Returns:
        `{split: datasets.Dataset}`, and with `examples` also `dev`, empty where they are not loaded.

    Raises:
        DataError: there are no such documents.
    """
    from datasets import Dataset

    library = library or _own_library(data_dir)
    found = _of_subject(library.load(documents).records, subject)
    if in_turn is not None:
        found = _in_turn(found, in_turn)
    if not found:
        # lm-eval looks at the first document of every task, and fails on none without saying of which
        of_subject = f" of the subject {subject}" if subject else ""
        raise DataError(f"{documents}: there are no documents{of_subject}; every task and subject needs at least one")
    if examples is None:
        return {split: Dataset.from_list(found)}
    wanted = library.where(examples).path is not None if num_fewshot is None else num_fewshot > 0
    shown = _of_subject(library.load(examples).records, subject) if wanted else []
    return {split: Dataset.from_list(found), "dev": Dataset.from_list(shown)}


def _of_subject(records: list[Record], subject: str | None) -> list[Record]:
    return records if subject is None else [record for record in records if record["subject"] == subject]


def _in_turn(records: list[Record], field: str) -> list[Record]:
    seen: Counter[object] = Counter()
    turns: list[list[Record]] = []
    for record in records:
        turn = seen[record[field]]
        seen[record[field]] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(record)
    return [record for turn in turns for record in turn]


_libraries: dict[str | None, Library] = {}


def _own_library(data_dir: str | None) -> Library:
    """One library a folder, so that MMLU's 57 tasks read their file once."""
    from evalkit.data import Library

    folder = os.environ.get("EVALKIT_DATA_DIR") if data_dir is None else data_dir
    if folder not in _libraries:
        _libraries[folder] = Library(None if folder is None else values.path("data_dir", folder))
    return _libraries[folder]
