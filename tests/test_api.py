"""The public API of `import evalkit`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import evalkit
from evalkit.benchmarks.request import Request, provenance
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.models.loading.locate import Checkpoint, locate
from evalkit.models.loading.spec import ModelSpec, model_spec
from evalkit.runs.score_table import CLUSTER, ScoreRow
from tests.comparison.made import finished_run

HEAVY = ("torch", "transformers", "pandas", "lm_eval", "datasets")


def heavy_after(statement: str) -> set[str]:
    """Return the heavy libraries that a new Python process has imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_everything_public_can_be_had_and_is_explained() -> None:
    assert sorted(evalkit.__all__) == evalkit.__all__
    for name in evalkit.__all__:
        assert getattr(evalkit, name).__name__ == name
        assert not (Path(evalkit.__path__[0]) / name).exists()
    with pytest.raises(AttributeError, match="evaluat"):
        _ = evalkit.evaluat
    for function in (evalkit.evaluate, evalkit.harness, evalkit.compare, evalkit.load_run):
        for name in inspect.signature(function).parameters:
            assert any(name in line.partition(":")[0] for line in str(function.__doc__).splitlines()), name


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"settings": {"limit": 5}}, UsageError, "limit"),
        ({"settings": {"lengths": [5]}}, UnknownNameError, "'lengths'"),
        ({"suite": "needle", "settings": {"length": [5]}}, UnknownNameError, "'length'.*'lengths'"),
        ({"suite": "needle", "template": "plain"}, UsageError, "template: suite needle"),
        ({"suite": "needles"}, UnknownNameError, "'needles'.*'needle'"),
        ({"lenghts": [5]}, TypeError, "lenghts"),
    ],
)
def test_settings_stand_where_they_belong(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        evalkit.evaluate("nowhere/at-all", **options)


def test_what_lists_or_reads_results_loads_nothing_heavy(
    finished: evalkit.Run, checkpoint: Path, documents: Path
) -> None:
    listing = [["models", "show", "llama-1.2b-diff"], ["figure", "--list"], ["table", "main_res"], ["ls", "runs"]]
    light = f"""
import sys, evalkit
from evalkit.cli.root import cli
evalkit.evaluate({str(checkpoint)!r}, data_dir={str(documents)!r}, allow_unofficial_data=True,
                 output={str(finished.folder.parent)!r})
for words in {listing}: cli.main(words, standalone_mode=False)
try: cli.main(['run', '--help'], standalone_mode=False)
except SystemExit: pass
assert not {{'matplotlib', *{HEAVY}}} & set(sys.modules)
run = evalkit.load_run({str(finished.folder)!r})
run.results('acc_norm'), run.scores"""
    assert heavy_after(light) == {"pandas"}
    reading = [["rescore", str(finished.folder)], ["show", str(finished.folder), "--task", "piqa", "--wrong"]]
    start = f"from evalkit.cli.root import cli\nfor words in {reading}: cli.main(words, standalone_mode=False)"
    assert not heavy_after(start) & {"torch", "transformers"}


def test_a_run_is_opened_by_any_of_its_names(finished: evalkit.Run, own_run: Path) -> None:
    root = finished.folder.parent
    for name in (finished.folder, finished.folder.name, finished.manifest["id"][:6], finished.manifest["path"]):
        assert evalkit.load_run(name, root=root).folder == finished.folder
    assert [run.folder for run in evalkit.list_runs(root)] == [finished.folder]
    assert list(finished.scores.columns) == [*ScoreRow._fields, CLUSTER]
    assert list(dict.fromkeys(finished.scores["task"])) == list(finished.manifest["documents"])
    assert (finished.results().rule, finished.results("acc_norm").rule) == ("ppl", "acc_norm")
    with pytest.raises(UnknownNameError, match="'elsewhere'"):
        evalkit.load_run("elsewhere", root=root)
    (own_run / "results.json").unlink()
    begun = evalkit.load_run(own_run)
    assert not begun.complete
    with pytest.raises(RunError, match="is not finished"):
        evalkit.compare(begun, finished)


def test_runs_are_compared(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, f"org/model{seed}", 0.3 + 0.2 * seed, seed=seed) for seed in range(3)]
    first, second = evalkit.compare(*runs)
    assert (first.runs_a, second.runs_b) == ((str(runs[0].folder),), (str(runs[2].folder),))
    by_name = evalkit.compare(runs[0].manifest["id"], runs[1].folder, root=tmp_path, rule="acc")
    accuracies = [run.results("acc").average.value for run in runs[:2]]
    assert by_name.average.difference == pytest.approx(accuracies[1] - accuracies[0])
    grouped = evalkit.compare(groups={"few": runs[1:], "none": runs[:1]})
    assert (grouped.a, grouped.b, len(grouped.runs_a)) == ("few", "none", 2)
    with pytest.raises(UsageError, match="two sides are one run"):
        evalkit.compare(runs[0], runs[0])


def test_what_users_hold_is_shown_in_a_line(finished: evalkit.Run, checkpoint: Path, tmp_path: Path) -> None:
    results, loaded = finished.results(), model_spec(checkpoint).load(locate(str(checkpoint)), print)
    long = replace(finished, manifest=finished.manifest | {"model": f"a\n{'b' * 300}"}, folder=tmp_path / ("c" * 200))
    shown: list[Any] = [finished, long, results, *results.tasks, *results.averages, loaded, evalkit.harness(loaded)]
    for value in shown:
        assert repr(value).startswith(f"{type(value).__name__}(")
        assert len(repr(value)) < 120 and "\n" not in repr(value)


def test_versions_are_this_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever distribution named evalkit is installed: on the package index, the name is another project's."""
    metadata = tmp_path / "evalkit-0.2.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: evalkit\nVersion: 0.2.1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    checkpoint = Checkpoint("org/model", "hub", tmp_path)
    assert provenance(Request(ModelSpec("model")), checkpoint)["versions"]["evalkit"] == evalkit.__version__
