"""`evalkit.TrainerCallback` in real trainings by transformers' Trainer."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import evalkit
from evalkit.comparison.curves import curve
from evalkit.comparison.naming import find_run, find_runs
from evalkit.comparison.sides import trainings_of
from evalkit.display import Progress
from evalkit.errors import CheckpointError, UnknownNameError, UsageError
from evalkit.models.loading.load import LoadedModel
from evalkit.runs.folder import Run
from evalkit.studies.loop import logged_metrics
from tests.tiny import tiny_checkpoint
from tests.training.trainers import equal, state_of, trainer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


@pytest.fixture
def asked(documents: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of small evaluations."""
    return {"every": 2, "tasks": ["piqa", "boolq"], "data_dir": documents, "allow_unofficial_data": True,
            "output": tmp_path / "runs"}  # fmt: skip


class Calling(transformers.TrainerCallback):
    """Calls a function with the trainer's state and control at an event."""

    def __init__(self, event: str, function: Any) -> None:
        setattr(self, event, lambda args, state, control, **more: function(state, control, more.get("metrics")))


def train(
    folder: Path, output: Path, asked: dict[str, Any] | None, *others: Any, resume: bool = False, **more: Any
) -> Any:
    """Train with the callback, unless its arguments are None, and other ones after it."""
    trainer = trainer_of(folder, output, **more)
    if asked is not None:
        trainer.add_callback(evalkit.TrainerCallback(trainer, **asked))
    for other in others:
        trainer.add_callback(other)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same(trainer: Any, expected: dict[str, Any]) -> None:
    """Assert that a training has ended in a state, bit for bit."""
    state = state_of(trainer)
    for what, value in expected.items():
        assert equal(state[what], value), what


def names(output: Path) -> list[str]:
    return sorted(str(run.manifest["model"]) for run in evalkit.list_runs(output) if run.complete)


def logs_of(trainer: Any) -> dict[int, dict[str, float]]:
    """Step → what the callback has logged."""
    return {entry["step"]: {key: value for key, value in entry.items() if key.startswith("evalkit/")}
            for entry in trainer.state.log_history if any(key.startswith("evalkit/") for key in entry)}  # fmt: skip


def checkpoint_of(output: Path, step: int, asked: dict[str, Any]) -> Run:
    """Evaluate a saved checkpoint."""
    options = {name: value for name, value in asked.items() if name != "every"}
    return evalkit.evaluate(output / f"checkpoint-{step}", progress=Progress(live=False), **options)


def test_a_training_ends_as_without_it_and_its_numbers_are_those_of_the_checkpoints(
    folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    """Its runs are a curve. A single random number at each step changes the weights: the comparison could fail."""
    saving = {"save_strategy": "steps", "save_steps": 2, "run_name": "run 7"}
    plain = train(folder, tmp_path / "plain", None, **saving)
    expected = state_of(plain)
    assert [entry["step"] for entry in expected["logged"]] == [2, 4, 6]
    trainer = train(folder, tmp_path / "with", asked, **saving)
    same(trainer, expected)
    for step, logged in logs_of(trainer).items():
        live, saved = (
            evalkit.load_run(f"run 7 step {step}", root=asked["output"]),
            checkpoint_of(tmp_path / "with", step, asked | {"output": tmp_path / "saved"}),
        )
        assert live.scores.equals(saved.scores)
        # Of equal weights the run is opened, which has the checkpoint's path, too
        opened = checkpoint_of(tmp_path / "with", step, asked)
        assert opened.folder == live.folder and saved.manifest["id"] == live.manifest["id"]
        named = find_run(str(tmp_path / "with" / f"checkpoint-{step}"), asked["output"])
        assert named.folder == live.folder
        results = saved.results()
        assert logged == {
            **{f"evalkit/zeroshot8/{task.task}/accuracy": task.value for task in results.tasks},
            **{f"evalkit/zeroshot8/{average.name}/accuracy": average.value for average in results.averages},
            f"evalkit/zeroshot8/{results.average.name}/stderr": results.average.stderr,
        }
    given = [str(run.folder) for run in evalkit.list_runs(asked["output"]) if "run 7" in str(run.manifest["model"])]
    [side] = trainings_of(find_runs(given, asked["output"]), [])
    assert [(point.step, point.value) for point in curve(side).tasks["piqa"]] == [
        (step, logs_of(trainer)[step]["evalkit/zeroshot8/piqa/accuracy"]) for step in (2, 4, 6)
    ]
    drawing = train(folder, tmp_path / "drawing", None, Calling("on_step_end", lambda *_: torch.rand(1) and None))
    assert not equal(state_of(drawing)["weights"], expected["weights"])


MODES: dict[str, dict[str, Any]] = {
    "bf16 weights": {"dtype": "bfloat16"},
    "mixed precision": {"bf16": True},
    "gradient accumulation": {"gradient_accumulation_steps": 3},
    "gradient checkpointing": {"checkpointing": {"use_reentrant": False}},
    "gradient checkpointing with reentry": {"checkpointing": {"use_reentrant": True}},
    "noise in embeddings": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.training
@pytest.mark.parametrize("mode", MODES)
def test_other_kinds_of_training_end_as_without_it(
    mode: str, folder: Path, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train(folder, tmp_path / "plain", None, **MODES[mode])
    trainer = train(folder, tmp_path / "with", asked, **MODES[mode])
    same(trainer, state_of(plain))
    assert names(asked["output"]) == ["with step 2", "with step 4", "with step 6"]
    # Only noise is added by a hook that a fingerprint does not cover
    assert ("is a run of its own" in capsys.readouterr().err) == ("noise" in mode)


@pytest.mark.training
def test_a_resumed_training(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    """A training that is interrupted at step 4 and resumed ends as one without callback and interruption."""

    def interrupt(*_: Any) -> None:
        raise InterruptedError

    saving = {"save_strategy": "steps", "save_steps": 4}
    plain = train(folder, tmp_path / "plain", None, **saving)
    with pytest.raises(InterruptedError):
        train(folder, tmp_path / "with", asked, Calling("on_save", interrupt), **saving)
    stored = json.loads((tmp_path / "with" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in stored["log_history"] if "evalkit/zeroshot8/piqa/accuracy" in entry] == [2, 4]
    second = train(folder, tmp_path / "with", asked, resume=True, **saving)
    same(second, state_of(plain))
    assert sorted(logs_of(second)) == [2, 4, 6]
    assert names(asked["output"]) == ["with step 2", "with step 4", "with step 6"]


def test_a_training_that_is_stopped_is_evaluated_at_its_end(
    folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    def stop(state: Any, control: Any, _: Any) -> None:
        control.should_training_stop = state.global_step == 3

    trainer = train(folder, tmp_path / "x", asked | {"every": 4, "name": "end"}, Calling("on_step_end", stop))
    assert names(asked["output"]) == ["end step 3"] and sorted(logs_of(trainer)) == [3]


@pytest.mark.training
@pytest.mark.parametrize("when", ["saved", "evaluated"])
def test_the_weights_of_another_step_do_not_get_its_name(
    when: str, folder: Path, asked: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end, the trainer may load its best model, whose weights are not those of the last step.

    Stopped by an evaluation after an epoch, the last step's weights are gone before a callback is called.
    """

    def evaluated(state: Any, control: Any, metrics: Any) -> None:
        metrics["eval_loss"] = state.global_step  # the first is the best
        if when == "evaluated":
            control.should_training_stop = state.global_step == 4

    def saved(state: Any, control: Any, _: Any) -> None:
        control.should_training_stop = state.global_step == 4

    often: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    epochs = {"save_strategy": "epoch", "eval_strategy": "epoch", "per_device_train_batch_size": 32}
    others = [Calling("on_evaluate", evaluated), *([Calling("on_save", saved)] if when == "saved" else [])]
    trainer = train(folder, tmp_path / "x", asked | {"every": 100}, *others, load_best_model_at_end=True, max_steps=20,
                    metric_for_best_model="loss", **(often if when == "saved" else epochs))  # fmt: skip
    assert (trainer.state.global_step, trainer.state.best_global_step) == (4, 2)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("evalkit")]
    if when == "saved":
        live = evalkit.load_run("x step 4", root=asked["output"])
        assert live.scores.equals(checkpoint_of(tmp_path / "x", 4, asked | {"output": tmp_path / "saved"}).scores)
        assert "x step 2" not in names(asked["output"]) and not warnings
    else:
        assert names(asked["output"]) == []
        assert "step 4" in warnings[0]


def test_a_failed_evaluation(
    folder: Path,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is left out, and the training goes on, unless it is to end; an interrupt ends it."""
    failing: list[BaseException | None] = [CheckpointError("no space"), ValueError("a defect"), None]
    whole = LoadedModel.of

    def of(*given: Any, **options: Any) -> Any:
        if error := failing.pop(0):
            raise error
        return whole(*given, **options)

    monkeypatch.setattr(LoadedModel, "of", of)
    with caplog.at_level(logging.WARNING):
        trainer = train(folder, tmp_path / "with", asked)
    assert trainer.state.global_step == 6
    assert names(asked["output"]) == ["with step 6"] and sorted(logs_of(trainer)) == [6]
    first, second = caplog.records
    assert "step 2" in first.getMessage() and first.getMessage().endswith("no space") and not first.exc_info
    assert "a defect" in second.getMessage() and second.exc_info and second.exc_info[0] is ValueError
    for error in (CheckpointError("no space"), KeyboardInterrupt()):
        failing[:] = [error]
        stopped = trainer_of(folder, tmp_path / "stopped")
        on_error = "raise" if isinstance(error, CheckpointError) else "warn"
        stopped.add_callback(evalkit.TrainerCallback(stopped, on_error=on_error, **asked))
        with pytest.raises(type(error)):
            stopped.train()
        assert stopped.state.global_step == 2


INVALID: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"tasks": "piqq"}, UsageError, "piqq"),
    ({"attention": "flash"}, UsageError, "'flash'"),
    ({"every": 0}, UsageError, "every is 0"),
    ({"every": None, "at_end": False}, UsageError, "every and at_end"),
    ({"on_error": "ignore"}, UsageError, "on_error is 'ignore'"),
    ({"settings": {"limit": 5}}, UsageError, "limit"),
]


def test_what_is_invalid_is_found_before_the_first_step(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    """Without a tokenizer one is to be given."""
    for changed, error, noun in INVALID:
        trainer = trainer_of(folder, tmp_path / "x")
        with pytest.raises(error, match=noun):
            trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | changed)))
            trainer.train()
        assert trainer.state.global_step == 0
    tokenizer, trainer.processing_class = trainer.processing_class, None
    with pytest.raises(UsageError, match="tokenizer="):
        evalkit.TrainerCallback(trainer, **asked)
    evalkit.TrainerCallback(trainer, tokenizer=tokenizer, **asked)


def test_its_arguments_are_those_of_evaluate() -> None:
    """All but those about reading a checkpoint's files, with the same defaults and types."""
    own = {"trainer", "every", "at_end", "budget", "on_error", "name", "tokenizer"}
    of_files = {"model", "revision", "device", "device_map", "dtype", "quantise", "context", "context_method",
                "context_original", "context_config", "allow_pickle", "trust_remote_code"}  # fmt: skip
    mine = inspect.signature(evalkit.TrainerCallback).parameters
    theirs = inspect.signature(evalkit.evaluate).parameters
    assert set(mine) - own == set(theirs) - of_files - {"name", "tokenizer"}
    for name in set(mine) - own:
        assert (mine[name].default, mine[name].annotation) == (theirs[name].default, theirs[name].annotation), name


def test_metrics_are_those_of_the_rule(finished: Run) -> None:
    """That was asked for, whatever rule the run was started under."""
    own = str(finished.manifest["rule"])
    logged = {rule: logged_metrics(finished, rule) for rule in (own, "acc_norm")}
    for rule, metrics in logged.items():
        results = finished.results(rule)
        expected = {f"{task.task}/accuracy": task.value for task in results.tasks}
        expected |= {"Average/accuracy": results.average.value, "Average/stderr": results.average.stderr}
        for name, value in expected.items():
            if value is None:  # a task's documents are all right, or none is
                assert f"evalkit/{finished.suite}/{name}" not in metrics
                continue
            assert metrics[f"evalkit/{finished.suite}/{name}"] == pytest.approx(value)
    assert logged[own] != logged["acc_norm"]
    with pytest.raises(UnknownNameError, match="'nix'"):
        logged_metrics(finished, "nix")
