"""The public API of `import evalkit`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import MISSING, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import evalkit
from evalkit.benchmarks.request import SuiteRequest
from evalkit.display import Progress
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import ModelSpec, model_spec
from evalkit.runs.score_table import CLUSTER, ScoreRow
from tests.tiny import tiny_checkpoint

HEAVY = ("torch", "transformers", "pandas", "lm_eval", "datasets")


def heavy_after(statement: str) -> set[str]:
    """Return the heavy libraries that a new Python process has imported after a statement."""
    script = f"{statement}\nimport sys\nprint(*(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_everything_public_can_be_had_and_is_all() -> None:
    assert sorted(evalkit.__all__) == evalkit.__all__
    for name in evalkit.__all__:
        assert getattr(evalkit, name).__name__ == name
    errors = {name for name in evalkit.__all__ if getattr(evalkit, name).__module__ == "evalkit.errors"}
    assert set(evalkit.__all__) - errors == set(evalkit._MODULES)
    assert dir(evalkit) == sorted([*evalkit.__all__, "__version__"])


def test_submodules_hide_no_public_name() -> None:
    import evalkit.comparison.comparison_report
    import evalkit.runs.finding

    for name in evalkit.__all__:
        assert not inspect.ismodule(getattr(evalkit, name))
        assert not (Path(evalkit.__path__[0]) / name).exists()


def defaults(function: Any) -> dict[str, Any]:
    """Return the default of each keyword argument."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}


def fields(*kinds: Any) -> dict[str, Any]:
    """Field → its default, of requests and of how models are loaded."""
    found = {field.name: field.default for kind in kinds for field in dataclass_fields(kind)}
    return {name: default for name, default in found.items() if default is not MISSING}


def test_evaluate_has_an_argument_for_each_shared_setting() -> None:
    own = {"settings": None, "name": None, "progress": None}
    assert defaults(evalkit.evaluate) == fields(ModelSpec, SuiteRequest) | own


def test_a_harness_is_loaded_as_any_model() -> None:
    own = {"token_budget", "add_bos_token", "batch_size", "say"}
    found = defaults(evalkit.harness)
    assert {name: value for name, value in found.items() if name not in own} == fields(ModelSpec)
    assert own < set(found)


def test_every_argument_is_explained() -> None:
    for function in (evalkit.evaluate, evalkit.harness, evalkit.compare, evalkit.load_run):
        for name in inspect.signature(function).parameters:
            assert any(name in line.partition(":")[0] for line in str(function.__doc__).splitlines()), name


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"settings": {"limit": 5}}, UsageError, "settings: limit is an argument of evaluate; pass limit="),
        ({"settings": {"lengths": [5]}}, UsageError, "lengths: suite zeroshot8 has no settings of its own"),
        (
            {"suite": "needle", "settings": {"length": [5]}},
            UnknownNameError,
            "unknown setting of suite needle 'length': did you mean 'lengths'",
        ),
        (
            {"suite": "needle", "template": "plain"},
            UsageError,
            "template: suite needle has no such argument; its settings",
        ),
        ({"suite": "needles"}, UnknownNameError, "unknown suite 'needles': did you mean 'needle'"),
    ],
)
def test_settings_stand_where_they_belong(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        evalkit.evaluate("nowhere/at-all", **options)
    with pytest.raises(TypeError, match="lenghts"):
        evalkit.evaluate("nowhere/at-all", lenghts=[5])  # type: ignore[call-arg]


def test_every_error_is_public() -> None:
    from evalkit import errors

    raised = {name for name, thing in vars(errors).items() if isinstance(thing, type) and issubclass(thing, Exception)}
    assert raised <= set(evalkit.__all__)
    assert all(issubclass(getattr(errors, name), evalkit.EvalkitError) for name in raised)


def test_an_unknown_attribute_is_named() -> None:
    with pytest.raises(AttributeError, match="'evalkit' has no attribute 'evaluat'"):
        _ = evalkit.evaluat


def test_importing_loads_nothing_heavy() -> None:
    assert heavy_after("import evalkit") == set()
    assert heavy_after("import evalkit.cli") == set()


def test_results_are_read_without_a_model(finished: evalkit.Run) -> None:
    read = f"import evalkit\nrun = evalkit.load_run({str(finished.folder)!r})\nrun.results('acc_norm'), run.scores"
    assert heavy_after(read) == {"pandas"}


def test_a_finished_run_is_evaluated_without_a_model(finished: evalkit.Run, checkpoint: Path, documents: Path) -> None:
    again = (
        f"import evalkit\nevalkit.evaluate({str(checkpoint)!r}, data_dir={str(documents)!r}, "
        f"allow_unofficial_data=True, output={str(finished.folder.parent)!r})"
    )
    assert heavy_after(again) == set()


def test_scores_are_a_data_frame(finished: evalkit.Run) -> None:
    scores = finished.scores
    assert isinstance(scores, pd.DataFrame)
    assert list(scores.columns) == [*ScoreRow._fields, CLUSTER]
    for column, dtype in scores.dtypes.items():
        if str(column).startswith("ll_"):
            assert dtype == "float64"
        elif column in ("task", "subtask"):
            assert pd.api.types.is_string_dtype(dtype)
        else:
            assert dtype == "int64"
    assert list(dict.fromkeys(scores["task"])) == list(finished.manifest["documents"])


def test_results_know_their_rule(finished: evalkit.Run) -> None:
    assert finished.results().rule == "ppl"
    assert finished.results().average.name == "Average"
    assert finished.results("acc_norm").rule == "acc_norm"
    assert [run.folder for run in evalkit.list_runs(finished.folder.parent)] == [finished.folder]


def test_a_run_is_opened_by_any_of_its_names(finished: evalkit.Run, own_run: Path) -> None:
    root = finished.folder.parent
    for name in (finished.folder, finished.folder.name, finished.manifest["id"][:6], finished.manifest["path"]):
        assert evalkit.load_run(name, root=root).folder == finished.folder
    with pytest.raises(UnknownNameError, match="unknown run 'elsewhere'"):
        evalkit.load_run("elsewhere", root=root)
    (own_run / "results.json").unlink()
    begun = evalkit.load_run(own_run)
    assert not begun.complete
    assert "not finished" in repr(begun)
    with pytest.raises(RunError, match="is not finished"):
        evalkit.compare(begun, finished)


def test_runs_are_compared(documents: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"data_dir": documents, "allow_unofficial_data": True, "progress": Progress(live=False)}
    runs = [
        evalkit.evaluate(tiny_checkpoint(tmp_path / str(seed), seed=seed), output=tmp_path, tasks="piqa", **common)
        for seed in range(3)
    ]
    first, second = evalkit.compare(*runs)
    assert (first.runs_a, first.runs_b) == ((str(runs[0].folder),), (str(runs[1].folder),))
    assert second.runs_b == (str(runs[2].folder),)
    assert first.rule == "ppl"
    by_name = evalkit.compare(runs[0].manifest["id"], runs[1].folder, root=tmp_path, rule="acc")
    assert [one.rule for one in by_name] == ["acc"]
    accuracies = [run.results("acc").average.accuracy for run in runs[:2]]
    assert by_name[0].average.difference == pytest.approx(accuracies[1] - accuracies[0])
    [grouped] = evalkit.compare(groups={"few": runs[1:], "none": runs[:1]})
    assert (grouped.a, grouped.b, len(grouped.runs_a)) == ("few", "none", 2)
    with pytest.raises(UsageError, match="is named twice"):
        evalkit.compare(runs[0], runs[0])
    with pytest.raises(UsageError, match="group few has no runs"):
        evalkit.compare(runs[0], groups={"few": []})


def test_what_users_hold_is_shown_in_a_line(finished: evalkit.Run, checkpoint: Path, tmp_path: Path) -> None:
    results, loaded = finished.results(), model_spec(checkpoint).load(locate(str(checkpoint)), print)
    long = replace(finished, manifest=finished.manifest | {"model": f"a\n{'b' * 300}"}, folder=tmp_path / ("c" * 200))
    shown: list[Any] = [finished, long, results, *results.tasks, *results.averages, loaded, evalkit.harness(loaded)]
    for one in shown:
        assert repr(one).startswith(f"{type(one).__name__}(")
        assert len(repr(one)) < 120
        assert "\n" not in repr(one)
        assert repr(one).endswith(")")
    assert repr(finished).startswith(f"Run(zeroshot8, {finished.manifest['model']}"[:30])
    assert "8 tasks, finished" in repr(finished)
    assert repr(results.tasks[0]).startswith("TaskResult(winogrande, ")
    assert repr(loaded) == "LoadedModel(tiny, LlamaForCausalLM, 139.6K parameters, float32 on cpu)"
