"""lm-eval datasets of evalkit's pinned documents, which task files under `tasks/` name as their `custom_dataset`.

In: a document set's name. Out: `datasets.Dataset`s by split, for evalkit and `lm_eval --include_path tasks`, where the
folder of `--data-dir` is `--metadata '{"data_dir": "FOLDER"}'` or `EVALKIT_DATA_DIR`.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

from evalkit.data.sources import Record
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
    """Return the documents of one task as lm-eval datasets.

    Args:
        documents: name of the document set, as in `evalkit.data.TASKS`.
        split: the split's name that the task file expects.
        subject: keep only the documents of this MMLU subject.
        library: evalkit's own library; by default one is opened on `data_dir`.
        data_dir: folder of `<task>.jsonl` files; by default `EVALKIT_DATA_DIR`.
        examples: name of the document set for few-shot examples; they become the split `dev`.
        num_fewshot: number of few-shot examples; 0 loads none. None: examples are loaded if a local source has them,
            since lm-eval's own command line does not pass its `--num_fewshot` to a dataset.
        in_turn: a field; documents are interleaved by its values, so that the first documents cover all values.

    Returns:
        `{split: datasets.Dataset}`, and with `examples` also `dev`, empty where examples are not loaded.

    Raises:
        DataError: there are no such documents.
    """
    from datasets import Dataset

    library = library or _own_library(data_dir)
    found = _of_subject(library.load(documents).records, subject)
    if in_turn is not None:
        found = _interleaved(found, in_turn)
    if not found:
        # lm-eval reads the first document of every task, and fails without the task's name where there is none
        of_subject = f" of the subject {subject}" if subject else ""
        raise DataError(f"{documents}: there are no documents{of_subject}; every task and subject needs at least one")
    if examples is None:
        return {split: Dataset.from_list(found)}
    load_examples = library.where(examples).path is not None if num_fewshot is None else num_fewshot > 0
    dev = _of_subject(library.load(examples).records, subject) if load_examples else []
    return {split: Dataset.from_list(found), "dev": Dataset.from_list(dev)}


def _of_subject(records: list[Record], subject: str | None) -> list[Record]:
    return records if subject is None else [record for record in records if record["subject"] == subject]


def _interleaved(records: list[Record], field: str) -> list[Record]:
    turns = Counter[object]()

    def turn(record: Record) -> int:
        turns[record[field]] += 1
        return turns[record[field]]

    return sorted(records, key=turn)


def _own_library(data_dir: str | None) -> Library:
    return _library_of(os.environ.get("EVALKIT_DATA_DIR") if data_dir is None else data_dir)


@cache
def _library_of(folder: str | None) -> Library:
    """Return one library for each folder, so that MMLU's 57 tasks read their file once."""
    from evalkit.data import Library

    return Library(None if folder is None else values.path("data_dir", folder))
