"""The replication's page: made from its tables alone, and its sentences follow from them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = Path(__file__).parents[2] / "examples" / "replication"


@pytest.fixture
def tables(write_page: ModuleType) -> dict[str, list[dict[str, str]]]:
    """The committed tables."""
    return {path.stem: write_page.read(path) for path in (SCRIPTS / "tables").glob("*.csv")}


def test_the_page_is_what_the_program_writes(
    write_page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["write_page.py", "--output", str(tmp_path)])
    write_page.main()
    page = (tmp_path / "replication.md").read_text(encoding="utf-8")
    # But for line breaks
    assert page.split() == (DOCS / "replication.md").read_text(encoding="utf-8").split()
    images = re.findall(r"\(images/(\S+\.png)\)", page)
    assert len(images) == 5
    drawn = [path for path in (tmp_path / "images").iterdir() if path.stat().st_size > 5_000]
    assert len(drawn) == 3 and {path.name for path in drawn} < {*images}  # the others are of summarise.py
    assert all((DOCS / "images" / image).is_file() for image in images)


@pytest.mark.parametrize("name", ["outcomes", "differences", "needed", "attention", "needle"])
def test_every_table_is_on_the_page(write_page: ModuleType, tables: dict[str, list[dict[str, str]]], name: str) -> None:
    before = write_page.page(tables)
    number = {"outcomes": "value", "attention": "value", "needle": "found"}.get(name, "difference")
    row = next(row for row in tables[name] if row.get("benchmark", "held_out") == "held_out")
    row[number] = str(float(row[number]) + 3) if name != "needle" else "3"
    assert write_page.page(tables) != before


def test_holms_correction_is_over_the_three_variants(tables: dict[str, list[dict[str, str]]]) -> None:
    from statsmodels.stats.multitest import multipletests

    averages = [row for row in tables["differences"] if row["task"] == "Average" and row["benchmark"] == "held_out"]
    assert [row["model"] for row in averages] == ["cog", "diff", "intg"]
    expected = multipletests([float(row["p"]) for row in averages], method="holm")[1]
    # Six significant digits are stored
    assert [float(row["p_holm"]) for row in averages] == pytest.approx(list(expected), rel=1e-5)


def test_averages_are_those_of_the_seeds(tables: dict[str, list[dict[str, str]]]) -> None:
    for row in tables["differences"]:
        means = {}
        for model in ("vanilla", row["model"]):
            values = [
                float(one["value"])
                for one in tables["outcomes"]
                if (one["benchmark"], one["outcome"], one["task"], one["model"])
                == (row["benchmark"], row["outcome"], row["task"], model)
            ]
            assert len(values) == 3
            means[model] = sum(values) / 3
        # Each of the values has six significant digits
        rounding = 1e-5 * means["vanilla"]
        assert means[row["model"]] - means["vanilla"] == pytest.approx(float(row["difference"]), abs=rounding)


def test_the_papers_differences_are_those_of_its_table(summarise: ModuleType) -> None:
    # Table main_res: averages of 39.825, 40.2625, 40.475 and 41.15
    assert summarise.published() == pytest.approx({"cog": 0.004375, "diff": 0.0065, "intg": 0.01325})
