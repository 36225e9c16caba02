"""examples/replication: which runs its tables are made of, what they imply, the page made of them, and its text."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from statsmodels.stats.multitest import multipletests

import evalkit
from evalkit.errors import DataError, UsageError
from evalkit.stats.significance import Spread

ROOT = Path(__file__).parents[1]
SCRIPTS, DOCS = ROOT / "examples" / "replication", ROOT / "docs"
CORPORA = ROOT.parent / "shared" / "data" / "corpora"
BENCHMARKS = {"held_out": "perplexity", "zeroshot8": "zeroshot8", "attention": "attention", "needle": "needle"}
"""Benchmarks of study.yaml and their suites."""


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """Import a script of the folder by its name."""
    names = ("write_page", "collect_text", "summarise")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tables(script: Any) -> dict[str, list[dict[str, str]]]:
    """The committed tables."""
    return {path.stem: script("write_page").read(path) for path in (SCRIPTS / "tables").glob("*.csv")}


def test_the_page_is_what_the_program_writes(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["write_page.py", "--output", str(tmp_path)])
    script("write_page").main()
    page = (tmp_path / "replication.md").read_bytes()
    assert page == (DOCS / "replication.md").read_bytes()
    images = re.findall(r"\(images/(\S+\.png)\)", page.decode())
    drawn = {path.name for path in (tmp_path / "images").iterdir() if path.stat().st_size > 5_000}
    assert len(images) == 5 and len(drawn) == 3 and drawn < {*images}  # the others are of summarise.py
    assert all((DOCS / "images" / image).is_file() for image in images)


def test_every_table_is_on_the_page(script: Any, tables: dict[str, list[dict[str, str]]]) -> None:
    write_page: ModuleType = script("write_page")
    before = write_page.page(tables)
    for name, column in {"outcomes": "value", "differences": "difference", "needed": "difference",
                         "attention": "value", "needle": "found"}.items():  # fmt: skip
        row = next(row for row in tables[name] if row.get("benchmark", "held_out") == "held_out")
        changed = {**row, column: "3" if name == "needle" else str(float(row[column]) + 3)}
        rows = [changed if other is row else other for other in tables[name]]
        assert write_page.page(tables | {name: rows}) != before, name


def test_the_tables_agree_with_each_other(script: Any, tables: dict[str, list[dict[str, str]]]) -> None:
    """Differences are those of the seeds' means, Holm's correction is statsmodels', the paper's are main_res's."""
    for row in tables["differences"]:
        key = [row[name] for name in ("benchmark", "outcome", "task")]
        means = {}
        for model in ("vanilla", row["model"]):
            values = [
                float(outcome["value"])
                for outcome in tables["outcomes"]
                if [outcome[name] for name in ("benchmark", "outcome", "task", "model")] == [*key, model]
            ]
            assert len(values) == 3
            means[model] = sum(values) / 3
        # Six significant digits are stored
        rounding = 1e-5 * means["vanilla"]
        assert means[row["model"]] - means["vanilla"] == pytest.approx(float(row["difference"]), abs=rounding)
    averages = [row for row in tables["differences"] if row["task"] == "Average" and row["benchmark"] == "held_out"]
    expected = multipletests([float(row["p"]) for row in averages], method="holm")[1]
    assert [row["model"] for row in averages] == ["cog", "diff", "intg"]
    assert [float(row["p_holm"]) for row in averages] == pytest.approx(list(expected), rel=1e-5)
    # Averages of 39.825, 40.2625, 40.475 and 41.15
    assert script("summarise").published() == pytest.approx({"cog": 0.004375, "diff": 0.0065, "intg": 0.01325})


def _run(suite: str, model: str) -> Any:
    return SimpleNamespace(suite=suite, complete=True, manifest={"model": model})


def test_runs_by_benchmark_model_and_seed(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other runs are left out; missing and double ones are errors."""
    summarise = script("summarise")
    runs = [
        _run(suite, f"examples/replication/trained/{model}-seed{seed}/model")
        for suite in BENCHMARKS.values()
        for seed in (3, 1, 2)
        for model in ("vanilla", "cog", "diff", "intg")
    ]

    def selected(runs: list[Any]) -> Any:
        monkeypatch.setattr(evalkit, "list_runs", lambda root: runs)
        return summarise.runs_by_model(Path("runs"))

    found = selected(runs)
    assert found.keys() == BENCHMARKS.keys()
    for name, by_model in found.items():
        for model, members in by_model.items():
            assert [(run.suite, run.manifest["model"].split("/")[3]) for run in members] == [
                (BENCHMARKS[name], f"{model}-seed{seed}") for seed in (1, 2, 3)
            ]
    others = [_run("perplexity", f"trained/vanilla-seed1/{name}") for name in ("initial", "checkpoint-300")]
    others += [_run("perplexity", "demo"), _run("longbench", "trained/vanilla-seed1/model")]
    assert selected([*others, *runs]) == found
    with pytest.raises(UsageError, match="2 finished runs of intg seed 3 on held_out"):
        selected([*runs, _run("perplexity", "trained/intg-seed3/model")])
    with pytest.raises(UsageError, match="0 finished runs of diff seed 2 on needle"):
        selected([run for run in runs if run.suite != "needle" or "diff-seed2" not in run.manifest["model"]])


def test_what_a_plan_assumes(script: Any) -> None:
    """All documents gain what their tasks allow; the primary outcome is at the level of its corrected verdict."""
    summarise = script("summarise")
    counts = [1267, 2376, 1172, 10042, 1838, 500, 3270, 14042]
    documents = {str(task): {"count": 200, "total": count} for task, count in enumerate(counts)}
    stored = {"tasks": [{"task": task, "n": 200} for task in documents]}
    # Variances of means over 200 and over all documents, in each task that of one document
    expected = sum(1 / 200 for _ in counts) / sum(1 / count for count in counts)
    sampled = SimpleNamespace(manifest={"documents": documents}, stored=stored)
    assert summarise.all_documents(sampled) == pytest.approx(expected) == pytest.approx(7.9, abs=0.05)
    line = SimpleNamespace(name="Average", difference=0.1, low=0.0, high=0.2, stderr=0.1, freedom=3.0, p=0.02,
                           spread=Spread(0.02, 0.03, 0.001, 0.0005, 3, 3))  # fmt: skip
    comparison = SimpleNamespace(b="cog", tasks=(), average=line)
    held_out, zeroshot8 = (
        next(summarise.differences([comparison], benchmark, "bits_per_byte"))["could_show"]
        for benchmark in ("held_out", "zeroshot8")
    )
    assert held_out > 1.3 * zeroshot8


def test_the_text(script: Any, tmp_path: Path) -> None:
    """Documents are divided by their ids; articles begin at their titles; another file is an error."""
    collect_text = script("collect_text")
    documents = [(f"document {number}", "text") for number in range(3200)] + [("empty", " \n")]
    train, held_out = collect_text.divided(documents)
    assert {*train, *held_out} == set(documents[:-1]) and not {*train} & {*held_out}
    assert 150 <= len(held_out) <= 250  # 200 expected, with a standard deviation of 14
    assert collect_text.divided(documents[::-1])[1] == held_out[::-1]
    text = " \n = One title = \n\n A <unk> , well @-@ known . \n\n = = Part = = \n\n more \n = Other = \n text \n"
    assert collect_text.articles(text) == [
        ("One title", "= One title =\n\nA …, well-known.\n\n== Part ==\n\nmore"),
        ("Other", "= Other =\ntext"),
    ]
    for content in (None, "{}"):
        if content:
            (tmp_path / "openstax_cc-by.jsonl").write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=r"openstax_cc-by\.jsonl"):
            collect_text.read(tmp_path, "openstax_cc-by.jsonl")
    if CORPORA.is_dir():
        found = collect_text.articles(collect_text.read(CORPORA, "wikitext-2/wiki.test.tokens"))
        # 60 articles; two formulas look like titles and divide theirs
        assert len(found) == 62 and all(text.startswith("= ") and "<unk>" not in text for _, text in found)
