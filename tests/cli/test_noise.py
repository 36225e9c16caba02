"""`evalkit noise` and `compare --last` on studies whose runs are made up: what they read, compute, refuse and print."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from evalkit.runs.folder import load_run
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from tests.cli.conftest import Command, complains
from tests.comparison.made import make_run, scores_of
from tests.studies.made import write_study
from tests.test_api import heavy_after
from tests.tiny import tiny_checkpoint

N = {"arc_easy": 80, "boolq": 40}
PASSAGES = [number - number % 2 for number in range(N["boolq"])]
STEPS = (10, 20, 30, 40)
MODELS = {"small-a": 0.45, "small-b": 0.5, "big-a": 0.6, "big-b": 0.7}
Answers = dict[tuple[str, int, int], dict[str, np.ndarray[Any, Any]]]


def made_study(folder: Path, seeds: Sequence[int] = (1, 2, 3), steps: Sequence[int] = STEPS) -> tuple[Path, Answers]:
    """A study whose runs are random answers, and these by model, seed and step."""
    checkpoints = {
        model: {"model": [f"train/{model}-{seed}" for seed in seeds], "steps": [f"checkpoint-{step}" for step in steps]}
        for model in MODELS
    }
    zs = {"suite": "zeroshot8", "tasks": list(N), "rule": "acc"}
    path, answers = write_study(folder / "study.yaml", checkpoints, {"zs": zs}), Answers()
    study = read_study(path)
    for run in study.runs:
        name, seed, step = run.checkpoint.name, run.checkpoint.seed or 1, run.checkpoint.step or 0
        dice = np.random.default_rng([len(name), ord(name[-1]), seed, step])
        right = {task: (dice.random(n) < MODELS[name] + step / 400).astype(int) for task, n in N.items()}
        tables = {
            "arc_easy": scores_of("arc_easy", right["arc_easy"]),
            "boolq": scores_of("boolq", right["boolq"], clusters=PASSAGES),
        }
        model = f"train/{name}-{seed}/checkpoint-{step}"
        made = make_run(study.output / f"{name}-{seed}", tables, model=model, name=run.label)
        moved = made.rename(study.output / f"{name}-{seed}-{step}")
        save_record(study.output, run, moved, load_run(moved).manifest["id"])
        answers[name, seed, step] = right
    return path, answers


@pytest.fixture
def noise(tmp_path: Path, evalkit: Command) -> Callable[..., dict[str, Any]]:
    """Run `evalkit noise --format json` and return its lines by (outcome, task), and the rest."""

    def run(*arguments: object) -> dict[str, Any]:
        outcome = evalkit("noise", *arguments, "--format", "json")
        assert outcome.code == 0, outcome.err
        content: dict[str, Any] = json.loads(outcome.out)
        return content | {"lines": {(line["outcome"], line["task"]): line for line in content["lines"]}}

    return run


@pytest.mark.slow
def test_components_of_right_and_wrong_answers(tmp_path: Path, noise: Callable[..., dict[str, Any]]) -> None:
    """Of arc_easy, whose documents are independent, each component by its definition with numpy."""
    path, answers = made_study(tmp_path)
    line = noise(path, "small-a", "small-b", "--last", 3)["lines"]["acc", "arc_easy"]
    right = np.stack([[[answers[model, seed, step]["arc_easy"] for step in STEPS[1:]] for seed in (1, 2, 3)]
                      for model in ("small-a", "small-b")]).astype(float)  # fmt: skip
    n = N["arc_easy"]

    def error(values: Any) -> float:
        return float(np.var(values, ddof=1)) / n

    residuals = right - right.mean(axis=2, keepdims=True)
    interaction = sum(map(error, residuals.reshape(-1, n))) / (6 * 2)
    within = right.mean(axis=3).var(axis=2, ddof=1).mean() - interaction
    means = right.mean(axis=2)
    by_seed = sum(map(error, (means - means.mean(axis=1, keepdims=True)).reshape(-1, n))) / (2 * 2)
    between = means.mean(axis=2).var(axis=1, ddof=1).mean() - by_seed - within / 3
    models = means.mean(axis=1)
    expected = {
        "checkpoints": max(0.0, within),
        "seeds": max(0.0, between),
        "documents": (error(models[0]) + error(models[1])) / 2,
        "paired": error(models[1] - models[0]) / 2,
    }
    assert {name: line[name] ** 2 for name in expected} == pytest.approx(expected)
    windows, largest = right.mean(axis=3).reshape(6, 3), abs(np.diff(models.mean(axis=1))[0])
    noise_of_training = np.sqrt((windows.var(axis=1, ddof=1) / windows.mean(axis=1) ** 2).mean())
    assert line["signal_to_noise"] == pytest.approx(largest / models.mean() / noise_of_training)
    # Half the variance of a difference, of two models of one seed at one step
    apart = np.diff(right.mean(axis=3), axis=0)[0]
    whole = apart.mean(axis=1).var(ddof=1) / 2 + apart.var(axis=1, ddof=1).mean() / 2 * (1 - 1 / 3)
    assert line["signal_to_seeds"] == pytest.approx(largest / math.sqrt(whole))


def test_what_is_printed(tmp_path: Path, evalkit: Command, noise: Callable[..., dict[str, Any]]) -> None:
    """A line for each outcome and task; advice, seeds, autocorrelation; the same numbers in every format; a figure."""
    path, _ = made_study(tmp_path)
    content = noise(path, "small-a", "small-b", "--last", 3)
    outcomes = ["acc", "bits_per_byte", "log_loss", "brier", "margin:acc"]
    assert [*content["lines"]] == [(outcome, task) for outcome in outcomes for task in (*N, "Average")]
    assert content["lines"]["acc", "Average"]["n"] == sum(N.values())
    advice, seeds, autocorrelation = content["advice"]
    assert "accuracy (acc)" in advice and "2 models" in advice
    assert "seeds" in seeds and "independent checkpoints" in autocorrelation
    chosen = (path, "small-a", "small-b", "--last", 3, "--outcome", "brier")
    csv, latex = (evalkit("noise", *chosen, "--format", form).out for form in ("csv", "latex"))
    assert csv.splitlines()[0].startswith("outcome,task,n,score,checkpoints,checkpoints_low")
    assert len(csv.splitlines()) == 1 + len(N) + 1
    assert latex.count(r"\begin{tabular}") == 2 and "ARC-Easy" in latex and "BoolQ" in latex
    moved = (tmp_path / "runs").rename(tmp_path / "moved")
    drawn = evalkit("noise", *chosen, "--plot", tmp_path / "noise.svg", "--in", moved)
    assert drawn.code == 0 and "signal / seeds" in (tmp_path / "noise.svg").read_text()


@pytest.mark.slow
def test_decisions_hold_at_the_larger_size(tmp_path: Path, noise: Callable[..., dict[str, Any]]) -> None:
    """Both sizes order a below b, by means over their last checkpoints; and not if counterparts are exchanged."""
    path, answers = made_study(tmp_path)
    for sizes, share in (
        ({"small-a": "big-a", "small-b": "big-b"}, 1.0),
        ({"small-a": "big-b", "small-b": "big-a"}, 0.0),
    ):
        options = [part for pair in sizes.items() for part in ("--larger", "=".join(pair))]
        content = noise(path, "--last", 2, "--outcome", "accuracy", *options)
        assert {outcome for outcome, _ in content["lines"]} == {"acc"}
        assert content["models"] == ["small-a", "small-b"] and content["lines"]["acc", "arc_easy"]["larger"] == share
    at_end = {model: np.mean([answers[model, seed, 40]["boolq"].mean() for seed in (1, 2, 3)]) for model in MODELS}
    line = noise(path, "small-a", "big-a", "big-b", "--last", 2)["lines"]["acc", "boolq"]
    for step, share in zip(STEPS, line["by_step"], strict=True):
        means = {model: np.mean([answers[model, seed, step]["boolq"].mean() for seed in (1, 2, 3)]) for model in MODELS}
        pairs = [("small-a", "big-a"), ("small-a", "big-b"), ("big-a", "big-b")]
        orders = [np.sign(means[a] - means[b]) * np.sign(at_end[a] - at_end[b]) for a, b in pairs]
        assert share == pytest.approx((1 + np.mean(orders)) / 2)
    assert line["decided"] == pytest.approx(line["by_step"][-2]) and line["larger"] is None


def test_one_seed_says_nothing_about_seeds(tmp_path: Path, evalkit: Command) -> None:
    path, _ = made_study(tmp_path, seeds=(1,))
    outcome = evalkit("noise", path, "small-a", "small-b", "--last", 4, "--outcome", "accuracy")
    assert outcome.code == 0 and "between seeds" not in outcome.out and "needs seeds" in outcome.out


@pytest.mark.slow
def test_seeds_and_steps_that_a_model_lacks_are_left_out(
    tmp_path: Path, evalkit: Command, noise: Callable[..., dict[str, Any]]
) -> None:
    path, answers = made_study(tmp_path, seeds=(1, 2, 3))
    content = yaml.safe_load(path.read_text())
    content["checkpoints"]["small-a"]["model"] = ["train/small-a-1", "train/small-a-2"]
    content["checkpoints"]["small-b"]["steps"] = ["checkpoint-20", "checkpoint-30"]
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    given = noise(path, "small-a", "small-b", "--last", 2, "--outcome", "accuracy")
    assert (given["seeds"], given["steps"]) == ([1, 2], [20, 30])
    assert any("left out: 6 runs" in note for note in given["notes"])
    used = [answers[model, seed, step]["boolq"].mean() for model in MODELS if model.startswith("small")
            for seed in (1, 2) for step in (20, 30)]  # fmt: skip
    assert given["lines"]["acc", "boolq"]["score"] == pytest.approx(np.mean(used))


def test_what_noise_needs(tmp_path: Path, evalkit: Command) -> None:
    path, _ = made_study(tmp_path, seeds=(1, 2))
    complains(evalkit("noise", path, "--last", 5), 2, "--last 5", "4")
    complains(evalkit("noise", path, "small-a", "--last", 2), 2, "models")
    complains(evalkit("noise", path, "--last", 2, "--larger", "small-a"), 2, "--larger")
    complains(evalkit("noise", path, "--last", 2, "--larger", "small-a=huge"), 2, "huge")
    complains(evalkit("noise", path, "--last", 2, "--outcome", "f1"), 2, "f1")


@pytest.mark.slow
def test_noise_needs_no_torch(tmp_path: Path) -> None:
    path, _ = made_study(tmp_path, seeds=(1, 2))
    command = f"cli.main(['noise', {str(path)!r}, '--last', '2'], standalone_mode=False)"
    assert heavy_after(f"from evalkit.cli.root import cli\n{command}") <= {"pandas"}


@pytest.mark.slow
def test_means_over_the_last_checkpoints_are_sides(tmp_path: Path, evalkit: Command) -> None:
    """Differences are of means over checkpoints; errors are over documents of these, or between seeds' means."""
    path, answers = made_study(tmp_path)
    names = ("small-a", "small-b")
    content = json.loads(evalkit("compare", "--study", path, "small-a", "small-b", "--last", 3, "--format", "json").out)
    [compared] = content["comparisons"]
    a, b = (np.array([[answers[model, seed, step]["arc_easy"] for step in STEPS[1:]] for seed in (1, 2, 3)])
            for model in names)  # fmt: skip
    [line] = [task for task in compared["tasks"] if task["name"] == "arc_easy"]
    assert line["difference"] == pytest.approx(b.mean() - a.mean())
    assert line["spread"]["seeds_a"] == pytest.approx(a.mean(axis=(1, 2)).var(ddof=1) / 3)
    assert compared["claim"]["kind"] == "architectures" and "last 3 checkpoints" in compared["claim"]["sentence"]
    groups = [
        f"{name}={','.join(str(tmp_path / f'runs/{name}-1-{step}') for step in STEPS)}"
        for name in ("small-a", "small-b")
    ]
    given = ("compare", "--group", groups[0], "--group", groups[1], "--last", 3)
    [compared] = json.loads(evalkit(*given, "--format", "json").out)["comparisons"]
    [line] = [task for task in compared["tasks"] if task["name"] == "arc_easy"]
    differences = b[0].mean(axis=0) - a[0].mean(axis=0)
    assert line["difference"] == pytest.approx(differences.mean()) and line["spread"] is None
    assert line["stderr"] == pytest.approx(differences.std(ddof=1) / math.sqrt(len(differences)))
    claim = compared["claim"]["sentence"]
    assert all(word in claim for word in ("these 3 checkpoints", "documents", "needs seeds", "independent checkpoints"))
    complains(evalkit(*given[:-1], 5), 2, "small-a", "--last 5", "10, 20, 30, 40")
    complains(
        evalkit("compare", "--study", path, "small-a@20", "small-b", "--last", 3), 2, "small-a@20", "2", "--last 3"
    )
    complains(evalkit("compare", "--curve", "--study", path, "small-a", "--last", 3), 2, "--curve", "--last")


def test_a_moving_average_follows_the_steps(tmp_path: Path, evalkit: Command) -> None:
    """A pattern is sorted by number; other orders are refused, since the last checkpoint has the largest share."""
    for seed, step in enumerate((80, 100, 90)):
        tiny_checkpoint(tmp_path / f"checkpoint-{step}", seed=seed)
    complains(evalkit("models", "average", "checkpoint-80", "checkpoint-100", "checkpoint-90", "--ema", 0.5, "-o", "a"),
              2, "80, 100, 90")  # fmt: skip
    complains(evalkit("models", "average", "checkpoint-*", "--ema", 1, "-o", "a"), 2, "--ema 1")
    made = evalkit("models", "average", "checkpoint-*", "--ema", 0.5, "-o", "a")
    assert made.code == 0 and "3 checkpoints" in made.out
    norms = [
        load_file(tmp_path / f"checkpoint-{step}/model.safetensors")["model.embed_tokens.weight"]
        for step in (80, 90, 100)
    ]
    averaged = load_file(tmp_path / "a/model.safetensors")["model.embed_tokens.weight"]
    assert np.allclose(averaged, 0.25 * norms[0] + 0.25 * norms[1] + 0.5 * norms[2], atol=1e-7)
