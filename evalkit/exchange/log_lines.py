"""Lines of lm-eval's sample files, which are untrusted, in the form that lm-eval 0.4.13 writes.

In: the bytes of a file `samples_<task>_<time>.jsonl`. Out: a validated `LoggedSample` for each line, that is, for each
document and each filter of its answers.
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

from pydantic import Field

from evalkit.errors import DataError, reading_as
from evalkit.inputs.reading import parse_json
from evalkit.inputs.validated import Stored

_LEAST_LIKELIHOOD, _MOST_LIKELIHOOD = -1e9, 1e-3
"""Range of log-likelihoods in nats; the second allows for rounding."""
_LARGEST_METRIC = 1e100
"""Sums over documents must not overflow."""
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|inf|nan)", re.ASCII)
"""Numbers as lm-eval writes them; `float` would also read "1_0" and other scripts' digits."""
_GOLD = re.compile("[0-9]{1,9}", re.ASCII)

MetricValue = float | tuple[float, float] | None
"""A document's value of a metric: a number, or a pair (sum, weight) of numbers; None if it is anything else."""


class _StoredSample(Stored):
    """Keys of a line; the value of each metric is under its name."""

    doc_id: int = Field(ge=0, lt=2**63)
    doc: dict[str, Any]
    target: str
    arguments: dict[str, dict[str, Any]] = Field(min_length=1)
    resps: list[list[Any]]
    filtered_resps: list[Any]
    filter: str
    metrics: list[str]
    doc_hash: str
    prompt_hash: str
    target_hash: str


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
    likelihoods: tuple[float, ...] | None
    """Log-likelihood of each request, a natural logarithm; None if an answer is not (log-likelihood, greedy)."""
    by_evalkit: bool
    """Whether evalkit answered: it does not compute greediness, and writes it as None."""
    filter: str
    metrics: dict[str, MetricValue]
    hashes: tuple[str, str, str]
    """lm-eval's hashes of document, prompt and target."""

    @property
    def gold(self) -> int | None:
        """Number of the gold answer; None if the target is no number."""
        return int(self.target) if _GOLD.fullmatch(self.target) else None


def read_samples(data: bytes, path: Path) -> Iterator[LoggedSample]:
    """Yield the lines of a sample file.

    Raises:
        DataError: a line is invalid; names file and line.
    """
    shared: dict[str, str] = {}
    for number, line in enumerate(data.removesuffix(b"\n").split(b"\n") if data else (), start=1):
        where = f"{path}, line {number}"
        with reading_as(where, "a document that lm-eval has logged", DataError):
            content = parse_json(line)
            yield _sample(content, _StoredSample.model_validate(content), number, where, shared)


def _sample(
    content: Mapping[str, Any], line: _StoredSample, number: int, where: str, shared: dict[str, str]
) -> LoggedSample:
    where = f"{where}: document {line.doc_id}"
    requests = tuple(_requests(line.arguments, where, shared))
    # As in lm-eval's `evaluate`
    texts = json.dumps(line.doc, indent=2, ensure_ascii=False), requests[0][0], line.target
    hashes = line.doc_hash, line.prompt_hash, line.target_hash
    for name, text, logged in zip(("doc_hash", "prompt_hash", "target_hash"), texts, hashes, strict=True):
        if (digest := hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()) != logged:
            raise DataError(
                f"{where} has another content than its {name} says ({digest[:12]}, not {logged[:12]}); the file was "
                "changed, so restore the original"
            )
    likelihoods = _likelihoods(line.filtered_resps)
    if likelihoods is not None:
        _check_likelihoods(likelihoods, line.resps, where)
    return LoggedSample(
        line=number,
        doc_id=line.doc_id,
        doc=line.doc,
        target=line.target,
        requests=requests,
        likelihoods=likelihoods,
        by_evalkit=any(isinstance(answer, list) and answer[-1:] == ["None"] for answer in line.filtered_resps),
        filter=line.filter,
        metrics={name: _metric(name, content[name], where) for name in line.metrics},
        hashes=hashes,
    )


def _requests(
    arguments: Mapping[str, Mapping[str, Any]], where: str, shared: dict[str, str]
) -> Iterator[tuple[str, ...]]:
    """Yield the texts of each request; equal texts, such as the context of all choices, share their memory."""
    shared.clear()
    for number in range(len(arguments)):
        parts = map(part_of_request, arguments[f"gen_args_{number}"].values())
        texts = tuple(shared.setdefault(text, text) for text in parts if isinstance(text, str))
        if not texts:
            raise DataError(f"{where}: a request in 'arguments' has no text")
        yield texts


def part_of_request(part: Any) -> Any:
    """Return a part of a request; lm-eval writes a chat for an API as a list of its only text."""
    return part[0] if isinstance(part, list) and len(part) == 1 else part


def _metric(name: str, value: Any, where: str) -> MetricValue:
    numbers = value if isinstance(value, list) and len(value) == 2 else [value]
    if not all(isinstance(number, (int, float)) for number in numbers):
        return None
    if wrong := [number for number in numbers if not abs(number) < _LARGEST_METRIC]:
        raise DataError(f"{where}: metric '{name}' is {wrong[0]:.6g}; it must be a finite number")
    return (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)


def _likelihoods(answers: Sequence[Any]) -> tuple[float, ...] | None:
    """Return the log-likelihood of each answer; None if an answer is not (log-likelihood, greedy), both as texts."""
    pairs = [answer for answer in answers if isinstance(answer, list) and len(answer) == 2]
    if not pairs or len(pairs) < len(answers) or any(greedy not in ("True", "False", "None") for _, greedy in pairs):
        return None
    if not all(isinstance(value, str) and _NUMBER.fullmatch(value) for value, _ in pairs):
        return None
    return tuple(float(value) for value, _ in pairs)


def _check_likelihoods(likelihoods: Sequence[float], resps: Sequence[Sequence[Any]], where: str) -> None:
    """Raise `DataError` if log-likelihoods are impossible, or are not those before the filter, which changes none."""
    finite = [value for value in likelihoods if math.isfinite(value)]
    if wrong := [value for value in finite if not _LEAST_LIKELIHOOD <= value <= _MOST_LIKELIHOOD]:
        raise DataError(f"{where} has the log-likelihood {wrong[0]:g}, which no text has; the file was changed")
    # As texts, since NaN differs from itself
    if str(_likelihoods([responses[0] for responses in resps])) != str(likelihoods):
        raise DataError(f"{where} has other log-likelihoods in filtered_resps than in resps; the file was changed")
