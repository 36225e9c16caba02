"""docs/python.md: its code runs. docs/reference/columns.md: its columns are those of the tables."""

from __future__ import annotations

import re
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import evalkit
from evalkit.benchmarks.lm_eval.harness import Harness
from tests.documents import made_up
from tests.longcontext.longbench.made import record, write
from tests.tiny import tiny_checkpoint
from tests.training.trainers import trainer_of

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
COLUMNS = (DOCS / "reference" / "columns.md").read_text(encoding="utf-8")


def columns_after(text: str) -> dict[str, str]:
    """Return column → dtype of the first table of columns after a text of the page."""
    [table] = re.findall(r"\| column \| dtype \|.*?(?=\n\n)", COLUMNS[COLUMNS.index(text) :], re.DOTALL)[:1]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))


def columns_of(table: pd.DataFrame) -> dict[str, str]:
    """Column → dtype; text is an object in some versions of pandas."""
    return {str(name): str(dtype).replace("object", "str") for name, dtype in table.dtypes.items()}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the checkpoints that the page names, where suites take made-up documents."""
    for seed, name in enumerate(("step1000", "step2000")):
        tiny_checkpoint(tmp_path / "small" / name, seed=seed, window=1024)
    documents = made_up(tmp_path / "documents")
    evaluate = evalkit.evaluate

    @wraps(evaluate)
    def with_documents(*args: Any, **options: Any) -> evalkit.Run:
        made = {} if "suite" in options else {"data_dir": documents, "allow_unofficial_data": True}
        return evaluate(*args, **(made | options))

    monkeypatch.setattr(evalkit, "evaluate", with_documents)
    callback = partial(evalkit.TrainerCallback, data_dir=documents, allow_unofficial_data=True)
    monkeypatch.setattr(evalkit, "TrainerCallback", callback, raising=False)
    in_loop = partial(evalkit.InLoop, data_dir=documents, allow_unofficial_data=True)
    monkeypatch.setattr(evalkit, "InLoop", in_loop, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def simple_evaluate(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that lm-eval is given: its tasks would have to be downloaded."""
    import lm_eval

    given: list[Any] = []
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda model, **_: given.append(model))
    return given


def test_its_code_runs(place: Path, simple_evaluate: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"batches": [torch.arange(20).reshape(2, 10) + step for step in range(100)]}
    names["trainer"] = trainer_of(place / "small" / "step1000", place / "trained", bf16=True, max_steps=4)
    for block in BLOCKS:
        exec(compile(block, "docs/python.md", "exec"), names)
    assert "100 Average(Knowledge (1 of 5), " in capsys.readouterr().out
    assert isinstance(simple_evaluate[0], Harness)
    assert {run.manifest["model"] for run in evalkit.list_runs()} >= {"step 100", "trained step 2", "trained step 4"}


def test_its_columns_are_the_tables(place: Path, finished: evalkit.Run) -> None:
    assert columns_after("## The score table") == columns_of(finished.scores)
    checkpoint = place / "small" / "step1000"
    write(place / "rows" / "qasper.jsonl", [record("qasper")])
    longbench = evalkit.evaluate(checkpoint, suite="longbench", tasks="qasper", data_dir=place / "rows", context="none")
    assert columns_after("`generations.parquet`") == columns_of(longbench.table("generations.parquet"))
    settings = {"lengths": [300], "depths": [0], "repeats": 1}
    needle = evalkit.evaluate(checkpoint, suite="needle", settings=settings)
    assert columns_after("`answers.parquet`") == columns_of(needle.table("answers.parquet"))
