"""Finished runs of the copying benchmark, made of scores, without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from tests.plugin.copying import ANSWERS, COPYING, numbers
from tests.sealed import specification, write_run


def make_copying(
    root: Path,
    columns: Mapping[str, Sequence[float]],
    *,
    model: str = "org/copier",
    sources: Sequence[str] | None = None,
) -> Path:
    """Write a run; `columns`: of the answers, beside `score`; `sources`: of the documents, by default themselves."""
    n = len(next(iter(columns.values())))
    about = specification(model, suite=COPYING, documents={COPYING: "hash of copying"})
    content = {
        "kind": COPYING,
        "specification": about,
        "rule": COPYING,
        "groups": {},
        "group_sizes": {},
        "template": "plain",
        "documents": {COPYING: {"official": None, "source": "made up", "count": n, "total": n}},
        "model": model,
    }
    names = [str(number) for number in range(n)]
    table = pd.DataFrame({"task": COPYING, "id": names, "reference": names, "text": "", "score": 0.5, **columns})
    table["source"] = names if sources is None else list(sources)
    results = {"tasks": [{"task": COPYING, **numbers(table["score"]), "layers": []}], "averages": []}
    return write_run(root, content, results, {ANSWERS: table})
