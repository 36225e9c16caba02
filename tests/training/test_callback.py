"""`evalkit.TrainerCallback` in real trainings by transformers' Trainer."""

from __future__ import annotations

import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError, DataError, UnknownNameError, UsageError
from evalkit.models.loading.load import LoadedModel
from tests.marks import fast
from tests.printed import printed
from tests.tiny import tiny_checkpoint
from tests.training.trainers import equal, state_of, trainer_of

TASKS = ["piqa", "boolq"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("start") / "tiny", window=1024)


@pytest.fixture
def asked(documents: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of small evaluations."""
    return {"every": 2, "tasks": TASKS, "data_dir": documents, "allow_unofficial_data": True,
            "output": tmp_path / "runs"}  # fmt: skip


def names(output: Path) -> list[str]:
    return sorted(str(run.manifest["model"]) for run in evalkit.list_runs(output) if run.complete)


def logs_of(trainer: Any) -> dict[int, dict[str, float]]:
    """Step → what the callback has logged."""
    return {entry["step"]: {key: value for key, value in entry.items() if key.startswith("evalkit/")}
            for entry in trainer.state.log_history if any(key.startswith("evalkit/") for key in entry)}  # fmt: skip


class Disturbing(transformers.TrainerCallback):
    """Draws a random number at each step, as an evaluation without care does."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.rand(1)


MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16 weights": {"dtype": "bfloat16"},
    "mixed precision": {"bf16": True},
    "gradient accumulation": {"gradient_accumulation_steps": 3},
    "gradient checkpointing": {"checkpointing": {"use_reentrant": False}},
    "gradient checkpointing with reentry": {"checkpointing": {"use_reentrant": True}},
    "noise in embeddings": {"neftune_noise_alpha": 5.0},
}


@pytest.mark.parametrize("mode", fast(["float32", "mixed precision", "gradient accumulation"], MODES))
def test_a_training_ends_as_without_it(
    mode: str, folder: Path, asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trainer_of(folder, tmp_path / "plain", **MODES[mode])
    plain.train()
    expected = state_of(plain)
    assert [entry["step"] for entry in expected["logged"]] == [2, 4, 6]
    with_it = trainer_of(folder, tmp_path / "with", **MODES[mode])
    with_it.add_callback(evalkit.TrainerCallback(with_it, **asked))
    with_it.train()
    found = state_of(with_it)
    for what, value in expected.items():
        assert equal(found[what], value), what
    assert names(asked["output"]) == ["with step 2", "with step 4", "with step 6"]
    assert sorted(logs_of(with_it)) == [2, 4, 6]
    # Only noise is added by a hook that a fingerprint does not cover
    assert ("is a run of its own" in capsys.readouterr().err) == ("noise" in mode)


def test_the_comparison_could_fail(folder: Path, tmp_path: Path) -> None:
    """A single random number changes the weights."""
    plain, disturbed = (trainer_of(folder, tmp_path / name) for name in ("plain", "disturbed"))
    plain.train()
    disturbed = trainer_of(folder, tmp_path / "disturbed")
    disturbed.add_callback(Disturbing())
    disturbed.train()
    assert not equal(state_of(disturbed)["weights"], state_of(plain)["weights"])


def test_its_numbers_are_those_of_the_checkpoints(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path / "trained", save_strategy="steps", save_steps=2)
    trainer.add_callback(evalkit.TrainerCallback(trainer, **asked))
    trainer.train()
    del asked["every"]
    for step, logged in logs_of(trainer).items():
        saved = evalkit.evaluate(tmp_path / "trained" / f"checkpoint-{step}", progress=Progress(live=False), **asked)
        live = evalkit.load_run(f"trained step {step}", root=asked["output"])
        assert live.scores.equals(saved.scores)
        results = saved.results()
        assert logged == {
            **{f"evalkit/zeroshot8/{task.task}": task.accuracy for task in results.tasks},
            **{f"evalkit/zeroshot8/{average.name}": average.accuracy for average in results.averages},
            f"evalkit/zeroshot8/{results.average.name}_stderr": results.average.stderr,
        }


def test_all_tasks_have_an_average(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path / "trained", max_steps=2)
    trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | {"tasks": (), "limit": 2})))
    trainer.train()
    [logged] = logs_of(trainer).values()
    assert {"evalkit/zeroshot8/arc_easy", "evalkit/zeroshot8/Average", "evalkit/zeroshot8/Knowledge"} <= logged.keys()


def test_its_runs_are_a_curve(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    from evalkit.comparison.curves import curve, curve_report
    from evalkit.comparison.sides import find_trainings

    trainer = trainer_of(folder, tmp_path / "x", max_steps=12, run_name="run 7")
    trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | {"every": 5})))
    trainer.train()
    assert names(asked["output"]) == ["run 7 step 10", "run 7 step 12", "run 7 step 5"]
    given = [str(run.folder) for run in evalkit.list_runs(asked["output"])]
    [side] = find_trainings(given, (), asked["output"])
    found = curve(side)
    assert [point.step for point in found.average] == [5, 10, 12]
    logged = logs_of(trainer)
    assert [point.accuracy for point in found.tasks["piqa"]] == [
        logged[s]["evalkit/zeroshot8/piqa"] for s in (5, 10, 12)
    ]
    assert "12" in printed(curve_report([found]))


def test_a_resumed_training(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    """A training that is interrupted at step 4 and resumed ends as one without callback and interruption."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    plain = trainer_of(folder, tmp_path / "plain", **saving)
    plain.train()

    class Stopping(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            raise InterruptedError

    first = trainer_of(folder, tmp_path / "with", **saving)
    first.add_callback(evalkit.TrainerCallback(first, **asked))
    first.add_callback(Stopping())
    with pytest.raises(InterruptedError):
        first.train()
    stored = json.loads((tmp_path / "with" / "checkpoint-4" / "trainer_state.json").read_text())
    assert [entry["step"] for entry in stored["log_history"] if "evalkit/zeroshot8/piqa" in entry] == [2, 4]
    second = trainer_of(folder, tmp_path / "with", **saving)
    second.add_callback(evalkit.TrainerCallback(second, **asked))
    second.train(resume_from_checkpoint=True)
    expected = state_of(plain)
    for what, value in state_of(second).items():
        assert equal(value, expected[what]), what
    assert sorted(logs_of(second)) == [2, 4, 6]
    assert names(asked["output"]) == ["with step 2", "with step 4", "with step 6"]


def test_a_training_that_is_stopped_is_evaluated_at_its_end(
    folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    class Stopping(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    for at_end, expected in ((True, ["end step 3"]), (False, [])):
        trainer = trainer_of(folder, tmp_path / "x")
        output = asked["output"] / str(at_end)
        arguments = asked | {"every": 4, "at_end": at_end, "name": "end", "output": output}
        trainer.add_callback(evalkit.TrainerCallback(trainer, **arguments))
        trainer.add_callback(Stopping())
        trainer.train()
        assert names(output) == expected


def test_the_weights_of_another_step_do_not_get_its_name(
    folder: Path, asked: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end, the trainer may load its best model, whose weights are not those of the last step."""
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
              "load_best_model_at_end": True, "metric_for_best_model": "loss", "max_steps": 8}  # fmt: skip

    class Stopping(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 4

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            metrics["eval_loss"] = state.global_step  # the first is the best

    trainer = trainer_of(folder, tmp_path / "x", **saving)
    trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | {"every": 100})))
    trainer.add_callback(Stopping())
    trainer.train()
    assert trainer.state.best_global_step == 2
    live = evalkit.load_run("x step 4", root=asked["output"])
    del asked["every"]
    saved = evalkit.evaluate(tmp_path / "x" / "checkpoint-4", progress=Progress(live=False), **asked)
    assert live.scores.equals(saved.scores)
    assert "x step 2" not in names(asked["output"])
    assert not [one for one in caplog.records if one.name.startswith("evalkit")]


def test_a_best_model_in_place_of_the_last_step_is_named(
    folder: Path, asked: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Stopped by an evaluation after an epoch, the last step's weights are gone before a callback is called."""

    class Stopping(transformers.TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            metrics["eval_loss"] = state.global_step
            control.should_training_stop = state.global_step == 4

    trainer = trainer_of(folder, tmp_path / "x", save_strategy="epoch", eval_strategy="epoch", max_steps=20,
                         per_device_train_batch_size=32, load_best_model_at_end=True,
                         metric_for_best_model="loss")  # fmt: skip
    trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | {"every": 100})))
    trainer.add_callback(Stopping())
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (4, 2)
    assert names(asked["output"]) == []
    [warning] = [one for one in caplog.records if one.name.startswith("evalkit")]
    assert warning.getMessage().startswith("step 4, the last one, is not evaluated: the trainer has loaded ")


def test_a_failed_evaluation_does_not_end_the_training(
    folder: Path,
    asked: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = trainer_of(folder, tmp_path / "plain")
    plain.train()
    expected = state_of(plain)
    failing = [CheckpointError("no space"), ValueError("a defect"), None]
    whole = LoadedModel.of

    def of(*given: Any, **options: Any) -> Any:
        if error := failing.pop(0):
            raise error
        return whole(*given, **options)

    monkeypatch.setattr(LoadedModel, "of", of)
    trainer = trainer_of(folder, tmp_path / "with")
    trainer.add_callback(evalkit.TrainerCallback(trainer, **asked))
    with caplog.at_level(logging.WARNING):
        trainer.train()
    for what, value in state_of(trainer).items():
        assert equal(value, expected[what]), what
    assert names(asked["output"]) == ["with step 6"]
    assert sorted(logs_of(trainer)) == [6]
    first, second = caplog.records
    said = "the evaluation of step 2 failed and is left out; the training goes on: no space"
    assert (first.getMessage(), first.exc_info) == (said, None)
    assert second.getMessage().endswith("step 4 failed and is left out; the training goes on: ValueError: a defect")
    assert second.exc_info and second.exc_info[0] is ValueError

    failing[:] = [CheckpointError("no space")]
    stopped = trainer_of(folder, tmp_path / "stopped")
    stopped.add_callback(evalkit.TrainerCallback(stopped, on_error="raise", **asked))
    with pytest.raises(CheckpointError, match="no space"):
        stopped.train()
    assert stopped.state.global_step == 2


def test_an_interrupt_ends_the_training(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    class Stopping(Progress):
        def advance(self, work: float, documents: int) -> None:
            raise KeyboardInterrupt

    trainer = trainer_of(folder, tmp_path / "x")
    trainer.add_callback(evalkit.TrainerCallback(trainer, progress=Stopping(live=False), **asked))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 2


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"tasks": "piqq"}, UsageError, "piqq"),
        ({"data_dir": "nowhere"}, DataError, "nowhere"),
        ({"template": "nothing"}, UnknownNameError, "nothing"),
        ({"attention": "flash"}, UnknownNameError, "attention implementation 'flash'"),
    ],
)
def test_invalid_options_are_found_before_the_first_step(
    changed: dict[str, Any], error: type[Exception], said: str, folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    trainer = trainer_of(folder, tmp_path / "x")
    trainer.add_callback(evalkit.TrainerCallback(trainer, **(asked | changed)))
    with pytest.raises(error, match=said):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, "every is 2.5; it must be a whole number"),
        ({"every": None, "at_end": False}, "every and at_end: nothing is evaluated"),
        ({"at_end": 1}, "at_end is 1; it must be True or False"),
        ({"on_error": "ignore"}, "on_error is 'ignore'; it must be 'warn' or 'raise'"),
        ({"suite": "zeroshot9"}, "unknown suite 'zeroshot9': did you mean 'zeroshot8'"),
        ({"settings": {"limit": 5}}, "limit is an argument of evaluate"),
        ({"name": ""}, "name is empty"),
    ],
)
def test_invalid_arguments(
    changed: dict[str, Any], said: str, folder: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        evalkit.TrainerCallback(trainer_of(folder, tmp_path / "x"), **(asked | changed))


def test_a_trainer_without_a_tokenizer(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path / "x", max_steps=2)
    tokenizer, trainer.processing_class = trainer.processing_class, None
    with pytest.raises(UsageError, match="has no processing_class; pass tokenizer="):
        evalkit.TrainerCallback(trainer, **asked)
    trainer.add_callback(evalkit.TrainerCallback(trainer, tokenizer=tokenizer, **asked))
    trainer.train()
    assert names(asked["output"]) == ["x step 2"]


def test_sharded_models_are_rejected(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    trainer = trainer_of(folder, tmp_path / "x")
    trainer.is_fsdp_enabled = True
    with pytest.raises(UsageError, match=r"over processes \(FSDP\); evaluate its checkpoints .*--watch"):
        evalkit.TrainerCallback(trainer, **asked)


def test_its_arguments_are_those_of_evaluate() -> None:
    """All but those about reading a checkpoint's files, with the same defaults and types."""
    own, of_files = (
        {"trainer", "every", "at_end", "on_error", "name", "tokenizer"},
        {"model", "revision", "device", "device_map", "dtype"},
    )
    of_files |= {"context", "context_method", "context_original", "context_config", "allow_pickle", "trust_remote_code"}
    mine = inspect.signature(evalkit.TrainerCallback).parameters
    theirs = inspect.signature(evalkit.evaluate).parameters
    assert set(mine) - own == set(theirs) - of_files - {"name", "tokenizer"}
    for name in set(mine) - own:
        assert (mine[name].default, mine[name].annotation) == (theirs[name].default, theirs[name].annotation), name
    documentation = f"{evalkit.TrainerCallback.__doc__}\n{evalkit.TrainerCallback.__init__.__doc__}".splitlines()
    for name in mine:
        assert any(name in line.partition(":")[0] for line in documentation), name


@pytest.mark.slow
def test_what_it_logs_reaches_tensorboard(folder: Path, asked: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); import evalkit; from pathlib import Path\n"
        "from tests.training.trainers import trainer_of\n"
        "start, folder, documents = map(Path, sys.argv[1:])\n"
        "trainer = trainer_of(start, folder / 'x', report_to=['tensorboard'], logging_steps=3)\n"
        "trainer.add_callback(evalkit.TrainerCallback(trainer, every=2, tasks='piqa', data_dir=documents, "
        "allow_unofficial_data=True, output=folder / 'runs'))\n"
        "trainer.train()\n"
    )
    call = [sys.executable, "-c", script, str(folder), str(tmp_path), str(asked["data_dir"])]
    subprocess.run(
        call, check=True, capture_output=True, env={**_environment(), "TENSORBOARD_LOGGING_DIR": str(tmp_path / "log")}
    )
    found = _scalars(tmp_path / "log")
    assert [step for step, _ in found["train/evalkit/zeroshot8/piqa"]] == [2, 4, 6]
    assert [step for step, _ in found["train/loss"]] == [3, 6]
    for step, value in found["train/evalkit/zeroshot8/piqa"]:
        [task] = evalkit.load_run(f"x step {step}", root=tmp_path / "runs").results().tasks
        assert value == pytest.approx(task.accuracy)


def _environment() -> dict[str, str]:
    import os

    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read TensorBoard's event files: a record is length, checksum, content, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.*")):
        content, place = path.read_bytes(), 0
        while place < len(content):
            size = int.from_bytes(content[place : place + 8], "little")
            event = Event.FromString(content[place + 12 : place + 12 + size])
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            place += size + 16
    return found
