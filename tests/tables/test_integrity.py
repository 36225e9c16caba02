"""A run compared with public models: its numbers under each row's rules, and differences in protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.paths import resource
from evalkit.reporting.table import Table, plain
from evalkit.runs.finding import find_run
from evalkit.runs.folder import RESULTS, Run, load_run
from evalkit.runs.rules import RULES
from evalkit.tables.integrity import check, read_protocols
from evalkit.tables.layout import load_layout
from evalkit.tables.request import TableRequest, make
from tests.printed import printed
from tests.tables.test_measured import altered


def cells(table: Table, label: str) -> list[str]:
    found = [line for section in table.sections for line in section.lines if plain(line.label) == label]
    return [cell.value for cell in found[0].cells]


def test_the_run_stands_beside_the_published_rows(finished: Run) -> None:
    table = check(finished, tokens="2T")
    published = make(TableRequest("res_intg_app"))
    for label in ("TinyLlama", "cosmo", "OurLlama"):
        assert cells(table, label) == cells(published, label)
    name = Path(finished.manifest["model"]).name
    for rule in ("ppl", "acc"):
        expected = finished.results(rule)
        label = f"{name}, ppl" if rule == "ppl" else "as OurLlama"
        assert cells(table, label)[-1] == f"{100 * expected.average.accuracy:.1f}"
        assert cells(table, label)[:-1] == [f"{100 * task.accuracy:.1f}" for task in expected.tasks]


def test_each_task_is_under_the_rule_that_its_row_is_believed_to_follow(finished: Run) -> None:
    """lm-eval normalises neither WinoGrande nor BoolQ nor MMLU."""
    row = cells(check(finished), "as TinyLlama and Cosmo")
    by_rule = {
        rule: {task.task: task.accuracy for task in finished.results(rule).tasks} for rule in ("acc", "acc_norm")
    }
    for place, task in enumerate(by_rule["acc"]):
        rule = "acc" if task in ("winogrande", "boolq", "mmlu") else "acc_norm"
        assert row[place] == f"{100 * by_rule[rule][task]:.1f}"


def test_nothing_is_marked_best(finished: Run) -> None:
    lines = [line for section in check(finished).sections for line in section.lines]
    assert not any(cell.bold or cell.underline for line in lines for cell in line.cells)
    assert r"\textbf{59" not in printed(check(finished), "latex")


def test_what_differs_is_said(finished: Run, tmp_path: Path) -> None:
    notes = "\n".join(map(plain, check(finished).notes))
    ours = cells(check(finished), "as OurLlama")[-1]
    assert f"Average under OurLlama's rules: {ours}, {float(ours) - 47.2:+.1f} from its 47.2." in notes
    assert "Your run: all documents, template inst, 0-shot, rule ppl, dtype float32." in notes
    assert "TinyLlama: believed scored by acc_norm (acc for winogrande, boolq, mmlu)" in notes
    assert "Prompts differ: template inst here; TinyLlama and Cosmo as plain." in notes
    assert "not the official ones of winogrande" in notes
    assert "the first" not in notes
    assert "Context differs" not in notes
    extension = {"method": "linear", "target": 8192, "original": 2048, "factor": 4.0}
    limited = load_run(
        altered(finished, tmp_path / "limited", limit=2, num_fewshot=5, context_extension=extension, dtype="bfloat16")
    )
    notes = "\n".join(map(plain, check(limited).notes))
    assert "Documents differ: the first 2 documents of each task here" in notes
    assert "Context differs: context stretched from 2,048 to 8,192 tokens by linear: factor 4 here" in notes
    assert "dtype bfloat16, context stretched from 2,048 to 8,192 tokens" in notes
    assert "5-shot here" in notes


def test_every_published_row_has_a_belief_about_known_rules() -> None:
    protocols = read_protocols()
    layout = load_layout("res_intg_app")
    assert protocols.keys() == layout.models.keys()
    for protocol in protocols.values():
        assert set(protocol.rules.values()) <= RULES.keys()
        assert set(protocol.rules) - {"default"} <= set(layout.tasks)
        assert protocol.why
    assert yaml.safe_load(resource("results", "published", "protocols.yaml").read_text(encoding="utf-8"))


def test_invalid_runs(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of suite zeroshot8_text; the published numbers are of suite zeroshot8"):
        check(load_run(altered(finished, tmp_path / "text", suite="zeroshot8_text")))
    with pytest.raises(UnknownNameError, match=r"unknown rule of run .*'pmi'"):
        check(finished, "pmi")
    begun = Path(altered(finished, tmp_path / "begun"))
    (begun / RESULTS).unlink()
    with pytest.raises(RunError, match="begun is not finished"):
        check(find_run(str(begun), begun.parent))
