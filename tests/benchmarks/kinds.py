"""Small runs of every kind of benchmark: what they evaluate, how they are made, and their equality."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.documents import made_up
from tests.longcontext.longbench.made import record, write
from tests.longcontext.ruler.made import few_data
from tests.tiny import tiny_checkpoint


class Kind(NamedTuple):
    """A small run of many batches."""

    budget: int | None
    labels: set[str]
    """How its tasks are printed."""
    options: dict[str, Any]
    """Those of every command."""
    settings: dict[str, Any]
    """The benchmark's own, by `--set`; paths are relative to the folder of files."""


CHOICES = {"data_dir": Path("documents"), "allow_unofficial_data": True, "tasks": ("piqa", "boolq")}
LABELS = {"PIQA", "BoolQ"}
KINDS = {
    "multiple_choice": Kind(128, LABELS, CHOICES, {}),
    "prompt_variants": Kind(128, LABELS, CHOICES | {"vary": ("template",), "limit": 6}, {}),
    "lm_eval": Kind(128, LABELS, CHOICES, {}),
    "longbench": Kind(
        500, {"Qasper"}, {"data_dir": Path("rows"), "context": "none", "tasks": "qasper"}, {"max_prompt_tokens": 300}
    ),
    "ruler": Kind(400, {"niah_multikey_2@1k"}, {"tasks": ("niah_multikey_2",)}, {"lengths": (1024,), "samples": 4}),
    "needle": Kind(400, {"needle@300", "needle@400"}, {}, {"lengths": (300, 400), "depths": (0, 50), "repeats": 1}),
    "attention": Kind(None, LABELS, CHOICES | {"sample": 7}, {"measures": ("bos", "entropy", "similarity")}),
    "perplexity": Kind(128, {"lines"}, {}, {"text": Path("lines.jsonl"), "stride": 100}),
    "answers": Kind(400, {"Own", "cut"}, {"suite": Path("own.yaml")}, {}),
    "copying": Kind(60, {"Copying"}, {}, {"lists": 12}),
    "norms": Kind(60, {"norms"}, {}, {"count": 12}),
}
OWN = """
answers:
  own: {requests: own.jsonl, metric: f1, max_new_tokens: 8}
  cut: {requests: long.jsonl, metric: edit_similarity, max_new_tokens: 8, truncate: middle}
labels: {own: Own}
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("files")
    for seed in (0, 1):
        tiny_checkpoint(folder / f"model{seed}", seed=seed, window=1024)
    made_up(folder / "documents", count=12)
    texts = [" ".join(f"word{n}" for n in range(start, start + 150)) for start in range(0, 600, 100)]
    write(folder / "rows" / "qasper.jsonl", [record("qasper", n, context=text) for n, text in enumerate(texts)])
    write(folder / "lines.jsonl", [{"text": text} for text in texts])
    prompts = [{"prompt": text[: 60 + 9 * n], "references": [text[:9], "a b"]} for n, text in enumerate(texts)]
    write(folder / "own.jsonl", prompts)
    write(folder / "long.jsonl", [{"prompt": f"{text} {text}", "references": text[:9]} for text in texts[:2]])
    (folder / "own.yaml").write_text(OWN, encoding="utf-8")
    with few_data(folder):
        yield folder


def options_of(kind: str, files: Path, output: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    about = KINDS[kind]
    common = {"output": output, "device": "cpu", "dtype": "float32", "token_budget": about.budget}
    suite = {} if kind in ("multiple_choice", "prompt_variants") else {"suite": kind}
    both = [
        {name: files / value if isinstance(value, Path) else value for name, value in part.items()}
        for part in (about.options, about.settings)
    ]
    return common | suite | both[0], both[1]


class Lines(Progress):
    def __init__(self) -> None:
        super().__init__(live=False)
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)


def plan(kind: str, files: Path, output: Path, seed: int = 0, **changes: Any) -> Any:
    options, settings = options_of(kind, files, output)
    return planned(files / f"model{seed}", options | settings | changes, silent)


def made(kind: str, files: Path, output: Path, seed: int = 0, **changes: Any) -> Run:
    return run_plan(plan(kind, files, output, seed, **changes), Lines())


def tables(run: Run) -> dict[str, pd.DataFrame]:
    names = [name for name in run.files if name.endswith(".parquet")]
    assert names
    return {name: run.table(name, ()).drop(columns="seconds", errors="ignore") for name in names}


def same(found: Run, expected: Run) -> None:
    """Equal to the last bit."""
    assert tables(found).keys() == tables(expected).keys()
    for name, table in tables(expected).items():
        pd.testing.assert_frame_equal(tables(found)[name], table, check_exact=True)
