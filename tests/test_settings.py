"""One definition of a setting: options, keywords, keys of study files and the reference page come from the requests."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import evalkit
from evalkit.benchmarks.needle import NeedleRequest
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import SuiteRequest
from evalkit.cli.parameters import Command
from evalkit.cli.root import cli
from evalkit.errors import UsageError
from evalkit.inputs.settings import setting, settings_of
from evalkit.models.loading.spec import ModelSpec
from evalkit.studies.study_file import read_study
from tests import generated


def commands(group: click.Group = cli) -> list[Command]:
    """Return the commands that run a benchmark."""
    members: list[Command] = []
    for command in group.commands.values():
        members += commands(command) if isinstance(command, click.Group) else []
        members += [command] if isinstance(command, Command) and command.kind else []
    return members


def test_the_generated_files_are_current() -> None:
    """`python -m tests.generated` writes them."""
    assert generated.KEYWORDS.read_text(encoding="utf-8") == generated.keywords()
    assert generated.REFERENCE.read_text(encoding="utf-8") == generated.reference()


def test_every_setting_is_an_option_with_its_help() -> None:
    assert {command.name for command in commands()} == {"run", "needle", "attention", "perplexity"}
    for command in commands():
        for definition in settings_of(ModelSpec, benchmark(str(command.kind)).request).values():
            assert definition.help.endswith((".", "…"))
            options = [option for option in command.params if definition.flag in option.opts]
            assert len(options) == (definition.name not in command.without), definition.name
            assert all(isinstance(option, click.Option) and definition.help in str(option.help) for option in options)


def test_keywords_are_the_settings() -> None:
    loading, shared = settings_of(ModelSpec), settings_of(SuiteRequest)
    evaluate, callback, harness = (
        inspect.signature(function).parameters
        for function in (evalkit.evaluate, evalkit.TrainerCallback, evalkit.harness)
    )
    own = {*shared, "settings", "progress", "name", "tokenizer"}
    assert evaluate.keys() == {*own, "model", *loading}
    assert callback.keys() == {*own, "trainer", "every", "at_end", "on_error", "attention"}
    assert harness.keys() > loading.keys()
    for name, definition in {**loading, **shared}.items():
        assert evaluate[name].default == definition.default
        assert f"{name}: " in str(evalkit.evaluate.__doc__)


@dataclass(frozen=True)
class _WithDummy(NeedleRequest):
    dummy: int = setting(7, "A setting of a trial.", metavar="N", least=2)


def test_a_new_setting_is_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(benchmark("needle")), "request", _WithDummy)
    needle = cli.commands["needle"]
    assert isinstance(needle, Command)
    monkeypatch.setattr(needle, "_params", None)
    shown = needle.get_help(click.Context(needle, info_name="needle"))
    assert "--dummy N" in shown and "A setting of a trial." in shown
    assert "| `--dummy` | whole number from 2 | `7` | A setting of a trial. |" in generated.reference()
    with pytest.raises(UsageError, match="--dummy is 1"):
        evalkit.evaluate("demo", suite="needle", settings={"dummy": 1})
    study = tmp_path / "study.yaml"
    study.write_text("checkpoints: {a: demo}\nbenchmarks: {needle: {dummy: 3}}\n", encoding="utf-8")
    assert read_study(study).benchmarks[0].options["dummy"] == 3
