"""`evalkit table` and `compare` with --study, and `table --all`, through the real entry point."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from evalkit.tables.layout import layout_names
from tests.cli.test_root import Command, _no_settings, complains, completed, evalkit
from tests.studies.conftest import computed_study, study
from tests.studies.test_tables import own, with_tables
from tests.test_api import heavy_after

__all__ = ["_no_settings", "computed_study", "evalkit", "own", "study"]  # fixtures

SHOWN = {"main_res", "sig_abl_app", "sig_abl_main", "vanilla_head_app", "backbone_abl_app", "backbone_abl_main"}
"""Tables with a row of one of the study's models."""


def test_a_table_of_a_study(evalkit: Command, own: Path) -> None:
    shown = evalkit("table", "main_res", "--study", own, "--stderr", "--drop-empty", "--format", "csv")
    assert shown.code == 0
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert [row["key"] for row in rows if row["key"] != "note"] == ["vanilla_125m", "diff_125m", "intg_125m"]
    assert "±" in rows[0]["Avg."]
    assert shown.err.splitlines() == [
        "not in main_res: other: no row has this model",
        "not in main_res: cog: no run is finished, so the row of this model is unknown",
    ]
    both = evalkit("table", "main_res", "--study", own, "--source", "both", "--format", "csv")
    assert "(+" in both.out or "(-" in both.out


@pytest.mark.parametrize("form", ["terminal", "latex"])
def test_all_tables_of_a_study(evalkit: Command, own: Path, form: str) -> None:
    ending = {"terminal": "txt", "markdown": "md", "latex": "tex"}.get(form, form)
    outcome = evalkit("table", "--all", "--study", own, "-o", "new/tables", "--format", form)
    assert outcome.code == 0
    assert outcome.out.splitlines() == [f"new/tables/{name}.{ending}" for name in layout_names() if name in SHOWN]
    assert {path.name for path in Path("new/tables").iterdir()} == {f"{name}.{ending}" for name in SHOWN}
    assert all(len(path.read_text("utf-8")) > 100 for path in Path("new/tables").iterdir())
    left = {line.split(": ")[1] for line in outcome.err.splitlines()}
    assert left == set(layout_names()) - SHOWN
    assert (
        "left out: anly_rank_main: it shows suite attention, and no benchmark of the study is of that suite"
        in outcome.err
    )


def test_all_published_tables(evalkit: Command) -> None:
    outcome = evalkit("table", "--all", "-o", "tables", "--format", "latex")
    assert outcome.out.splitlines() == [f"tables/{name}.tex" for name in layout_names()]
    for name in layout_names():
        assert Path(f"tables/{name}.tex").read_text("utf-8") == evalkit("table", name, "--format", "latex").out


def test_one_table_that_fails_does_not_stop_the_others(evalkit: Command, own: Path) -> None:
    with_tables(own, main_res={"titles": {"Resoning": "x"}}, **{"nowhere.yaml": {}})
    outcome = evalkit("table", "--all", "--study", own, "-o", "tables")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [f"tables/{name}.txt" for name in layout_names() if name in SHOWN - {"main_res"}]
    failures = [line for line in outcome.err.splitlines() if line.startswith("evalkit: ")]
    assert [line.split(": ")[1] for line in failures] == ["table main_res", "table nowhere"]
    assert "unknown title of table main_res" in failures[0]


def test_a_file_of_ones_own_is_among_all(evalkit: Command, own: Path) -> None:
    layout = {"suite": "zeroshot8", "rows": [{"items": {"base": None}}], "columns": [{"items": {"piqa": None}}]}
    for name in ("mine", "main_res"):
        (own.parent / f"{name}.yaml").write_text(yaml.safe_dump(layout), "utf-8")
    with_tables(own, **{"mine.yaml": {}, "main_res.yaml": {}})
    outcome = evalkit("table", "--all", "--study", own, "-o", "tables")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (1, "tables/mine.txt")
    assert "evalkit: table main_res: another table is called main_res; rename the layout's file" in outcome.err


def test_a_study_without_runs(evalkit: Command, own: Path) -> None:
    shutil.rmtree(own.parent / "runs")
    outcome = evalkit("table", "--all", "--study", own, "-o", "tables")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.splitlines()[-1] == f"evalkit: study {own} has no finished run for any table"
    complains(evalkit("table", "main_res", "--study", own), 2, "cannot fill table main_res", "no run is finished",
              "base, intg, other, cog")  # fmt: skip


def test_latex_compiles(evalkit: Command, own: Path) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("no pdflatex to typeset it with")
    with_tables(own, main_res={"caption": "50 % of **ours** & ~more~", "titles": {"Reasoning": "A_1"}, "rows":
                               {"cog_all_125m": "other", "intg_1b": "cog"}})  # fmt: skip
    options = ("--format", "latex", "--standalone", "--drop-empty", "--stderr")
    assert evalkit("table", "--all", "--study", own, "-o", "tables", *options).code == 0
    for path in Path("tables").iterdir():
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", path.name]
        done = subprocess.run(command, cwd="tables", capture_output=True, text=True, errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark", "zs", "main_res"], ["--benchmark needs --study", "--study"]),
        (["--study", "s.yaml", "main_res", "--runs", "x"], ["--study and --runs"]),
        (["--study", "s.yaml", "main_res", "--source", "published"], ["--study is for --source runs or both"]),
        (["--study", "s.yaml", "--audit"], ["--audit and --study"]),
        (["--study", "s.yaml"], ["name a table", "--all"]),
        (["--all"], ["--all needs --output", "--output"]),
        (["--all", "main_res", "-o", "x"], ["--all prints every table; omit main_res"]),
        (["--all", "--audit", "-o", "x"], ["--all and --audit"]),
        (["--all", "--runs", "x", "-o", "x"], ["--all and --runs"]),
        (["--drop-empty", "main_res"], ["--drop-empty is for numbers of runs"]),
        (["--source", "runs", "main_res"], ["--study"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    complains(evalkit("table", *arguments), 2, *words)


def test_invalid_folders_and_names(evalkit: Command, own: Path) -> None:
    Path("file").write_text("", "utf-8")
    complains(evalkit("table", "--all", "-o", "file"), 2, "--output file")
    complains(evalkit("table", "--all", "-o", "file/x"), 2, "--output file/x cannot be made")
    complains(evalkit("table", "--all", "--study", own, "--benchmark", "zz", "-o", "x"), 2, "unknown benchmark", "'zz'")
    complains(evalkit("table", "main_rse", "--study", own), 2, "unknown table 'main_rse'")
    complains(evalkit("table", "main_res", "--study", own, "--as-printed"), 2, "--as-printed shows the paper's own")
    complains(evalkit("table", "main_res", "--study", "none.yaml"), 2, "none.yaml cannot be read")


def test_comparing_by_name(evalkit: Command, computed_study: Path) -> None:
    begin = ("compare", "--study", computed_study, "--benchmark")
    shown = evalkit(*begin, "zs", "intg", "vanilla", "diff@5")
    assert shown.code == 0
    sides = [line.partition(" (")[0] for line in shown.out.splitlines() if line[:3] in ("A: ", "B: ", "C: ")]
    assert sides == ["A: intg", "B: vanilla", "A: intg", "C: diff@5"]
    assert shown.out.splitlines()[-1] == "Training steps: diff@5 5."
    content = json.loads(evalkit(*begin, "zs", "intg", "diff", "--format", "json").out)
    assert content["notes"] == ["Training steps: diff 10."]
    [comparison] = content["comparisons"]
    assert (comparison["a"], comparison["b"]) == ("intg", "diff")
    assert (len(comparison["runs_a"]), len(comparison["runs_b"])) == (2, 2)
    noted = evalkit(*begin, "zs", "intg", "diff", "--format", "csv")
    assert "Training steps: diff 10." in noted.err
    assert "Training steps" in evalkit(*begin, "zs", "intg", "diff", "--format", "latex").out
    complains(evalkit(*begin, "needle"), 2, "diff seed 1 step 10 on needle", "evalkit study run")
    complains(evalkit("compare", "--study", computed_study, "intg", "vanilla"), 2, "has several benchmarks", "needle")
    complains(evalkit(*begin, "zs", "intg", "vanila"), 2, "unknown checkpoint", "did you mean 'vanilla'")
    complains(evalkit(*begin, "zs", "--group", "a=b"), 2, "omit --group")
    complains(evalkit(*begin, "zs", "-o", "runs"), 2, "--study and --output")
    complains(evalkit("compare", "--benchmark", "zs", "a", "b"), 2, "--benchmark needs --study")


def test_the_rule_of_a_benchmark_is_that_of_its_numbers(evalkit: Command, own: Path, study: Path) -> None:
    """A finished run has the results of every rule; the rule in the file is the one that is shown."""

    def with_rule(path: Path, rule: str | None) -> None:
        content = yaml.safe_load(path.read_text("utf-8"))
        content["benchmarks"]["zs"] = {
            key: value for key, value in content["benchmarks"]["zs"].items() if key != "rule"
        } | ({"rule": rule} if rule else {})
        path.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")

    commands: list[tuple[Path, tuple[object, ...]]] = [
        (own, ("table", "main_res", "--study", own, "--drop-empty", "--format", "csv")),
        (study, ("compare", "--study", study, "--benchmark", "zs", "intg", "vanilla", "--format", "json")),
        (study, ("compare", "--study", study, "--benchmark", "zs", "--curve", "diff", "--format", "json")),
    ]
    for path, command in commands:
        with_rule(path, None)
        plain, asked = evalkit(*command), evalkit(*command, "--rule", "acc_norm")
        with_rule(path, "acc_norm")
        shown = evalkit(*command)
        assert (shown.code, shown.out) == (0, asked.out), shown.err
        assert plain.out != asked.out
        assert evalkit(*command, "--rule", "ppl").out == plain.out


def test_curves_by_name(evalkit: Command, study: Path) -> None:
    shutil.rmtree(next(study.parent.glob("runs/diff-seed1-checkpoint-10-*")))
    begin = ("compare", "--study", study, "--benchmark", "zs", "--curve")
    shown = evalkit(*begin, "--plot", "curve.png")
    assert shown.code == 0
    assert [line.partition(":")[0] for line in shown.out.splitlines()[:2]] == ["diff seed 1", "diff seed 2"]
    assert shown.out.splitlines()[-1] == "diff seed 1: not finished: step 10."
    assert Path("curve.png").stat().st_size > 1000
    curves = json.loads(evalkit(*begin, "diff", "--format", "json").out)["curves"]
    assert [[point["step"] for point in one["average"]] for one in curves] == [[5, 20], [5, 10]]


def test_without_heavy_imports(own: Path) -> None:
    options = ["table", "main_res", "--study", str(own), "--stderr"]
    assert heavy_after(f"from evalkit.cli.root import cli\ncli.main({options!r}, standalone_mode=False)") == set()


def test_completion(own: Path) -> None:
    assert completed("table", "--study", "x") == ["file"]
    assert completed("table", "--study", str(own), "--benchmark", "") == ["zs"]
    assert completed("compare", "--study", str(own), "in") == ["intg"]
    assert completed("table", "--study", "nowhere.yaml", "--benchmark", "") == ["file"]
    assert completed("table", "--benchmark", "") == ["file"]
