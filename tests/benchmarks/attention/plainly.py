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
    found = {name: np.array([one[name] for one in each]) for name in each[0]}
    if len(heads) > 1:
        found["similarity"] = np.array(
            [np.mean([cosine(seen, other) for j, other in enumerate(heads) if j != i]) for i, seen in enumerate(heads)]
        )
    return found


def of_head(seen: Any, categories: Any, readers: Any, last: int, bos: bool) -> dict[str, Any]:
    tokens = len(seen)
    weights = [[seen[i][j] for j in range(i + 1)] for i in range(tokens)]
    normalised = [normalise([abs(a) for a in row]) for row in weights]
    rows = range(1, tokens)
    found: dict[str, Any] = {}
    if bos and tokens > 1:
        found["bos"] = mean(weights[i][0] for i in rows)
        found["bos_by_position"] = by_position([row[0] for row in weights])
        found["bos_abs"] = mean(normalised[i][0] for i in rows)
        found["bos_abs_by_position"] = by_position([row[0] for row in normalised])
        found["bos_negative"] = mean(float(weights[i][0] < 0) for i in rows)
    if bos:
        found["bos_all"] = mean(row[0] for row in weights)
        found["bos_negative_all"] = mean(float(row[0] < 0) for row in weights)
    for number, name in enumerate(CATEGORIES if len(readers) else ()):
        found[f"mass_{name}"] = mean(
            sum(a for j, a in enumerate(weights[i]) if categories[j] == number) for i in readers
        )
        found[f"mass_abs_{name}"] = mean(
            sum(a for j, a in enumerate(normalised[i]) if categories[j] == number) for i in readers
        )
    found["entropy"] = entropy(normalised[last])
    least = min(weights[last])
    lifted = [a - least for a in weights[last]]
    found["entropy_shifted"] = entropy(normalise(lifted)) if sum(lifted) else math.log(last + 1)
    if tokens > 1:
        found["entropy_by_position"] = by_position([entropy(row) for row in normalised])
        found["distance"] = mean(sum(a * (i - j) for j, a in enumerate(normalised[i])) for i in rows)
    if tokens >= 64:
        found["sink"] = sum(weights[i][0] for i in range(64)) / 64
        found["sink_abs"] = sum(normalised[i][0] for i in range(64)) / 64
        found |= {f"{name}_rate": float(found[name] > 0.3) for name in ("sink", "sink_abs")}
    sigma = np.sqrt(np.clip(np.linalg.eigvalsh(seen @ seen.T), 0, None))
    found["rank"] = math.exp(entropy(normalise(sigma)))
    found["rank_squares"] = math.exp(entropy(normalise(sigma**2)))
    found["rank_stable"] = (seen**2).sum() / sigma.max() ** 2
    return found


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
    found, start = [], 1
    while start < len(rows):
        found.append(mean(rows[start : 2 * start]))
        start *= 2
    return found


def cosine(one: Any, other: Any) -> float:
    return float((one * other).sum() / math.sqrt((one**2).sum() * (other**2).sum()))
