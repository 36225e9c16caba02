"""Lines of lm-eval's sample files, which are untrusted.

In: a file `samples_<task>_<time>.jsonl`. Out: a validated `LoggedSample` for each line, that is, for each document and
each filter of its answers. lm-eval writes numbers of answers as text; older versions wrote them as numbers, and the
requests as lists.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import DataError
from evalkit.inputs.reading import Unreadable, parse_json
from evalkit.reporting.escape import printable

MOST_LINE_BYTES = 2**24
"""Size limit of a line, which has one document with its prompts."""
_MOST_NUMBER = 2**63 - 1
"""Largest number of a document: tables store 64 bits."""
_STANDARD = frozenset(
    {
        "doc_id",
        "doc",
        "target",
        "arguments",
        "resps",
        "filtered_resps",
        "filter",
        "metrics",
        "doc_hash",
        "prompt_hash",
        "target_hash",
    }
)
"""Keys of a line that are no metric."""


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """One line: a document, its requests, and its answers under one filter."""

    line: int
    """Number of the line, from 1."""
    doc_id: int
    doc: dict[str, Any]
    target: str
    requests: tuple[tuple[str, ...], ...]
    """Texts of each request: context and continuation, or a prompt alone."""
    answers: tuple[Any, ...]
    """Filtered answer to each request."""
    filter: str
    metrics: dict[str, float | None]
    """Metric → the document's value; None if it is not a number."""
    hashes: str
    """lm-eval's hashes of document, prompt and target, joined; empty if one is absent."""

    @property
    def likelihoods(self) -> tuple[float, ...] | None:
        """Log-likelihood of each request, a natural logarithm; None if an answer is not (log-likelihood, greedy)."""
        pairs = [one for one in self.answers if isinstance(one, list) and len(one) == 2 and _is_greedy(one[1])]
        if not pairs or len(pairs) < len(self.answers):
            return None
        found = tuple(_number(one[0]) for one in pairs)
        return None if None in found else tuple(one for one in found if one is not None)

    @property
    def by_evalkit(self) -> bool:
        """Whether evalkit answered: it does not compute greediness, and writes it as None."""
        return any(isinstance(one, list) and one[-1:] == ["None"] for one in self.answers)


def read_samples(path: Path) -> Iterator[tuple[LoggedSample, bytes]]:
    """Yield the lines of a sample file with their bytes.

    Raises:
        DataError: the file cannot be read, or a line is invalid; names file and line.
    """
    shared: dict[str, str] = {}
    for number, data in _lines(path):
        where = f"{path}, line {number}"
        try:
            content = parse_json(data)
        except Unreadable as error:
            raise DataError(
                f"{where}: {error.reason}; expected one JSON object a line, as lm-eval --log_samples writes them"
            ) from error
        yield _sample(content, number, where, shared), data


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path} is not a regular file; give a file samples_<task>_<time>.jsonl")
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(data) > MOST_LINE_BYTES:
                    raise DataError(f"{path}, line {number}: has more than {MOST_LINE_BYTES:,} bytes; is it a log?")
                yield number, data
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; check the path") from error


def _sample(content: Any, number: int, where: str, shared: dict[str, str]) -> LoggedSample:
    if not isinstance(content, dict):
        raise DataError(f"{where}: expected a JSON object, found a {type(content).__name__}")
    doc, doc_id = _required(content, "doc", dict, where), _required(content, "doc_id", int, where)
    if not 0 <= doc_id <= _MOST_NUMBER:
        raise DataError(f"{where}: 'doc_id' is {_short(doc_id)}; lm-eval counts documents from 0, below 2^63")
    if "doc_hash" in content and content["doc_hash"] != (found := _hash_of(doc)):
        raise DataError(
            f"{where}: document {doc_id} has another content than its doc_hash says ({found[:12]}, not "
            f"{printable(str(content['doc_hash']))[:12]}); the file was changed, so restore the original"
        )
    answers = _required(content, "filtered_resps", list, where)
    return LoggedSample(
        line=number,
        doc_id=doc_id,
        doc=doc,
        target=str(content.get("target", "")),
        requests=tuple(_requests(content, where, shared)),
        answers=tuple(answers),
        filter=str(content.get("filter", "none")),
        metrics=_metrics(content, where),
        hashes=_hashes(content),
    )


def _required(content: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = content.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        found = type(value).__name__ if key in content else "nothing"
        raise DataError(f"{where}: '{key}' must be a {kind.__name__}, found {found}; is it a sample file of lm-eval?")
    return value


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**24 else f"a number of {number.bit_length()} bits"


def _requests(content: Mapping[str, Any], where: str, shared: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each request; equal texts, such as the context of all choices, share their memory."""
    given = content.get("arguments")
    if isinstance(given, dict):
        names = [f"gen_args_{place}" for place in range(len(given))]
        if given.keys() != set(names):
            raise DataError(f"{where}: the keys of 'arguments' must be gen_args_0, gen_args_1, …")
        given = [given[name] for name in names]
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: 'arguments' must have the texts of at least one request")
    shared.clear()
    for one in given:
        parts = one.values() if isinstance(one, dict) else one
        texts = [part for part in parts if isinstance(part, str)] if isinstance(one, (dict, list)) else []
        if not texts:
            raise DataError(f"{where}: a request in 'arguments' has no text")
        yield tuple(shared.setdefault(text, text) for text in texts)


def _metrics(content: Mapping[str, Any], where: str) -> dict[str, float | None]:
    names = content.get("metrics", [name for name in content if name not in _STANDARD])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: 'metrics' must be a list of names")
    found: dict[str, float | None] = {}
    for name in names:
        if name not in content:
            raise DataError(f"{where}: metric '{name}' has no value")
        value = content[name]
        found[name] = float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
        if isinstance(value, float) and not math.isfinite(value):
            raise DataError(f"{where}: metric '{name}' is {value}; it must be a finite number")
    return found


def _hashes(content: Mapping[str, Any]) -> str:
    parts = [content.get(name) for name in ("doc_hash", "prompt_hash", "target_hash")]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else ""  # type: ignore[arg-type]


def _hash_of(doc: Mapping[str, Any]) -> str:
    """Return lm-eval's hash of a document, as in its `evaluate`."""
    text = json.dumps(doc, indent=2, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_greedy(value: Any) -> bool:
    return isinstance(value, bool) or value in ("True", "False", "None", None)


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
    except ValueError:
        return None
