"""One definition of a setting: options, keywords, keys of study files and the reference page come from the requests."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

import evalkit
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import SuiteRequest
from evalkit.cli.parameters import Command
from evalkit.cli.root import cli
from evalkit.errors import UsageError
from evalkit.inputs.settings import setting, settings_of
from evalkit.longcontext.ruler.needle import NeedleRequest
from evalkit.models.loading.spec import ModelSpec
from evalkit.studies.study_file import read_study
from tests import generated


def test_settings_are_options_keywords_and_the_generated_files() -> None:
    """`python -m tests.generated` writes the files."""
    assert generated.KEYWORDS.read_text(encoding="utf-8") == generated.keywords()
    assert generated.REFERENCE.read_text(encoding="utf-8") == generated.reference()
    for name in ("run", "needle", "attention", "perplexity"):
        command = cli.commands[name]
        assert isinstance(command, Command)
        for definition in settings_of(ModelSpec, benchmark(str(command.kind)).request).values():
            options = [option for option in command.params if definition.flag in option.opts]
            assert len(options) == (definition.name not in command.without), definition.name
            assert all(isinstance(option, click.Option) and definition.help in str(option.help) for option in options)
    loading, shared = settings_of(ModelSpec), settings_of(SuiteRequest)
    evaluate, callback, harness = (
        inspect.signature(function).parameters
        for function in (evalkit.evaluate, evalkit.TrainerCallback, evalkit.harness)
    )
    keywords = {*shared, "settings", "progress", "name", "tokenizer"}
    assert evaluate.keys() == {*keywords, "model", *loading}
    assert callback.keys() == {*keywords, "trainer", "every", "at_end", "budget", "on_error", "attention"}
    assert harness.keys() > loading.keys()
    assert all(evaluate[name].default == definition.default for name, definition in {**loading, **shared}.items())


@dataclass(frozen=True)
class _WithDummy(NeedleRequest):
    dummy: int = setting(7, "A setting of a trial.", metavar="N", least=2)


def test_a_new_setting_is_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needle = cli.commands["needle"]
    assert needle.params  # kept from the first use on
    monkeypatch.delattr(needle, "params")
    monkeypatch.setattr(type(benchmark("needle")), "request", _WithDummy)
    shown = needle.get_help(click.Context(needle, info_name="needle"))
    assert "--dummy N" in shown and "A setting of a trial." in shown
    assert "| `--dummy` | whole number from 2 | `7` | A setting of a trial. |" in generated.reference()
    with pytest.raises(UsageError, match="--dummy is 1"):
        evalkit.evaluate("demo", suite="needle", settings={"dummy": 1})
    study = tmp_path / "study.yaml"
    study.write_text("checkpoints: {a: demo}\nbenchmarks: {needle: {dummy: 3}}\n", encoding="utf-8")
    assert read_study(study).benchmarks[0].options["dummy"] == 3
