"""The measures written out with loops over heads and rows, in float64, on whole maps. Independent of evalkit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

CATEGORIES = ("bos", "special", "punctuation", "content", "function", "other")


def measures(maps: Any, categories: Any, readers: Any, last: int, bos: bool) -> dict[str, Any]:
    """Return all measures by name, [heads] or [heads, bins], of maps [heads, tokens, tokens]."""
    heads = [np.asarray(seen, dtype=np.float64) for seen in maps]
    each = [of_head(seen, categories, readers, last, bos) for seen in heads]
    measured = {name: np.array([values[name] for values in each]) for name in each[0]}
    if len(heads) > 1:
        measured["similarity"] = np.array(
            [np.mean([cosine(seen, other) for j, other in enumerate(heads) if j != i]) for i, seen in enumerate(heads)]
        )
    return measured


def of_head(seen: Any, categories: Any, readers: Any, last: int, bos: bool) -> dict[str, Any]:
    tokens = len(seen)
    weights = [[seen[i][j] for j in range(i + 1)] for i in range(tokens)]
    normalised = [normalise([abs(a) for a in row]) for row in weights]
    rows = range(1, tokens)
    measured: dict[str, Any] = {}
    if bos and tokens > 1:
        measured["bos"] = mean(weights[i][0] for i in rows)
        measured["bos_by_position"] = by_position([row[0] for row in weights])
        measured["bos_token_by_position"] = [row[0] for row in weights[1:513]]
        measured["bos_abs"] = mean(normalised[i][0] for i in rows)
        measured["bos_abs_by_position"] = by_position([row[0] for row in normalised])
        measured["bos_negative"] = mean(float(weights[i][0] < 0) for i in rows)
    if bos:
        measured["bos_all"] = mean(row[0] for row in weights)
        measured["bos_negative_all"] = mean(float(row[0] < 0) for row in weights)
    for number, name in enumerate(CATEGORIES if len(readers) else ()):
        measured[f"mass_{name}"] = mean(
            sum(a for j, a in enumerate(weights[i]) if categories[j] == number) for i in readers
        )
        measured[f"mass_abs_{name}"] = mean(
            sum(a for j, a in enumerate(normalised[i]) if categories[j] == number) for i in readers
        )
    measured["entropy"] = entropy(normalised[last])
    least = min(weights[last])
    lifted = [a - least for a in weights[last]]
    measured["entropy_shifted"] = entropy(normalise(lifted)) if sum(lifted) else math.log(last + 1)
    if tokens > 1:
        measured["entropy_by_position"] = by_position([entropy(row) for row in normalised])
        measured["distance"] = mean(sum(a * (i - j) for j, a in enumerate(normalised[i])) for i in rows)
        measured["sparsity"] = mean(
            mean(float(abs(a) < 0.01 * max(map(abs, row)) or a == 0) for a in row) for row in weights[1:]
        )
    if tokens >= 64:
        measured["sink"] = sum(weights[i][0] for i in range(64)) / 64
        measured["sink_abs"] = sum(normalised[i][0] for i in range(64)) / 64
        measured |= {f"{name}_rate": float(measured[name] > 0.3) for name in ("sink", "sink_abs")}
    sigma = np.sqrt(np.clip(np.linalg.eigvalsh(seen @ seen.T), 0, None))
    measured["rank"] = math.exp(entropy(normalise(sigma)))
    measured["rank_squares"] = math.exp(entropy(normalise(sigma**2)))
    measured["rank_stable"] = (seen**2).sum() / sigma.max() ** 2
    return measured


def normalise(row: Any) -> list[float]:
    total = sum(row)
    return [a / total if total else 0.0 for a in row]


def entropy(shares: Any) -> float:
    return -sum(a * math.log(a) for a in shares if a > 0)


def mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def by_position(rows: list[float]) -> list[float]:
    """Average rows 1, 2 to 3, 4 to 7 and so on."""
    means, start = [], 1
    while start < len(rows):
        means.append(mean(rows[start : 2 * start]))
        start *= 2
    return means


def cosine(head: Any, other: Any) -> float:
    return float((head * other).sum() / math.sqrt((head**2).sum() * (other**2).sum()))
