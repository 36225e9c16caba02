"""Request files made in a test, and a reader of such files that is independent of evalkit."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]
UNCONDITIONAL = 1_000_000


class Literal(NamedTuple):
    """A document as its lines in the file say it, one entry for each choice."""

    doc_id: int
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    label: Any
    alone: tuple[str, ...]
    """Contexts of the lines without the question."""
    doc: Any


def lines_of(
    doc_id: int,
    context: str | Sequence[str],
    continuations: Sequence[str],
    label: Any = 0,
    alone: str | None = None,
) -> list[Line]:
    """The lines of a document; one context for all choices, or one for each."""
    contexts = [context] * len(continuations) if isinstance(context, str) else context
    pairs = list(zip(contexts, continuations, strict=True))
    lines = [{"doc_id": doc_id, "context": before, "continuation": text, "label": label} for before, text in pairs]
    if alone is not None:
        lines += [line | {"doc_id": doc_id + UNCONDITIONAL, "context": alone} for line in lines]
    return lines


def gold_lines(doc_id: int, context: str, answer: str) -> list[Line]:
    return [{"doc_id": doc_id, "context": context, "continuation": answer}]


def write(path: Path, *documents: Iterable[Line]) -> Path:
    """Write documents, those without the question last; packed if the name ends in .gz."""
    lines = [line for document in documents for line in document]
    lines.sort(key=lambda line: line["doc_id"] >= UNCONDITIONAL)
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path: Path) -> list[Literal]:
    """Read a file of requests, of either form, by nothing but its description."""
    by_id: dict[int, list[Line]] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for text in file:
            line = json.loads(text)
            by_id.setdefault(line["doc_id"], []).append(line | line.get("request", {}))
    documents = []
    for doc_id, lines in by_id.items():
        if doc_id < UNCONDITIONAL:
            alone = by_id.get(doc_id + UNCONDITIONAL, [])
            assert [line["continuation"] for line in alone] in ([], [line["continuation"] for line in lines])
            columns = (tuple(line[name] for line in lines) for name in ("context", "continuation"))
            about = lines[0].get("label"), tuple(line["context"] for line in alone), lines[0].get("doc")
            documents.append(Literal(doc_id, *columns, *about))
    return documents
