"""Evaluation: a model, a suite and settings → a finished run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from evalkit.benchmarks.base import Benchmark, Plan
from evalkit.benchmarks.keywords import EvaluateSettings
from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.benchmarks.request import Request, SuiteRequest, request_of
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress, Say
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs import values
from evalkit.inputs.settings import given_settings, settings_of, with_settings
from evalkit.models.loading.spec import ModelSpec
from evalkit.runs.folder import Run
from evalkit.suites.suites import DEFAULT_SUITE

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedTokenizerBase


@with_settings(EvaluateSettings, SuiteRequest, ModelSpec)
def evaluate(
    model: str | Path | Module,
    *,
    settings: Mapping[str, Any] | None = None,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    progress: Progress | None = None,
    **shared: Unpack[EvaluateSettings],
) -> Run:
    """Evaluate a checkpoint or a model in memory; resume an interrupted run, and open a finished one.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo"; or a `transformers.PreTrainedModel`, which is
            evaluated in place and left unchanged.
        settings: further settings of the suite's benchmark, such as {"lengths": [1000, 2000]} for suite needle; on the
            command line --set KEY=VALUE.
        tokenizer: folder or hub name of another tokenizer; for a model in memory its tokenizer, which is not
            changed.
        progress: receives messages and progress; None: standard error.
        {settings}

    Lists are lists or comma-separated. docs/reference/settings.md has the settings of every benchmark.

    Returns:
        The finished run.

    Raises:
        EvalkitError: the evaluation is impossible or fails; the message is one line.
    """
    of_model = settings_of(ModelSpec)
    options = given_options({key: value for key, value in shared.items() if key not in of_model}, settings or {})
    loading: dict[str, Any] = {key: shared.get(key, setting.default) for key, setting in of_model.items()}
    loading["tokenizer"] = tokenizer
    with progress or Progress() as shown:
        if isinstance(model, (str, Path)):
            return run_plan(planned(model, options | loading, shown.say), shown)
        # Imported here: a model in memory needs torch anyway, a finished run of a checkpoint does not
        from evalkit.models.live import live_model

        with live_model(model, options.pop("name", None), **loading) as spec:
            return run_plan(planned(spec, options, shown.say), shown)


def planned(
    model: str | Path | ModelSpec, options: Mapping[str, Any], say: Say, earlier: Sequence[int] | None = None
) -> Plan:
    """Plan a run with the benchmark that has the suite.

    `model` and `options` as of `request_of`; `earlier` as of `DocumentSample`.
    """
    chosen = _benchmark_of(options)
    given = {name: value for name, value in options.items() if name != "suite" or name in settings_of(chosen.request)}
    request = request_of(chosen.request, model, given)
    if earlier is not None:
        request = replace(request, earlier=tuple(earlier))
    return chosen.plan(request, say)


def _benchmark_of(options: Mapping[str, Any]) -> Benchmark:
    suite = options.get("suite")
    requests = options.get("requests")
    return benchmark(
        kind_of_suite(
            None if suite is None else values.name_or_path("--suite", suite),
            None if requests is None else values.path("--requests", requests),
        )
    )


def request_type(options: Mapping[str, Any]) -> type[Request]:
    """Return the request of the benchmark that has the suite, or the file of requests, of the options of a run."""
    request: type[Request] = _benchmark_of(options).request
    return request


def own_settings(request: type[Request]) -> list[str]:
    """Return the settings that a kind of request has in addition to the arguments of `evaluate`."""
    return sorted(settings_of(request).keys() - settings_of(ModelSpec, SuiteRequest).keys())


def given_options(
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any],
    named: Callable[[str], str] = str,
    where: str = "settings",
) -> dict[str, Any]:
    """Return the arguments of `evaluate` that differ from their defaults, merged with the benchmark's own settings.

    In messages, an argument is `named(argument)`, and `where` says how settings are given.
    """
    given = given_settings(arguments, ModelSpec, SuiteRequest)
    if isinstance(vary := given.get("vary"), Path):
        given["vary"] = str(vary)
    suite = given.get("suite") or given.get("requests") or DEFAULT_SUITE
    request = request_type(given)
    own = own_settings(request)
    if foreign := sorted(given.keys() - settings_of(ModelSpec, request).keys() - {"suite"}):
        more = f"; it has {where} {', '.join(own)}" if own else ""
        raise UsageError(f"{named(foreign[0])}: suite {suite} has no such setting{more}")
    for name in settings:
        if name in settings_of(ModelSpec, SuiteRequest):
            raise UsageError(f"{where}: {name} is an argument of every run; give {named(name)} instead")
        if name not in own:
            raise UnknownNameError(f"setting of suite {suite}", name, own)
    return given | dict(settings)
