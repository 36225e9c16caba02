"""The audit finds planted errors, and reports nothing else."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import pytest

from evalkit.paths import resource
from evalkit.reporting.decimals import half_up
from evalkit.tables.audit import Finding, audit, audit_averages, audit_marks, audit_rows, audited
from evalkit.tables.claims import Audited
from evalkit.tables.fill import best_marks, computed
from evalkit.tables.layout import layout_names, load_layout
from evalkit.tables.published import Number, Printed, printed_cells, published_numbers


def published(name: str) -> Audited:
    layout = load_layout(name)
    return Audited(layout, published_numbers(layout), printed_cells(layout))


def flawless(name: str) -> Audited:
    """A table whose printed averages and marks are what its numbers give."""
    layout = load_layout(name)
    numbers = published_numbers(layout)
    cells = computed(layout, numbers)
    values = {key: half_up(n.value, layout.decimals) for key, n in cells.items() if key[1] in layout.averages}
    marks = best_marks(layout, {key: number.value for key, number in cells.items()})
    return Audited(layout, numbers, Printed(values, marks))


def found(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(finding.table, finding.row, finding.column) for finding in findings}


@pytest.fixture(scope="module")
def all_findings() -> list[Finding]:
    return audit([published(name) for name in layout_names()])


def test_the_slips_that_a_reader_can_see(all_findings: list[Finding]) -> None:
    """1.81 is marked beside 2.18; 51.1 beside 51.5; 39.5 beside 39.9; Pythia's mean is 40.4, not 40.3."""
    by_place = {found[:3]: found for found in all_findings}
    passage = by_place["app_long_contx", "Passage Count", "all"]
    assert ("1.81" in passage.printed, "2.18" in passage.recomputed) == (True, True)
    layers = by_place["abl_top_app", "all", "Winogrd"]
    assert ("51.1" in layers.printed, "51.5" in layers.recomputed) == (True, True)
    assert "39.9" in by_place["abl_top_main", "Rsn.", "all"].recomputed
    pythia = by_place["backbone_abl_app", "Pythia Intg", "Avg."]
    assert (pythia.printed, pythia.recomputed) == ("40.3", "40.4")
    assert "no rounding" in pythia.why
    heads = by_place["vanilla_head_app", "Llama2 heads=32", "Avg."]
    assert (heads.printed, heads.recomputed) == ("38.8", "38.9")
    assert "can explain" in heads.why


def test_rows_that_contradict_each_other(all_findings: list[Finding]) -> None:
    rows = [finding for finding in all_findings if finding.column == "8 tasks"]
    assert ("sft_abl_app", "logits (our) (intg_s2_all)", "8 tasks") in found(rows)
    same = next(finding for finding in rows if finding.table == "sft_abl_app" and "every number" in finding.why)
    assert "intg_s2_top50" in same.recomputed


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    for name in ("main_res", "sig_abl_main", "res_intg_app"):
        assert list(audit_averages(published(name))) == []
        assert list(audit_marks(published(name))) == []


@pytest.mark.parametrize("name", ["main_res", "abl_top_main", "backbone_abl_app"])
def test_a_planted_average_is_found(name: str) -> None:
    table = flawless(name)
    assert list(audit_averages(table)) == []
    key, value = next(iter(table.printed.values.items()))
    table.printed.values[key] = value + Fraction(2, 10)
    [finding] = audit_averages(table)
    assert finding.table == name
    assert float(finding.printed) == pytest.approx(float(finding.recomputed) + 0.2)


@pytest.mark.parametrize("name", ["main_res", "app_long_contx", "abl_top_main", "backbone_abl_app", "res_intg_app"])
def test_a_planted_mark_is_found(name: str) -> None:
    """Taken from where it belongs, and given where it does not."""
    table = flawless(name)
    assert list(audit_marks(table)) == []
    kind = next(iter(table.layout.marks))
    cells = computed(table.layout, table.numbers)
    right = next(key for key, kinds in table.printed.marks.items() if kind in kinds)
    wrong = next(key for key in cells if key[1] == right[1] and key not in table.printed.marks)
    for key, kinds in ((right, frozenset[str]()), (wrong, frozenset({kind}))):
        planted = table._replace(printed=table.printed._replace(marks=table.printed.marks | {key: kinds}))
        assert kind in {finding.printed.partition(":")[0] for finding in audit_marks(planted)}


def test_a_planted_number_moves_average_and_mark() -> None:
    table = flawless("main_res")
    numbers = {model: dict(row) for model, row in table.numbers.items()}
    numbers["cog_125m"]["piqa"] = Number(Fraction(99))
    planted = Audited(table.layout, numbers, table.printed)
    assert [(finding.row, finding.column) for finding in audit_averages(planted)] == [("Cog", "Avg.")]
    assert "PIQA" in {finding.column for finding in audit_marks(planted)}


def test_a_planted_contradiction_between_tables_is_found() -> None:
    main, backbone = published("main_res"), published("vanilla_head_app")
    assert list(audit_rows([main, backbone])) == []
    numbers = {model: dict(row) for model, row in backbone.numbers.items()}
    numbers["vanilla_125m"]["boolq"] = Number(Fraction(58))
    [finding] = audit_rows([main, Audited(backbone.layout, numbers, backbone.printed)])
    assert finding.row.startswith("Llama2 heads=8")
    assert finding.why == "described alike, but 1 of 8 numbers differ"


def test_it_computes_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command: a changed number in the CSV changes the findings."""
    shutil.copytree(resource("results"), tmp_path / "results", ignore=shutil.ignore_patterns("runs"))
    shutil.copytree(resource("configs"), tmp_path / "configs")
    for module in ("layout", "audit"):
        monkeypatch.setattr(
            f"evalkit.tables.{module}.resource", lambda *parts: tmp_path.joinpath(*parts), raising=False
        )
    before = audited(["sft_abl_app"]).sections[0].lines
    path = tmp_path / "results" / "published" / "sft_abl_app.csv"
    path.write_text(path.read_text().replace("61.9", "65.9"))
    after = audited(["sft_abl_app"]).sections[0].lines
    assert len(after) == len(before) + 2  # the average, and BoolQ's mark
