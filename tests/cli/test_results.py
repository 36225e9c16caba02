"""Commands that read finished runs: show, table, compare --study, figure and report; snapshots have what they print."""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalkit.attention.groups import KINDS
from evalkit.benchmarks.run import evaluate
from evalkit.display import Progress
from evalkit.runs.folder import Run
from evalkit.runs.rules import decide, find_rule
from evalkit.studies.study import record_of, save_record
from evalkit.studies.study_file import read_study
from evalkit.suites.questions import Question
from evalkit.suites.templates import Template
from evalkit.tables.layout import layout_names
from tests.attention.made import made_run
from tests.cli.conftest import Command, complains, completed
from tests.documents import rewrite
from tests.studies.conftest import computed_study, files, study
from tests.studies.made import write_study
from tests.studies.test_tables import own, with_tables
from tests.tables.runs import written

__all__ = ["computed_study", "files", "own", "study"]  # fixtures

ROOT = Path(__file__).parents[2]
SHOWN = {"main_res", "sig_abl_app", "sig_abl_main", "vanilla_head_app", "backbone_abl_app", "backbone_abl_main"}
"""Tables with a row of one of the study's models."""


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


# show


@pytest.fixture(scope="module")
def second(checkpoint: Path, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same documents under another template."""
    return evaluate(
        str(checkpoint), data_dir=documents, allow_unofficial_data=True, template="plain",
        output=tmp_path_factory.mktemp("second"), progress=Progress(live=False),
    )  # fmt: skip


def listed(evalkit: Command, *arguments: object) -> dict[str, Any]:
    outcome = evalkit("show", *arguments, "--format", "json", "--limit", 1000)
    assert outcome.code == 0, outcome.err
    content: dict[str, Any] = json.loads(outcome.out)
    return content


def margins(run: Run, task: str, rule: str) -> dict[int, float]:
    """Document → margin, by a loop over the score table."""
    expected = {}
    for doc_id, rows in run.scores[run.scores["task"] == task].groupby("doc_id"):
        scores = list(find_rule(rule).score(rows))
        gold = int(rows["gold"].iloc[0])
        expected[int(doc_id)] = scores[gold] - max(score for number, score in enumerate(scores) if number != gold)
    return expected


def test_wrong_documents_the_surest_mistakes_first(evalkit: Command, finished: Run) -> None:
    for rule, task in (("ppl", "boolq"), ("acc_norm", "hellaswag")):
        decided = decide(finished.scores, find_rule(rule))
        wrong = decided[(decided["task"] == task) & (decided["correct"] == 0)]
        content = listed(evalkit, finished.folder, "--task", task, "--wrong", "--rule", rule)
        shown = [(int(document["document"]), document["runs"][0]["margin"]) for document in content["documents"]]
        assert sorted(document for document, _ in shown) == sorted(wrong["doc_id"])
        expected = margins(finished, task, rule)
        assert [margin for _, margin in shown] == pytest.approx([expected[document] for document, _ in shown])
        assert [margin for _, margin in shown] == sorted(margin for _, margin in shown)
        assert (content["count"], content["of"]) == (len(wrong), 6)
        right = listed(evalkit, finished.folder, "--task", task, "--right", "--rule", rule)
        assert right["count"] == 6 - len(wrong)


@pytest.mark.slow
def test_documents_that_another_run_decides_otherwise(evalkit: Command, finished: Run, second: Run) -> None:
    a, b = (decide(run.scores, find_rule("acc")) for run in (finished, second))
    keys = ["task", "subtask", "doc_id"]
    both = a.merge(b, on=keys, suffixes=("_a", "_b"))
    for flag, before, after in (("--won", 0, 1), ("--lost", 1, 0)):
        documents = listed(evalkit, finished.folder, second.folder, flag, "--rule", "acc")["documents"]
        expected = both[(both["correct_a"] == before) & (both["correct_b"] == after)]
        names = {(document["task"], document["subtask"], int(document["document"])) for document in documents}
        assert names == set(expected[keys].itertuples(index=False, name=None)) and names
        assert all([run["right"] for run in document["runs"]] == [before, after] for document in documents)


@pytest.mark.parametrize("rule", ["ppl", "acc_norm", "acc"])
def test_one_average_is_printed_and_lm_evals_acc_beside_it(evalkit: Command, finished: Run, rule: str) -> None:
    """Of other rules nothing without --detail, which prints the averages under all of them."""
    short, full = (evalkit("rescore", finished.folder, "--rule", rule, *more).out for more in ((), ("--detail",)))
    average = finished.results("acc").average
    error = "" if average.stderr is None else f" ± {100 * average.stderr:.1f}"
    beside = f"average by acc, lm-eval's rule: {100 * average.value:.1f}{error}; report {rule}"
    assert (beside in short, beside in full) == (rule != "acc",) * 2
    assert "other rule" not in short and "ppl_continuation" not in short
    assert "ppl_continuation_end" in full and "--detail" in short


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """The documents that are rendered: subtask and id."""
    documents, pieces = set[tuple[str, int]](), Template.pieces

    def rendering(template: Template, question: Question, *more: Any) -> Any:
        documents.add((question.subtask, question.doc_id))
        return pieces(template, question, *more)

    monkeypatch.setattr(Template, "pieces", rendering)
    return documents


def test_only_what_is_shown_is_rendered(
    evalkit: Command, finished: Run, second: Run, tmp_path: Path, rendered: set[tuple[str, int]]
) -> None:
    """A list has the beginnings of texts, without what all texts of a subtask begin with."""
    for arguments in ((finished.folder, "--wrong"), (finished.folder, second.folder, "--won", "--rule", "acc")):
        outcome = evalkit("show", *arguments, "--limit", 2, "--format", "json")
        shown = {document["subtask"] for document in json.loads(outcome.out)["documents"]}
        assert shown and {subtask for subtask, _ in rendered} == shown
        rendered.clear()
    [*_, own] = json.loads(evalkit("show", finished.folder, "--document", "boolq/2", "--format", "json").out)["runs"]
    assert own["run"] == finished.manifest["id"] and rendered == {("boolq", 2)}
    rendered.clear()
    page = ("report", finished.folder, second.folder, "--without-documents", "-o", tmp_path / "report.html")
    assert evalkit(*page).code == 0 and len(rendered) == 1  # the example of how the runs were made


def test_one_document(evalkit: Command, finished: Run) -> None:
    [run] = json.loads(evalkit("show", finished.folder, "--document", "arc_easy/2", "--format", "json").out)["runs"]
    rows = finished.scores.query("task == 'arc_easy' and doc_id == 2")
    for choice, (_, row) in zip(run["choices"], rows.iterrows(), strict=True):
        for name in ("special", "instruction", "context", "continuation", "end"):
            segment, log_likelihood, tokens = choice[name], row[f"ll_{name}"], row[f"n_{name}"]
            assert (segment["log_likelihood"], segment["tokens"]) == (log_likelihood, tokens)
            assert segment["perplexity"] == pytest.approx(math.exp(-log_likelihood / tokens))
    for decision in run["rules"]:
        decided = decide(rows.reset_index(drop=True), find_rule(decision["rule"])).iloc[0]
        assert (decision["prediction"], decision["right"]) == (decided["prediction"], bool(decided["correct"]))
    assert {decision["rule"] for decision in run["rules"]} == set(finished.stored["rules"])
    # The subject alone is enough where it has the document
    assert "mmlu/mmlu_astronomy/0" in evalkit("show", finished.folder, "--document", "mmlu_astronomy/0").out
    complains(evalkit("show", finished.folder, "--document", "mmlu/0"), 2, "57 subtasks")


def test_texts_are_searched_and_are_those_that_were_scored(
    evalkit: Command, finished: Run, checkpoint: Path, documents: Path, tmp_path: Path
) -> None:
    texts = {
        document["name"]: json.dumps([document["prompt"], document["continuations"]], ensure_ascii=False).casefold()
        for document in listed(evalkit, finished.folder, "--task", "piqa")["documents"]
    }
    found = listed(evalkit, finished.folder, "--task", "piqa", "--text", "RIVER assistant")["documents"]
    assert {document["name"] for document in found} == {name for name, text in texts.items() if "river" in text}
    changed = Path(shutil.copytree(documents, tmp_path / "documents"))
    rewrite(changed / "piqa.jsonl", 1, {"goal": "another goal"})
    other = evaluate(
        str(checkpoint), data_dir=changed, allow_unofficial_data=True, output=tmp_path / "runs",
        tasks=("piqa", "boolq"), progress=Progress(live=False),
    )  # fmt: skip
    complains(evalkit("show", finished.folder, other.folder, "--won"), 2, "task piqa", "hash")
    assert evalkit("show", finished.folder, other.folder, "--won", "--task", "boolq").code == 0
    rewrite(changed / "boolq.jsonl", 1, {"passage": "another passage"})
    outcome = evalkit("show", other.folder, "--task", "boolq")
    assert outcome.code == 0 and "not those that were scored" in " ".join(outcome.out.split())
    complains(evalkit("show", other.folder, "--task", "boolq", "--text", "a"), 2, "--text")


# table


def test_the_papers_numbers_are_audited(evalkit: Command) -> None:
    page = (ROOT / "docs" / "measurements" / "paper_audit.md").read_text(encoding="utf-8")
    printed = evalkit("table", "--audit", "--format", "markdown").out
    assert " ".join(printed.split()) in " ".join(page.split())


def test_tables_of_a_study(evalkit: Command, own: Path) -> None:
    """One, and all of which it has rows; those that cannot be made are named and do not stop the others."""
    shown = evalkit("table", "main_res", "--study", own, "--stderr", "--drop-empty", "--format", "csv")
    rows = rows_of(shown.out)
    assert [row["key"] for row in rows if row["key"] != "note"] == ["vanilla_125m", "diff_125m", "intg_125m"]
    assert "±" in rows[0]["Avg."]
    assert [line.split(": ")[1] for line in shown.err.splitlines()] == ["other", "cog"]
    layout = {"suite": "zeroshot8", "rows": [{"items": {"base": None}}], "columns": [{"items": {"piqa": None}}]}
    for name in ("mine", "sig_abl_app"):
        written(own.parent / f"{name}.yaml", **layout)
    files = {f"{name}.yaml": {} for name in ("mine", "sig_abl_app", "nowhere")}
    with_tables(own, main_res={"titles": {"Resoning": "x"}}, **files)
    outcome = evalkit("table", "--all", "--study", own, "-o", "new/tables", "--format", "latex")
    names = [*(name for name in layout_names() if name in SHOWN - {"main_res"}), "mine"]
    assert (outcome.code, outcome.out.splitlines()) == (1, [f"new/tables/{name}.tex" for name in names])
    assert all(len(Path(path).read_text("utf-8")) > 100 for path in outcome.out.splitlines())
    lines = [line.split(": ") for line in outcome.err.splitlines()]
    assert [words[1] for words in lines if words[0] == "evalkit"] == [
        "table main_res", "table sig_abl_app", "table nowhere"]  # fmt: skip
    left_out = {words[0]: words[1].partition(";")[0].split(", ") for words in lines if words[0].startswith("left out")}
    [unfinished, others] = left_out
    assert unfinished == "left out, not finished" and "no benchmark or row" in others
    assert {*left_out[unfinished], *left_out[others]} == set(layout_names()) - SHOWN
    # cog has no run of zeroshot8, whose tables wait for it; no run is of LongBench
    assert left_out[others] == ["anly_rank_main", "app_long_contx"]
    with_tables(own)
    shutil.rmtree(own.parent / "runs")
    complains(evalkit("table", "main_res", "--study", own), 2, "main_res", "base, intg, other, cog")


def test_runs_in_another_folder(evalkit: Command, study: Path) -> None:
    """--in reads a copy of the runs, by the names of a study and by those of runs, wherever runs are read."""
    content = read_study(study)
    of_study = ("--study", study, "--benchmark", "zs")
    record = record_of(content.output, content.runs[0])
    assert record is not None
    Path("rows.yaml").write_text(yaml.safe_dump({"rows": {"vanilla_125m": record.id}}), "utf-8")
    moved = shutil.move(content.output, study.parent / "elsewhere")
    for words in (
        ("table", *of_study),
        ("compare", *of_study, *content.names[:2]),
        ("report", *of_study, "--without-documents", "-o", "page.html"),
        ("report", record.id, "--without-documents", "-o", "page.html"),
        ("export", record.id, "--to", "hub", "-o", "exported"),
        ("integrity", record.id),
        ("table", "main_res", "--drop-empty", "--runs", "rows.yaml"),
    ):
        found = evalkit(*words, "--in", moved)
        assert found.code == 0, (words, found)
        without = evalkit(*words)
        assert without.code != 0 or (words[0] == "table" and without.out != found.out), words


@pytest.mark.latex
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed (Debian: texlive-latex-extra)")
def test_latex_compiles(evalkit: Command, own: Path, finished: Run) -> None:
    """Tables of a study, and what other commands print."""
    with_tables(own, main_res={"caption": "50 % of **ours** & ~more~", "titles": {"Reasoning": "A_1"}, "rows":
                               {"cog_all_125m": "other", "intg_1b": "cog"}})  # fmt: skip
    options = ("--format", "latex", "--standalone")
    assert evalkit("table", "--all", "--study", own, "-o", "tables", *options, "--drop-empty", "--stderr").code == 0
    for words in (["rescore", finished.folder, "--detail"], ["integrity", finished.folder], ["doctor"], ["data"],
                  ["show", finished.folder, "--task", "boolq"], ["ls", "suites"], ["models", "ls"],
                  ["models", "show", "llama-125m-diff"]):  # fmt: skip
        Path("tables", f"{words[0]}-{len(words)}.tex").write_text(evalkit(*words, *options).out, encoding="utf-8")
    for path in Path("tables").iterdir():
        typeset = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", path.name]
        done = subprocess.run(typeset, cwd="tables", capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]


def test_the_rule_of_a_benchmark_is_that_of_its_numbers(evalkit: Command, study: Path) -> None:
    """A finished run has the results of every rule; the rule in the file is the one that is shown."""
    begin, end = ("compare", "--study", study, "--benchmark", "zs"), ("--format", "json")
    for words in (("intg", "vanilla"), ("--curve", "diff")):
        plain, chosen = evalkit(*begin, *words, *end), evalkit(*begin, *words, *end, "--rule", "acc_norm")
        content = yaml.safe_load(study.read_text("utf-8"))
        content["benchmarks"]["zs"]["rule"] = "acc_norm"
        written(study, **content)
        assert evalkit(*begin, *words, *end).out == chosen.out != plain.out
        assert evalkit(*begin, *words, *end, "--rule", "ppl").out == plain.out
        del content["benchmarks"]["zs"]["rule"]
        written(study, **content)


def test_completion_of_names_in_a_study(own: Path) -> None:
    assert completed("table", "--study", str(own), "--benchmark", "") == ["zs"]
    assert completed("compare", "--study", str(own), "in") == ["intg"]
    assert completed("table", "--study", "nowhere.yaml", "--benchmark", "") == ["file"]


# figure


def test_figures_that_cannot_be_drawn_are_left_out(evalkit: Command, tmp_path: Path) -> None:
    run = made_run(tmp_path, "models/less", documents=1, groups=("rank",))
    outcome = evalkit("figure", "--all", run.folder, "-o", "figures")
    assert outcome.code == 0
    written = {"rank.pdf", "rank.png", "rank.csv", "rank-caption.tex"}
    assert {path.name for path in Path("figures").iterdir()} == written
    left = [line.split(": ")[0] for line in outcome.err.splitlines() if ": not drawn, " in line]
    assert left == [name for name in KINDS if name != "rank"]
    complains(evalkit("figure", "--all", run.folder, "-o", "other", "--layers", "7"), 2)
    assert evalkit("figure", "rank", "less", "--in", tmp_path).code == 0
    complains(evalkit("figure", "rank", "less", "--in", "figures"), 2, "no runs in figures")


@pytest.mark.slow
def test_figures_of_a_study(evalkit: Command, tmp_path: Path) -> None:
    """Of two models, one with two seeds, and a third without a run."""
    checkpoints = {"base": "gone/base", "intg": ["gone/intg-1", "gone/intg-2"], "new": "gone/new"}
    benchmarks = {"zs": {"suite": "zeroshot8"}, "maps": {"suite": "attention", "sample": 2}}
    path = write_study(tmp_path / "study.yaml", checkpoints, benchmarks, settings={})
    study = read_study(path)
    for cell in study.runs:
        if cell.benchmark.name == "maps" and cell.checkpoint.name != "new":
            run = made_run(study.output, cell.checkpoint.model, documents=2)
            save_record(study.output, cell, run.folder, run.manifest["id"])
    for name, words, order in (
        ("entropy", (), ["base", "intg"]),
        ("entropy", ("intg", "base", "--benchmark", "maps"), ["intg", "base"]),
        ("entropy", ("base", "intg", "--names", "Vanilla,Integral"), ["Vanilla", "Integral"]),
        ("heatmap", (), ["base", "intg seed 1", "intg seed 2"]),
        ("heatmap", ("intg", "--names", "Integral"), ["Integral seed 1", "Integral seed 2"]),
    ):
        outcome = evalkit("figure", name, *words, "--study", path)
        assert outcome.code == 0 and ("new on maps" in outcome.err) == (not words)
        drawn = rows_of(Path(f"{name}.csv").read_text(encoding="utf-8"))
        assert list(dict.fromkeys(row["run"] for row in drawn)) == order
    complains(evalkit("figure", "entropy", "--study", path, "base", "intg", "--names", "A,A"), 2)
    page = ("report", "--study", path, "--benchmark", "maps", "--without-documents", "-o", "page.html")
    assert evalkit(*page).code == 0
    pictures = re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", Path("page.html").read_text(encoding="utf-8"))
    legends = ["intg (2 seeds)" in base64.b64decode(picture).decode() for picture in pictures]
    assert any(legends)
    record = record_of(study.output, next(cell for cell in study.runs if cell.label == "intg seed 1 on maps"))
    assert record is not None
    shutil.rmtree(study.output / record.folder)
    outcome = evalkit("figure", "heatmap", "--study", path)
    assert outcome.code == 0 and "intg seed 1 on maps" in outcome.err
    drawn = rows_of(Path("heatmap.csv").read_text(encoding="utf-8"))
    assert list(dict.fromkeys(row["run"] for row in drawn)) == ["base", "intg seed 2"]


@pytest.mark.slow
def test_all_figures_of_the_paper(evalkit: Command, tmp_path: Path) -> None:
    """By its definitions, and no others; of entropy that of shifted weights alone."""
    a, b = (made_run(tmp_path, f"models/{name}", documents=2).folder for name in "ab")
    outcome = evalkit("figure", "--all", "--paper", a, b, "--size", "column", "--notes", "-o", "figures")
    assert outcome.code == 0
    measured = {}
    for path in Path("figures").glob("*.csv"):
        measured[path.stem] = {row["measure"].partition(":")[0] for row in rows_of(path.read_text(encoding="utf-8"))}
    assert measured == {"bos": {"bos_token"}, "categories": {"mass"}, "entropy": {"entropy_shifted"},
                        "negative": {"bos_negative_all"}, "rank": {"rank"}}  # fmt: skip
    complains(evalkit("figure", "summary", a, "--paper"), 2)


@pytest.mark.slow
def test_figures_of_groups_are_of_seeds(evalkit: Command, tmp_path: Path) -> None:
    a, b, c = (made_run(tmp_path, f"models/{name}", documents=2).folder for name in "abc")
    outcome = evalkit("figure", "entropy", a, "--group", f"pair={b},{c}")
    assert outcome.code == 0
    drawn = rows_of(Path("entropy.csv").read_text(encoding="utf-8"))
    assert list(dict.fromkeys(row["run"] for row in drawn)) == ["a", "pair"]
    assert all((row["spread"] == "") == (row["run"] == "a") for row in drawn)


@pytest.mark.slow
def test_the_models_of_each_figure_of_a_study(evalkit: Command, tmp_path: Path) -> None:
    """Those that it lists, in its order; named models count more, and all models are in figures that are not listed."""
    checkpoints, maps = {name: f"gone/{name}" for name in ("base", "intg", "new")}, {"suite": "attention", "sample": 2}
    listed = {"entropy": ["intg", "base"], "bos": ["base"], "negative": ["new"]}
    path = write_study(tmp_path / "study.yaml", checkpoints, {"maps": maps}, settings={}, figures=listed)
    study = read_study(path)
    for cell in study.runs[:2]:
        run = made_run(study.output, cell.checkpoint.model, documents=2)
        save_record(study.output, cell, run.folder, run.manifest["id"])

    def drawn(file: str) -> list[str]:
        return list(dict.fromkeys(row["run"] for row in rows_of(Path(file).read_text(encoding="utf-8"))))

    for words, order in (((), ["intg", "base"]), (("base",), ["base"])):
        outcome = evalkit("figure", "entropy", *words, "--study", path)
        assert outcome.code == 0 and drawn("entropy.csv") == order and "new on maps" not in outcome.err
    outcome = evalkit("figure", "--all", "--study", path, "-o", "all")
    assert outcome.code == 0 and "negative: not drawn" in outcome.err and not Path("all/negative.csv").exists()
    assert [drawn(f"all/{name}.csv") for name in ("bos", "entropy", "rank")] == [
        ["base"], ["intg", "base"], ["base", "intg"]
    ]  # fmt: skip
    complains(evalkit("figure", "negative", "--study", path), 2, "new on maps")
