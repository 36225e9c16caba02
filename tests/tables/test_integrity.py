"""A run beside public models: its numbers under each row's rules, and differences in protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from evalkit.errors import UnknownNameError, UsageError
from evalkit.reporting.table import plain
from evalkit.runs.folder import Run, load_run
from evalkit.runs.rules import RULES
from evalkit.tables.integrity import check, read_protocols
from evalkit.tables.layout import load_layout
from evalkit.tables.request import TableRequest, make
from tests.tables.runs import altered, lines


def test_the_run_stands_beside_the_published_rows(finished: Run) -> None:
    table = check(finished, tokens="2T")
    numbers = lines(table)
    assert lines(make(TableRequest("res_intg_app"))).items() <= numbers.items()
    assert not any(cell.bold or cell.underline for line in table.lines for cell in line.cells)
    for rule, label in (("ppl", f"{Path(finished.manifest['model']).name}, ppl"), ("acc", "as OurLlama")):
        results = finished.results(rule)
        expected = [*(task.accuracy for task in results.tasks), results.average.accuracy]
        assert numbers[label] == [f"{100 * accuracy:.1f}" for accuracy in expected]
    by_rule = {rule: [task.accuracy for task in finished.results(rule).tasks] for rule in ("acc", "acc_norm")}
    for number, task in enumerate(finished.results("acc").tasks):  # lm-eval normalises neither of these three
        rule = "acc" if task.task in ("winogrande", "boolq", "mmlu") else "acc_norm"
        assert numbers["as TinyLlama and Cosmo"][number] == f"{100 * by_rule[rule][number]:.1f}"


def test_differences_are_noted(finished: Run, tmp_path: Path) -> None:
    table = check(finished)
    notes, average = "\n".join(map(plain, table.notes)), lines(table)["as OurLlama"][-1]
    for words in (
        f"Average under OurLlama's rules: {average}, {float(average) - 47.2:+.1f} from its 47.2.",
        "Your run: all documents, template inst, 0-shot, rule ppl, dtype float32.",
        "TinyLlama: believed scored by acc_norm (acc for winogrande, boolq, mmlu)",
        "Prompts differ: template inst here; TinyLlama and Cosmo as plain.",
        "not the official ones of winogrande",
    ):
        assert words in notes
    assert "Documents differ: the first" not in notes and "Context differs" not in notes
    extension = {"method": "linear", "target": 8192, "original": 2048, "factor": 4.0}
    limited = altered(finished, tmp_path / "b", limit=2, num_fewshot=5, context_extension=extension, dtype="bfloat16")
    notes = "\n".join(map(plain, check(load_run(limited)).notes))
    for words in ("Documents differ: the first 2 documents", "Context differs: context stretched from 2,048 to 8,192",
                  "dtype bfloat16, context stretched", "5-shot here"):  # fmt: skip
        assert words in notes


def test_every_published_row_has_a_belief_about_known_rules() -> None:
    protocols, layout = read_protocols(), load_layout("res_intg_app")
    assert protocols.keys() == layout.model_items.keys()
    for protocol in protocols.values():
        assert set(protocol.rules.values()) <= RULES.keys()
        assert set(protocol.rules) - {"default"} <= set(layout.tasks)


def test_invalid_runs(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="zeroshot8_text"):
        check(load_run(altered(finished, tmp_path / "text", suite="zeroshot8_text")))
    with pytest.raises(UnknownNameError, match="'pmi'"):
        check(finished, "pmi")
