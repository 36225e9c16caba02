"""Settings of runs, by which tables reject or mark runs and compare lists differences; devices of their batches."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evalkit.benchmarks.choices_report import accuracy_table
from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.run_listing import list_found
from evalkit.comparison.sides import Side, claim_of
from evalkit.errors import UsageError
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run, load_run
from evalkit.runs.traits import BatchDevice, model_differences, summary, traits
from tests.benchmarks.kinds import Lines
from tests.journals import entries_of, relocate
from tests.printed import printed
from tests.runs.conftest import Small
from tests.sealed import read, reseal

YARN = {"method": "yarn", "target": 8192, "original": 2048, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.1386}  # fmt: skip
ELSEWHERE = BatchDevice("cuda:1", "NVIDIA H100", "flex", "there")
GPU = {**ELSEWHERE._asdict(), "batches": {"piqa": "0"}}
Changes = dict[str, Any]

REFUSED: list[tuple[str, Changes, Changes, str]] = [
    ("limit", {"limit": 2}, {}, "the first 2 documents of each task"),
    ("template's text", {"template": "0" * 64}, {}, "template's text 000000000000"),
    ("dtype", {"dtype": "bfloat16"}, {}, "dtype bfloat16"),
    ("context extension", {"context_extension": YARN}, {}, "context stretched from 2,048 to 8,192 tokens by yarn"),
    ("scoring version", {"scoring": 1}, {}, "scoring version 1"),
    ("documents of piqa", {"documents": {"piqa": "0" * 64}}, {}, "documents of piqa 000000000000"),
]
NOTED: list[tuple[str, Changes, Changes, str]] = [
    ("attention", {}, {"loaded": {"attention": "eager"}}, "attention eager"),
    ("device", {}, {"devices": [GPU]}, "device cuda NVIDIA H100"),
    ("torch version", {"versions": {"torch": "1.0"}}, {}, "torch 1.0"),
]


@pytest.fixture
def other(finished: Run, tmp_path: Path) -> Callable[..., Run]:
    """Copy the finished run with changes of its specification and manifest; its checkpoint is another one."""

    def changed(specification: Changes, manifest: Changes | None = None) -> Run:
        folder = tmp_path / f"run {len(list(tmp_path.iterdir()))}"
        shutil.copytree(finished.folder, folder)
        content = read(folder, MANIFEST)
        content["specification"] |= {"checkpoint": {"weights": folder.name}} | specification
        (folder / MANIFEST).write_text(json.dumps(content | (manifest or {})), encoding="utf-8")
        reseal(folder)
        return load_run(folder)

    return changed


@pytest.mark.parametrize(
    ("name", "specification", "manifest", "words"), [*REFUSED, *NOTED], ids=lambda value: str(value)[:9]
)
def test_each_setting_is_named_by_every_reader(
    finished: Run, other: Callable[..., Run], name: str, specification: Changes, manifest: Changes, words: str
) -> None:
    run = other(specification, manifest)
    pairs = {theirs.name: theirs for _, theirs in differences(finished, run)}
    refused = any(name == case[0] for case in REFUSED)
    assert pairs[name].words.startswith(words) and pairs[name].refused == refused
    sides = Side("A", (finished, run)), Side("B", (other(specification, manifest),))
    if refused:
        with pytest.raises(UsageError, match=f"group A .* differ in {name}"):
            claim_of(*sides)
    else:
        mine, theirs = claim_of(*sides).settings[name]
        assert len(mine.split(", ")) == 2 and mine.endswith(theirs)


def test_what_is_no_difference(finished: Run, other: Callable[..., Run]) -> None:
    """What was asked counts where nothing was loaded; of tasks and examples, those that both runs have."""
    assert differences(finished, other({"attention": "sdpa"})) == []
    bare = other({}, {"loaded": {}, "devices": []})
    assert "device" not in traits(bare) and [mine.name for mine, _ in differences(finished, bare)] == ["attention"]
    assert differences(finished, other({}, {"rule": "acc"}), "acc_norm") == []
    documents = {"piqa": finished.manifest["specification"]["documents"]["piqa"]}
    first, second, third = (
        other({"num_fewshot": 5, "examples": examples} | ({} if "mmlu" in examples else {"documents": documents}))
        for examples in ({"piqa": "1", "mmlu": "2"}, {"piqa": "1"}, {"piqa": "3"})
    )
    assert differences(first, second) == []
    assert [mine.name for mine, _ in differences(first, third)] == ["examples of piqa"]
    sampled = traits(other({"sample": 200, "seed": 0, "limit": 1, "continuation": "gold", "max_prompt_tokens": 3500}))
    assert sampled["prompt tokens"].words == "prompts of at most 3,500 tokens"
    assert sampled["limit"].words == "200 random documents of each task (seed 0)"
    assert summary(finished) == "all documents, template inst, 0-shot, rule ppl, dtype float32"


def test_seeds_are_of_one_model(finished: Run, other: Callable[..., Run]) -> None:
    loaded = finished.manifest["loaded"]
    bare = {key: value for key, value in loaded.items() if key != "shape"}
    for changed, expected in (
        (loaded, []),
        (loaded | {"shape": loaded["shape"] | {"num_hidden_layers": 3}}, ["num_hidden_layers"]),
        (bare | {"parameters": 7}, ["parameters"]),
        ({}, []),
    ):
        run = other({}, {"loaded": changed})
        assert model_differences(finished, run) == expected
        if expected:
            with pytest.raises(UsageError, match=f"group A .* differ in {expected[0]}"):
                claim_of(Side("A", (finished, run)), Side("B", (other({}),)))


# Devices


def test_a_run_that_goes_on_elsewhere_keeps_which_batches(small: Small) -> None:
    first = small(tasks="piqa", token_budget=60)
    here = BatchDevice("cpu", platform.machine(), "tiles", platform.node(), torch.get_num_threads())
    entries = [entry for entry, _ in entries_of(first)]
    assert {entry.place for entry in entries} == {here}
    assert first.manifest["devices"] == [here._asdict() | {"batches": {"piqa": f"0-{len(entries) - 1}"}}]
    (first.folder / RESULTS).unlink()
    relocate(first.folder / JOURNAL, ELSEWHERE, keep=3)
    lines = Lines()
    run = small(tasks="piqa", progress=lines)
    kinds = f"cuda NVIDIA H100; scores computed on cpu {platform.machine()}"
    assert [line for line in lines.said if line.startswith(f"warning: this run was started on {kinds}")]
    there, rest = run.manifest["devices"]
    assert there == ELSEWHERE._asdict() | {"batches": {"piqa": "0-2"}}
    assert rest["device"] == "cpu" and rest["batches"]["piqa"].startswith("3-")
    note = f"computed in part on cuda NVIDIA H100 and in part on cpu {platform.machine()}"
    assert note in printed(accuracy_table(run.results(), run.manifest, run.seconds))
    [listed] = list_found(run.folder.parent)
    assert any(line.startswith(note) for line in listed.notes)


def test_a_finished_run_says_that_nothing_is_computed(small: Small) -> None:
    first = small()
    for device, expected in (("auto", 0), ("cpu:0", 0), ("cuda:99", 1)):
        lines = Lines()
        assert small(device=device, progress=lines).folder == first.folder
        assert len(lines.said) == expected and all("nothing is computed on cuda:99" in line for line in lines.said)
