"""Lines of lm-eval's sample files, which are untrusted.

In: a file `samples_<task>_<time>.jsonl`. Out: a validated `LoggedSample` for each line, that is, for each document and
each filter of its answers. lm-eval writes numbers of answers as text; older versions wrote them as numbers, and the
requests as lists.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalkit.errors import DataError
from evalkit.escape import printable
from evalkit.inputs.reading import Unreadable, parse_json

MOST_LINE_BYTES = 2**24
"""Size limit of a line, which has one document with its prompts."""
_MOST_NUMBER = 2**63 - 1
"""Largest number of a document: tables store 64 bits."""
_LEAST_LIKELIHOOD, _MOST_LIKELIHOOD = -1e9, 1e-3
"""Range of log-likelihoods in nats; the second allows for rounding."""
_LARGEST_METRIC = 1e100
"""Sums over documents must not overflow."""
_NUMBER = re.compile("[-+.0-9a-zA-Z]+", re.ASCII)
"""Numbers as lm-eval writes them; `float` would also read "1_0" and other scripts' digits."""
_GOLD = re.compile("[0-9]{1,9}", re.ASCII)
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


MetricValue = float | tuple[float, float] | None
"""A document's value of a metric: a number, or a pair (sum, weight) of numbers; None if it is anything else."""


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
    metrics: dict[str, MetricValue]
    hashes: str
    """lm-eval's hashes of document, prompt and target, joined; empty if one is absent."""

    @property
    def gold(self) -> int | None:
        """Number of the gold answer; None if the target is no number."""
        return int(self.target) if _GOLD.fullmatch(self.target) else None

    @property
    def likelihoods(self) -> tuple[float, ...] | None:
        """Log-likelihood of each request, a natural logarithm; None if an answer is not (log-likelihood, greedy)."""
        return _likelihoods(self.answers)

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
    answers = _required(content, "filtered_resps", list, where)
    target, requests = str(content.get("target", "")), tuple(_requests(content, where, shared))
    texts = {"doc_hash": json.dumps(doc, indent=2, ensure_ascii=False), "prompt_hash": requests[0][0]}
    _check_hashes(content, texts | {"target_hash": target}, f"{where}: document {doc_id}")
    _check_likelihoods(content, answers, f"{where}: document {doc_id}")
    return LoggedSample(
        line=number,
        doc_id=doc_id,
        doc=doc,
        target=target,
        requests=requests,
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
        parts = (one.values() if isinstance(one, dict) else one) if isinstance(one, (dict, list)) else ()
        texts = [text for part in parts if isinstance(text := part_of_request(part), str)]
        if not texts:
            raise DataError(f"{where}: a request in 'arguments' has no text")
        yield tuple(shared.setdefault(text, text) for text in texts)


def part_of_request(part: Any) -> Any:
    """Return a part of a request; lm-eval writes a chat for an API as a list of its only text."""
    return part[0] if isinstance(part, list) and len(part) == 1 else part


def _metrics(content: Mapping[str, Any], where: str) -> dict[str, MetricValue]:
    names = content.get("metrics", [name for name in content if name not in _STANDARD])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: 'metrics' must be a list of names")
    found: dict[str, MetricValue] = {}
    for name in names:
        if name not in content:
            raise DataError(f"{where}: metric '{name}' has no value")
        value = content[name]
        numbers = value if isinstance(value, list) and len(value) == 2 else [value]
        if not all(isinstance(one, (int, float)) for one in numbers):
            found[name] = None
            continue
        if wrong := [one for one in numbers if not abs(one) < _LARGEST_METRIC]:
            raise DataError(f"{where}: metric '{name}' is {wrong[0]:.6g}; it must be a finite number")
        found[name] = (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)
    return found


def _hashes(content: Mapping[str, Any]) -> str:
    parts = [content.get(name) for name in ("doc_hash", "prompt_hash", "target_hash")]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else ""  # type: ignore[arg-type]


def _check_hashes(content: Mapping[str, Any], texts: Mapping[str, str], where: str) -> None:
    """Raise `DataError` if a text does not have the hash that lm-eval's `evaluate` has written beside it."""
    for name, text in texts.items():
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        if name in content and content[name] != digest:
            raise DataError(
                f"{where} has another content than its {name} says ({digest[:12]}, not "
                f"{printable(str(content[name]))[:12]}); the file was changed, so restore the original"
            )


def _check_likelihoods(content: Mapping[str, Any], answers: Sequence[Any], where: str) -> None:
    """Raise `DataError` if log-likelihoods are impossible, or are not those before the filter, which changes none."""
    found = _likelihoods(answers)
    if found is None:
        return
    if wrong := [
        value for value in found if math.isfinite(value) and not _LEAST_LIKELIHOOD <= value <= _MOST_LIKELIHOOD
    ]:
        raise DataError(f"{where} has the log-likelihood {wrong[0]:g}, which no text has; the file was changed")
    if "resps" in content:
        firsts = [one[0] if isinstance(one, list) and one else None for one in _required(content, "resps", list, where)]
        if str(_likelihoods(firsts)) != str(found):
            raise DataError(f"{where} has other log-likelihoods in filtered_resps than in resps; the file was changed")


def _likelihoods(answers: Sequence[Any]) -> tuple[float, ...] | None:
    """Return the log-likelihood of each answer; None if an answer is not (log-likelihood, greedy)."""
    pairs = [one for one in answers if isinstance(one, list) and len(one) == 2 and _is_greedy(one[1])]
    found = tuple(value for one in pairs if (value := _number(one[0])) is not None)
    return found if found and len(found) == len(answers) else None


def _is_greedy(value: Any) -> bool:
    return isinstance(value, bool) or value in ("True", "False", "None", None)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        return float(value) if not isinstance(value, str) or _NUMBER.fullmatch(value) else None
    except ValueError:
        return None
