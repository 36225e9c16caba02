"""Clusters of documents that share a source, so that a model's answers to them are correlated.

In: documents, and the task file's metadata. Out: a cluster for each document, which the score table stores and
statistics use. Neither torch nor lm-eval is imported.

A task file gives one of these keys in its `metadata`:

    source: passage          documents with the same text in this field share a source (BoolQ's passages)
    twins: sentence          documents with the same options and nearly the same sentence do (WinoGrande's twins)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

SHARED = frozenset({"source", "twins"})
"""Keys of a task file's metadata that define clusters."""

TWINS_ALIKE = 0.7
"""Word similarity from which two sentences with the same options are twins.

WinoGrande's identifiers, which its canonical documents lack, give 284 pairs in the official split. Among sentences with
the same options, these pairs have a similarity of 0.79 or more, all others of 0.56 or less."""

_WORD = re.compile(r"[\w']+")


def clusters_of(documents: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> list[int]:
    """Return the cluster of each document: the index of the first document of the same source.

    So the first documents of a task have the same clusters as in the whole task. A document without the field that the
    metadata names, which may occur in a user's file, is a cluster of its own.

    Args:
        documents: documents of one lm-eval task, in order.
        metadata: the task file's metadata.
    """
    if "source" in metadata:
        return _same_text(documents, str(metadata["source"]))
    if "twins" in metadata:
        return _twins(documents, str(metadata["twins"]))
    return list(range(len(documents)))


def _same_text(documents: Sequence[Mapping[str, Any]], field: str) -> list[int]:
    first: dict[str, int] = {}
    texts = [document.get(field) for document in documents]
    return [
        first.setdefault(text, place) if isinstance(text, str) and text else place for place, text in enumerate(texts)
    ]


def _twins(documents: Sequence[Mapping[str, Any]], field: str) -> list[int]:
    clusters: list[int] = []
    by_options: dict[frozenset[str], list[int]] = {}
    for place, document in enumerate(documents):
        options = frozenset(str(document.get(name)).lower() for name in ("option1", "option2"))
        earlier = by_options.setdefault(options, [])
        alike = (other for other in earlier if _alike(document[field], documents[other][field]))
        twin = next(alike, None)
        clusters.append(place if twin is None else clusters[twin])
        earlier.append(place)
    return clusters


def _alike(one: str, other: str) -> bool:
    words: list[list[str]] = [_WORD.findall(text.lower()) for text in (one, other)]
    return SequenceMatcher(None, words[0], words[1], autojunk=False).ratio() >= TWINS_ALIKE
