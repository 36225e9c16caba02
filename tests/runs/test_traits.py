"""Settings of runs: one definition, by which tables reject or mark runs and compare lists differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from evalkit.benchmarks.registry import differences
from evalkit.comparison.sides import Side, claim_of
from evalkit.errors import UsageError
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run, load_run
from evalkit.runs.traits import model_differences, summary, traits, unofficial
from evalkit.tables.layout import load_layout
from evalkit.tables.measured import measure, read_mapping
from tests.benchmarks.attention.made_ranks import made_ranks
from tests.comparison.made import make_longbench
from tests.tables.test_measured import altered

LAYOUT = {
    "suite": "zeroshot8",
    "rows": [{"items": {"one": "One", "two": "Two"}}],
    "columns": [{"items": {"piqa": "PIQA", "Average": "Avg."}}],
}
YARN = {"method": "yarn", "target": 8192, "original": 2048, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.1386}  # fmt: skip
GPU: dict[str, Any] = {"device": "cuda:1", "hardware": "NVIDIA H100", "kernel": "flex", "host": "node1", "threads": 0}
GPU["batches"] = {"piqa": "0"}

REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("limit", {"limit": 2}, {}, "the first 2 documents of each task"),
    ("template", {}, {"template": {"name": "plain"}}, "template plain"),
    ("template's text", {"template": "0" * 64}, {}, "template's text 000000000000"),
    ("solved examples", {"num_fewshot": 3}, {}, "3-shot"),
    ("dtype", {"dtype": "bfloat16"}, {}, "dtype bfloat16"),
    ("context extension", {"context_extension": YARN}, {}, "context stretched from 2,048 to 8,192 tokens by yarn"),
    ("scoring version", {"scoring": 1}, {}, "scoring version 1"),
    ("documents of piqa", {"documents": {"piqa": "0" * 64}}, {}, "documents of piqa 000000000000"),
]
NOTED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("attention", {}, {"loaded": {"attention": "eager"}}, "attention eager, not attention sdpa"),
    ("device", {}, {"devices": [GPU]}, "device cuda NVIDIA H100, not device cpu"),
    ("torch version", {"versions": {"torch": "1.0"}}, {}, "torch 1.0, not torch"),
]


@pytest.fixture
def table(tmp_path: Path, finished: Run) -> Any:
    """Fills a table with two runs and returns what is said of the second row."""
    layout = tmp_path / "own.yaml"
    layout.write_text(yaml.safe_dump(LAYOUT, sort_keys=False), encoding="utf-8")

    def fill(second: str, mixed: bool = False) -> str:
        mapping = tmp_path / "runs.yaml"
        mapping.write_text(yaml.safe_dump({"rows": {"one": str(finished.folder), "two": second}}), encoding="utf-8")
        found = measure(load_layout(str(layout)), read_mapping(mapping), mixed=mixed)
        return " ".join(plain(note) for note in found.notes if plain(note).startswith(f"{found.row_marks['two']}: "))

    return fill


def other(finished: Run, folder: Path, specification: dict[str, Any], manifest: dict[str, Any]) -> str:
    return altered(finished, folder, 0.0, manifest, **specification)


@pytest.mark.parametrize(("name", "specification", "manifest", "words"), REFUSED, ids=[one[0] for one in REFUSED])
def test_another_measurement_is_refused_or_marked(
    finished: Run, tmp_path: Path, table: Any, name: str, specification: Any, manifest: Any, words: str
) -> None:
    run = other(finished, tmp_path / "other", specification, manifest)
    with pytest.raises(UsageError) as caught:
        table(run)
    for part in ("row 'two'", run, words, "row 'one'", str(finished.folder), "--allow-mixed"):
        assert part in str(caught.value)
    assert words in table(run, mixed=True)
    [(mine, theirs)] = differences(finished, load_run(run))
    assert mine.name == theirs.name == name


@pytest.mark.parametrize(("name", "specification", "manifest", "words"), NOTED, ids=[one[0] for one in NOTED])
def test_rounding_is_noted(
    finished: Run, tmp_path: Path, table: Any, name: str, specification: Any, manifest: Any, words: str
) -> None:
    run = other(finished, tmp_path / "other", specification, manifest)
    assert words in table(run)
    assert name in [mine.name for mine, _ in differences(finished, load_run(run))]


@pytest.mark.parametrize(
    ("name", "specification", "manifest"), [one[:3] for one in (*REFUSED, *NOTED)], ids=lambda one: str(one)[:20]
)
def test_compare_names_the_same(finished: Run, tmp_path: Path, name: str, specification: Any, manifest: Any) -> None:
    run = load_run(other(finished, tmp_path / "other", specification, manifest))
    claim = claim_of(Side("A", (finished,)), Side("B", (run,)))
    assert name in claim.settings
    third = load_run(altered(run, tmp_path / "third"))
    sides = Side("A", (finished, run)), Side("B", (third,))
    if name in [one[0] for one in REFUSED]:
        with pytest.raises(UsageError, match=f"group A mixes runs that differ in {name}"):
            claim_of(*sides)
    else:
        mine, theirs = claim_of(*sides).settings[name]
        assert len(mine.split(", ")) == 2
        assert mine.endswith(theirs)


def test_only_tasks_of_both_are_compared(finished: Run, tmp_path: Path) -> None:
    """Runs of other tasks, and of other solved examples of tasks that one of them does not have."""
    first = load_run(altered(finished, tmp_path / "a", num_fewshot=5, examples={"piqa": "1", "mmlu": "2"}))
    documents = {"piqa": finished.manifest["specification"]["documents"]["piqa"]}
    second = load_run(altered(finished, tmp_path / "b", num_fewshot=5, examples={"piqa": "1"}, documents=documents))
    assert differences(first, second) == []
    third = load_run(altered(finished, tmp_path / "c", num_fewshot=5, examples={"piqa": "3"}, documents=documents))
    [(mine, theirs)] = differences(first, third)
    assert (mine.name, mine.value, theirs.value, mine.refused) == ("examples of piqa", "1", "3", True)


def test_the_rule_is_that_under_which_the_numbers_are_read(finished: Run, tmp_path: Path) -> None:
    run = load_run(altered(finished, tmp_path / "other", 0.0, {"rule": "acc"}))
    assert [mine.name for mine, _ in differences(finished, run)] == ["rule"]
    assert differences(finished, run, "acc_norm") == []
    assert claim_of(Side("A", (finished,)), Side("B", (run,))).settings == {}


def test_what_was_asked_counts_where_nothing_was_loaded(finished: Run, tmp_path: Path) -> None:
    """ "auto" and what it stood for are alike; a manifest without devices says nothing of them."""
    asked = load_run(altered(finished, tmp_path / "asked", attention="sdpa"))
    assert differences(finished, asked) == []
    bare = load_run(altered(finished, tmp_path / "bare", 0.0, {"loaded": {}, "devices": []}))
    assert "device" not in traits(bare)
    assert [mine.name for mine, _ in differences(finished, bare)] == ["attention"]


def test_longbench(tmp_path: Path) -> None:
    first, second, third = (
        load_run(make_longbench(tmp_path, {"qasper": [1.0]}, model=f"org/{name}", **changes))
        for name, changes in (
            ("a", {}),
            ("b", {"max_prompt_tokens": 3500}),
            ("c", {"context_extension": YARN, "chat": True}),
        )
    )
    assert [mine.name for mine, _ in differences(first, second)] == ["prompt tokens"]
    assert [mine.name for mine, _ in differences(first, third)] == ["template", "context extension"]
    assert summary(first) == "all documents, template plain, prompts of at most 7,500 tokens, dtype float32"
    assert "dtype float32, context stretched from 2,048 to 8,192 tokens by yarn: factor 4" in summary(third)


def test_attention(tmp_path: Path) -> None:
    """Not "all documents", and no rule; the settings that change its measures are refused."""
    ranks = {19: np.ones((5, 3))}
    run = made_ranks(tmp_path, "llama-125m-vanilla", ranks)
    shown = "200 random documents of each task (seed 0), gold continuations, template inst, dtype float32"
    assert summary(run) == shown
    changes = {"sample": 5, "seed": 1, "continuation": "all", "version": 2}
    names = ("limit", "limit", "continuation", "benchmark version")
    for place, ((key, value), name) in enumerate(zip(changes.items(), names, strict=True)):
        other = made_ranks(tmp_path, "llama-125m-vanilla", ranks, name=f"run{place}", **{key: value})
        [(mine, theirs)] = differences(run, other)
        assert (mine.name, theirs.name, theirs.refused) == (name, name, True)


def test_examples_can_be_unofficial_too(finished: Run, tmp_path: Path, table: Any) -> None:
    documents = {task: source | {"official": True} for task, source in finished.manifest["documents"].items()}
    examples = {task: {"official": task != "mmlu", "source": "made up", "count": 1} for task in documents}
    run = altered(finished, tmp_path / "other", 0.0, {"documents": documents, "examples": examples})
    assert unofficial(load_run(run).manifest) == {"examples": ["mmlu"]}
    assert "not the official examples of mmlu" in table(run)


def test_seeds_of_a_row_and_of_a_group_are_of_one_model(finished: Run, tmp_path: Path) -> None:
    loaded = finished.manifest["loaded"]
    deeper = loaded | {"shape": loaded["shape"] | {"num_hidden_layers": 3}}
    bare = {key: value for key, value in loaded.items() if key != "shape"}
    seeds = {
        "same": {"loaded": loaded},
        "deeper": {"loaded": deeper},
        "larger": {"loaded": bare | {"parameters": 7}},
        "unknown": {"loaded": {}},
    }
    runs = {name: load_run(altered(finished, tmp_path / name, 0.0, more)) for name, more in seeds.items()}
    expected = {"same": [], "deeper": ["num_hidden_layers"], "larger": ["parameters"], "unknown": []}
    assert {name: model_differences(finished, run) for name, run in runs.items()} == expected
    with pytest.raises(UsageError, match=r"group A mixes models: .* differ in num_hidden_layers"):
        claim_of(Side("A", (finished, runs["deeper"])), Side("B", (runs["same"],)))
    layout, mapping = tmp_path / "own.yaml", tmp_path / "runs.yaml"
    layout.write_text(yaml.safe_dump(LAYOUT), encoding="utf-8")
    mapping.write_text(yaml.safe_dump({"rows": {"one": [str(finished.folder), str(runs["larger"].folder)]}}))
    with pytest.raises(UsageError, match=r"row 'one': the models of runs .* differ in parameters"):
        measure(load_layout(str(layout)), read_mapping(mapping), mixed=True)


def test_one_document(finished: Run) -> None:
    manifest = finished.manifest | {"specification": finished.manifest["specification"] | {"limit": 1}}
    assert traits(Run(finished.folder, manifest))["limit"].words == "the first document of each task"


def test_what_was_never_published_is_not_unofficial() -> None:
    sources = {"made": {"official": None}, "own": {"official": False}, "published": {"official": True}}
    assert unofficial({"documents": sources}) == {"documents": ["own"]}
