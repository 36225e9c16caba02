"""A run beside public models: its numbers under each row's rules, and differences in protocol."""

from __future__ import annotations

from pathlib import Path

from evalkit.runs.folder import Run
from evalkit.runs.rules import RULES
from evalkit.tables.integrity import check, read_protocols
from evalkit.tables.layout import load_layout
from evalkit.tables.request import TableRequest, make
from tests.tables.runs import lines


def test_the_run_stands_beside_the_published_rows(finished: Run) -> None:
    table = check(finished, tokens="2T")
    numbers = lines(table)
    assert lines(make(TableRequest("res_intg_app"))).items() <= numbers.items()
    assert not any(cell.bold or cell.underline for line in table.lines for cell in line.cells)
    for rule, label in (("ppl", f"{Path(finished.manifest['model']).name}, ppl"), ("acc", "as OurLlama")):
        results = finished.results(rule)
        expected = [*(task.value for task in results.tasks), results.average.value]
        assert numbers[label] == [f"{100 * accuracy:.1f}" for accuracy in expected]
    for number, task in enumerate(finished.results("acc").tasks):  # lm-eval normalises neither of these three
        rule = "acc" if task.task in ("winogrande", "boolq", "mmlu") else "acc_norm"
        accuracy = finished.results(rule).tasks[number].value
        assert numbers["as TinyLlama and Cosmo"][number] == f"{100 * accuracy:.1f}"
    protocols, layout = read_protocols(), load_layout("res_intg_app")
    assert protocols.keys() == layout.model_items.keys()
    for protocol in protocols.values():
        assert set(protocol.rules.values()) <= RULES.keys()
        assert set(protocol.rules) - {"default"} <= set(layout.tasks)
