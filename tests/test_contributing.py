"""The recipes of docs/contributing.md: its files are written and its commands run."""

from __future__ import annotations

import io
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from evalkit.benchmarks.answer_metrics import GROUP as METRICS
from evalkit.benchmarks.answer_metrics import find_answer_metric
from evalkit.benchmarks.registry import GROUP, benchmark
from evalkit.cli import main
from evalkit.comparison.naming import find_run
from evalkit.runs.continuous import find_outcome
from evalkit.runs.rules import find_rule
from tests.documents import made_up
from tests.packages import install
from tests.tiny import tiny_checkpoint

PAGE = (Path(__file__).parents[1] / "docs" / "contributing.md").read_text(encoding="utf-8")
RECIPES = ("A suite", "A rule", "An outcome", "A benchmark", "An export", "A table")
"""In the order in which they build on each other."""


def blocks(title: str, *languages: str) -> list[str]:
    """Return the code blocks of a section in these languages."""
    blocks_of = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(blocks_of, section(title), flags=re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def write_files(title: str) -> None:
    """Write a section's files; a block of an existing file is appended to it."""
    for block in blocks(title, "python", "toml", "yaml"):
        first, _, content = block.partition("\n")
        path = Path(first.removeprefix("# "))
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(content + "\n")
    for name, content in re.findall(r"`(\S+\.jsonl)`:\n\n```jsonl\n(.*?)```", section(title), flags=re.DOTALL):
        Path(name).write_text(content, encoding="utf-8")


def clear_caches() -> None:
    for entries in (benchmark, find_rule, find_outcome, find_answer_metric):
        entries.cache_clear()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two checkpoints, in which all recipes are run in turn."""
    folder = tmp_path_factory.mktemp("mine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("EVALKIT_DATA_DIR", str(made_up(folder / "documents")))
        patch.setenv("EVALKIT_ALLOW_UNOFFICIAL_DATA", "true")
        patch.setenv("EVALKIT_CACHE", str(folder / "cache"))
        for seed, name in enumerate(("base", "tuned")):
            tiny_checkpoint(folder / name, seed=seed)
        write_files("A package of your own")
        clear_caches()
        yield folder
    clear_caches()
    for module in [name for name in sys.modules if name.partition(".")[0] == "evalkit_mine"]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def printed(place: Path) -> dict[str, str]:
    """Run all recipes and return the output of each command."""
    found: dict[str, str] = {}
    for title in RECIPES:
        write_files(title)
        project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
        install(place, project["name"], project.get("entry-points", {}))
        for command in "".join(blocks(title, "sh")).splitlines():
            found[command] = run(command)
    return found


def run(command: str) -> str:
    """Run a command of the page, which must succeed."""
    program, *arguments = command.split()
    assert program == "evalkit"
    with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code, (command, out.getvalue())
    return out.getvalue()


def test_the_page_names_the_groups_of_entry_points() -> None:
    groups = (GROUP, METRICS, "evalkit.rules", "evalkit.outcomes", "evalkit.exports")
    assert all(f'entry-points."{group}"' in PAGE for group in groups)


def test_every_recipe_works(printed: dict[str, str], place: Path) -> None:
    assert "Physical" in printed["evalkit run base --suite my_suite.yaml --sample 100"]
    assert "tuned" in printed["evalkit compare base-my_suite tuned-my_suite"]
    assert "rule acc_half_norm" in printed["evalkit rescore base-my_suite --rule acc_half_norm"]
    run_of_suite = find_run("base-my_suite", place / "results" / "runs")
    scores = run_of_suite.scores[run_of_suite.scores["task"] == "piqa"]
    scores = scores.assign(score=scores["ll_continuation"] / scores["n_continuation"] ** 0.5)
    best = scores.loc[scores.groupby("doc_id")["score"].idxmax()]
    [piqa] = [task for task in run_of_suite.results("acc_half_norm").tasks if task.task == "piqa"]
    assert piqa.value == pytest.approx((best["choice"] == best["gold"]).mean())
    assert "probability" in printed["evalkit rescore base-my_suite --rule probability"]
    assert "probability" in printed["evalkit compare base-my_suite tuned-my_suite --outcome probability"]
    for suite in ("my_questions", "capitals"):
        file = suite + ".yaml" * (suite != "capitals")
        [row] = [line for line in printed[f"evalkit run base --suite {file}"].splitlines() if " f1 " in line]
        assert row.split()[2] == "3"
        assert "f1" in printed[f"evalkit compare base-{suite} tuned-{suite}"]
    # The two ways ask the same questions with the same settings
    names = ("base-my_questions", "base-capitals")
    yaml, python = (find_run(name, place / "results" / "runs").table("answers.parquet", ()) for name in names)
    columns = ["prompt", "references", "answer", "score"]
    assert yaml[columns].equals(python[columns])
    assert "length ↓" in printed["evalkit run base --suite my_lengths.yaml"]
    assert "capitals" in run("evalkit ls suites")
    layout = "suite: capitals\nrows: [{items: {base: Base}}]\ncolumns: [{items: {capitals: Capitals}}]\n"
    (place / "capitals.yaml").write_text(layout)
    (place / "capitals_runs.yaml").write_text("rows: {base: base-capitals}\n")
    assert "Base" in run("evalkit table capitals.yaml --source runs --runs capitals_runs.yaml")
    [path] = printed["evalkit export base-my_suite --to tsv --rule acc_half_norm"].splitlines()
    head, *rows = Path(path).read_text().splitlines()
    assert head == "task\tn\tscore\tstderr"
    assert [row.partition(" ")[0] for row in rows] == ["piqa", "openbookqa", "hellaswag"]
    [text] = [text for command, text in printed.items() if command.startswith("evalkit table")]
    assert r"\begin{tabular}" in text and r"\textsc{Tuned}" in text
