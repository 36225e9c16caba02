"""`evalkit report`: the page of a study, and which of the given names it leaves out."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from evalkit.models.loading.locate import silent
from evalkit.pages.report import contents_of_study, write_report
from evalkit.studies.results import read_results
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from tests.cli.conftest import Command, complains
from tests.comparison.made import finished_run
from tests.marks import fast
from tests.pages.test_contents import needles
from tests.studies.made import write_study

SHARES = {"vanilla": [0.3, 0.4, 0.6], "intg": [0.62, 0.7], "cog": [0.5]}
"""Model → share of right answers of each seed."""
BENCHMARKS = {"zs": {"suite": "zeroshot8"}, "needle": {}}


class Printed(NamedTuple):
    value: str
    spread: str
    is_bold: bool


@pytest.fixture(scope="module")
def own_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study called `sizes`: models of one to three seeds, whose checkpoints are gone, on two benchmarks."""
    checkpoints = {name: [f"gone/{name}-{seed}" for seed in range(len(seeds))] for name, seeds in SHARES.items()}
    path = write_study(tmp_path_factory.mktemp("study") / "sizes.yaml", checkpoints, BENCHMARKS, settings={})
    study = read_study(path)
    for number, cell in enumerate(study.runs):
        model, share = cell.checkpoint.model, SHARES[cell.checkpoint.name][(cell.checkpoint.seed or 1) - 1]
        if cell.benchmark.name == "zs":
            run = finished_run(study.output, model, share, seed=number)
        else:
            run = needles(study.output, "essays", model=model)
        save_record(study.output, cell, run.folder, run.manifest["id"])
    return path


def written(study: Path, rule: str | None = None) -> str:
    path = study.with_suffix(".html")
    write_report(contents_of_study(read_results(study), rule=rule), path, silent, with_documents=False)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(own_study: Path) -> str:
    return written(own_study)


def table_of(page: str, number: int) -> dict[tuple[str, str], dict[str, Printed]]:
    """(title above the row, its label) → heading → cell, of the table of the n-th benchmark."""
    [found] = re.findall(rf'<section class="panel" id="table-{number}">.*?(<table.*?</table>)', page, re.DOTALL)
    head, *bodies = ElementTree.fromstring(found)
    headings = ["".join(cell.itertext()) for cell in head.iter("th")][1:]
    rows = {}
    for body in bodies:
        title = ""
        for row in body:
            label, *cells = row
            if row.get("class") == "title":
                title = "".join(label.itertext())
                continue
            printed = []
            for cell in cells:
                small = "".join("".join(part.itertext()) for part in cell.iter("small"))
                value = "".join(cell.itertext()).removesuffix(small)
                printed.append(Printed(value, small.removeprefix(" ± "), cell.find("strong") is not None))
            rows[title, "".join(label.itertext())] = dict(zip(headings, printed, strict=True))
    return rows


def test_the_page_of_a_study(evalkit: Command, own_study: Path, page: str) -> None:
    """Its parts in their order: verdicts, a table for each benchmark, figures, and single runs, which are folded."""
    assert re.findall(r"<(?:title|h1)>(.*?)<", page) == ["sizes", "sizes"]
    chapters = ["Verdicts", "Results", "Comparisons", "Figures", "Runs", "Sources"]
    parts = dict(zip(chapters, re.split('<section class="chapter"', page)[1:], strict=True))
    assert [re.findall("<h2 .*?>(.*?)<", part) for part in parts.values()] == [[chapter] for chapter in chapters]
    [navigation] = re.findall("<nav.*?</nav>", page, re.DOTALL)
    links = [(f"chapter-{name.lower()}", name) for name in chapters]
    assert re.findall('<a href="#(.*?)">(.*?)<', navigation) == links
    verdicts = re.findall('href="#(.*?)">(.*?)</a><p>(.*?)</p>', parts["Verdicts"])
    compared = []
    for name in BENCHMARKS:
        outcome = evalkit("compare", "--study", own_study, "--benchmark", name, "--format", "json")
        compared += [each["verdict"] for each in json.loads(outcome.out)["comparisons"]]
    titles = [f"{model} against vanilla: {name}" for name in BENCHMARKS for model in ("intg", "cog")]
    assert [(title, html.unescape(verdict)) for _, title, verdict in verdicts] == list(
        zip(titles, compared, strict=True)
    )
    assert all(f'<section class="panel" id="{address}">' in parts["Comparisons"] for address, *_ in verdicts)
    assert "Primary verdicts: on 2 benchmarks" in page
    assert re.findall("<h3>(.*?)<", parts["Results"]) == ["zs", "needle"]
    assert "<img" in parts["Figures"]
    folded = re.findall('<details id="run-[^-]*">\n<summary>(.*?)</summary>', parts["Runs"])
    assert len(folded) == 12 and folded[2:4] == ["vanilla seed 3 on zs: zeroshot8", "intg seed 1 on zs: zeroshot8"]
    assert "How it was made" not in "".join(parts[chapter] for chapter in chapters[:4])


@pytest.mark.parametrize("rule", fast([None], [None, "acc_norm"]))
def test_averages_over_seeds_are_those_of_the_studys_table(
    rule: str | None, evalkit: Command, own_study: Path, page: str
) -> None:
    shown_page, options = (written(own_study, rule), ("--rule", rule)) if rule else (page, ())
    seeds = {model: [f"seed {seed + 1}" for seed in range(len(SHARES[model]))] for model in ("vanilla", "intg")}
    labels = [(model, label) for model, listed in seeds.items() for label in [*listed, "average"]]
    for number, benchmark in enumerate(BENCHMARKS if rule is None else ["zs"], 1):
        shown, words = table_of(shown_page, number), ("--study", own_study, "--benchmark", benchmark, *options)
        assert list(shown) == [*labels, ("", "cog")]
        for model in json.loads(evalkit("table", *words, "--format", "json").out):
            row = shown["", "cog"] if model["model"] == "cog" else shown[model["model"], "average"]
            error = "stderr" if model["model"] == "cog" else "deviation"
            numbers = [(task["value"], task[error]) for task in model["tasks"]]
            cells = [*row.values()][: len(numbers)]
            if average := model["average"]:
                numbers.append((average["value"], average[error]))
                cells.append(row[average["name"]])
            for cell, pair in zip(cells, numbers, strict=True):
                value, spread = (number if number is None else 100 * number for number in pair)
                assert float(cell.value) == pytest.approx(value, abs=0.0501)
                assert cell.spread == "" if spread is None else float(cell.spread) == pytest.approx(spread, abs=0.0501)
    if rule:
        assert table_of(page, 1) != table_of(shown_page, 1)
        return
    for model in seeds:  # by the runs' own files
        folders = (own_study.parent / "runs").glob(f"{model}-*/results.json")
        last = [average for path in folders for average in json.loads(path.read_text("utf-8"))["averages"][-1:]]
        accuracies = [100 * average["value"] for average in last]
        cell = table_of(page, 1)[model, "average"]["Average"]
        assert len(accuracies) == len(SHARES[model])
        assert float(cell.value) == pytest.approx(fmean(accuracies), abs=0.0501)
        assert float(cell.spread) == pytest.approx(stdev(accuracies), abs=0.0501)


def test_bold_are_averages_and_single_runs_that_compare(page: str) -> None:
    """Of seeds none is bold, however good."""
    shown = table_of(page, 1)
    rivals = [row for label, row in shown.items() if label[1] in ("average", "cog")]
    for heading in rivals[0]:
        best = max(float(row[heading].value) for row in rivals)
        assert {row[heading].value for row in rivals if row[heading].is_bold} == {f"{best:.1f}"}
    assert not any(cell.is_bold for label, row in shown.items() if label[1].startswith("seed") for cell in row.values())


def test_seeds_of_other_settings_have_no_average(evalkit: Command, tmp_path: Path) -> None:
    a, b = (finished_run(tmp_path, f"org/{name}", dtype=dtype) for name, dtype in (("a", "float32"), ("b", "bfloat16")))
    group = f"both={a.folder},{b.folder}"
    outcome = evalkit("report", a.folder.parent / "x", "--group", group, "--without-documents", "-o", "page.html")
    complains(outcome, 2, "x")
    assert evalkit("report", "--group", group, "--without-documents", "-o", "page.html").code == 0
    text = Path("page.html").read_text(encoding="utf-8")
    assert list(table_of(text, 1)) == [("both", "1"), ("both", "2")]
    assert "both has no average: " in text and "bfloat16" in text


def test_only_what_is_no_run_is_left_out(evalkit: Command, tmp_path: Path) -> None:
    """A folder of the name of runs is none of them; a damaged run and an adapter are named in the error."""
    run = finished_run(tmp_path / "results" / "runs", "org/first")
    options = ("--without-documents", "-o", "page.html")
    for name in ("first", "notes"):
        Path(name).mkdir()
    outcome = evalkit("report", "first", "notes", *options)
    assert outcome.code == 0 and "left out: notes" in outcome.err and "left out: first" not in outcome.err
    assert "<h1>first</h1>" in Path("page.html").read_text(encoding="utf-8")
    Path("adapter").mkdir()
    Path("adapter", "adapter_config.json").write_text("{}", encoding="utf-8")
    complains(evalkit("report", run.folder, "adapter", *options), 1, "adapter")
    damaged = Path(shutil.copytree(run.folder, "damaged-run"))
    (damaged / "manifest.json").unlink()
    complains(evalkit("report", run.folder, damaged, *options), 1, "damaged-run", "manifest.json")
    stored = Path(shutil.copytree(damaged, run.folder.with_name("second-0123456789ab")))
    Path("second").mkdir()
    complains(evalkit("report", run.folder, "second", *options), 1, stored.name)
