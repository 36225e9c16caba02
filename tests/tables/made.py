"""Score tables made in a test, and hypothesis strategies for them."""

from __future__ import annotations

from typing import Any

import pandas as pd
from hypothesis import strategies as st

from evalkit.runs.score_table import COLUMNS

Choice = dict[str, Any]

_PLAIN: dict[str, Any] = {
    "ll_special": -1.0,
    "ll_instruction": -2.0,
    "ll_context": -4.0,
    "ll_continuation": -8.0,
    "ll_end": -0.5,
    "n_special": 2,
    "n_instruction": 3,
    "n_context": 5,
    "n_continuation": 4,
    "n_end": 1,
    "ll_unconditional": None,
    "chars": 10,
    "bytes": 12,
    "truncated": 0,
    "straddles": 0,
}


def table(*documents: list[Choice], task: str = "made_up", subtask: str | None = None, gold: int = 0) -> pd.DataFrame:
    """A score table of one task; each document is a list of what its choices have otherwise than the others."""
    rows = [
        {"task": task, "subtask": subtask or task, "doc_id": number, "choice": index, "choices": len(choices)}
        | {"gold": gold}
        | _PLAIN
        | choice
        for number, choices in enumerate(documents)
        for index, choice in enumerate(choices)
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS[:-1]))
    return frame.astype({column: "float64" for column in frame if column.startswith("ll_")})


_LIKELIHOODS = st.floats(-50, -0.01).map(lambda value: round(value, 3))

_choices = st.fixed_dictionaries(
    {
        **{f"ll_{s}": _LIKELIHOODS for s in ("special", "instruction", "context", "continuation", "end")},
        **{f"n_{s}": st.integers(1, 9) for s in ("special", "instruction", "context", "continuation", "end")},
        "ll_unconditional": _LIKELIHOODS,
        "chars": st.integers(1, 30),
        "bytes": st.integers(1, 60),
        "gold": st.just(0),
    }
)
documents = st.lists(st.lists(_choices, min_size=2, max_size=5), min_size=1, max_size=6)
"""Documents of 2 to 5 choices with arbitrary scores, for `table(*documents)`."""
