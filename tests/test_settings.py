"""One definition of a setting: options, keywords, keys of study files and the reference page come from the requests."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

import evalkit
from evalkit.benchmarks.needle.benchmark import NeedleRequest
from evalkit.benchmarks.registry import benchmark
from evalkit.benchmarks.request import SuiteRequest
from evalkit.cli.options import BenchmarkCommand
from evalkit.cli.root import cli
from evalkit.errors import UsageError
from evalkit.inputs.settings import setting, settings_of
from evalkit.models.loading.spec import ModelSpec
from evalkit.studies.study_file import read_study
from tests import generated


def commands(group: click.Group = cli) -> list[BenchmarkCommand]:
    """Return the commands that run a benchmark."""
    found: list[BenchmarkCommand] = []
    for command in group.commands.values():
        found += commands(command) if isinstance(command, click.Group) else []
        found += [command] if isinstance(command, BenchmarkCommand) else []
    return found


def test_the_generated_files_are_current() -> None:
    """`python -m tests.generated` writes them."""
    assert generated.KEYWORDS.read_text(encoding="utf-8") == generated.keywords()
    assert generated.REFERENCE.read_text(encoding="utf-8") == generated.reference()


def test_every_setting_is_an_option_with_its_help() -> None:
    assert {command.name for command in commands()} == {"run", "needle", "attention", "perplexity"}
    for command in commands():
        for one in settings_of(ModelSpec, benchmark(command.kind).request).values():
            options = [option for option in command.params if one.flag in option.opts]
            assert len(options) == (one.name not in command.without), one.name
            assert all(isinstance(option, click.Option) and one.help in str(option.help) for option in options)


def test_every_setting_is_explained() -> None:
    for kind in (ModelSpec, *(benchmark(name).request for name in ("multiple_choice", *generated.KINDS))):
        assert [one.name for one in settings_of(kind).values() if not one.help.endswith((".", "…"))] == []


def test_keywords_are_the_settings() -> None:
    shared = {*settings_of(SuiteRequest), "settings", "progress", "name", "tokenizer"}
    callback = inspect.signature(evalkit.TrainerCallback).parameters
    assert callback.keys() == {*shared, "trainer", "every", "at_end", "on_error", "attention"}
    assert inspect.signature(evalkit.evaluate).parameters.keys() == {*shared, "model", *settings_of(ModelSpec)}
    for one in settings_of(SuiteRequest, ModelSpec).values():
        assert f"{one.name}: " in str(evalkit.evaluate.__doc__)


@dataclass(frozen=True)
class _WithDummy(NeedleRequest):
    dummy: int = setting(7, "A setting of a trial.", metavar="N", least=2)


def test_a_new_setting_is_one_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(benchmark("needle")), "request", lambda _: _WithDummy)
    needle = cli.commands["needle"]
    assert isinstance(needle, BenchmarkCommand)
    monkeypatch.setattr(needle, "_params", None)
    shown = needle.get_help(click.Context(needle, info_name="needle"))
    assert "--dummy N" in shown
    assert "A setting of a trial.  [default: 7]" in " ".join(shown.split()).replace("trial. [", "trial.  [")
    assert "| `--dummy` | whole number from 2 | `7` | A setting of a trial. |" in generated.reference()
    with pytest.raises(UsageError, match="--dummy is 1; it must be at least 2"):
        evalkit.evaluate("demo", suite="needle", settings={"dummy": 1})
    study = tmp_path / "study.yaml"
    study.write_text("checkpoints: {a: demo}\nbenchmarks: {needle: {dummy: 3}}\n", encoding="utf-8")
    assert read_study(study).benchmarks[0].options["dummy"] == 3


def test_an_unknown_keyword_is_a_type_error() -> None:
    wrong: dict[str, Any] = {"suit": "needle"}
    for function in (evalkit.evaluate, evalkit.harness):
        with pytest.raises(TypeError, match="unexpected keyword argument 'suit'"):
            function("demo", **wrong)
