"""Study files: which checkpoints are evaluated on which benchmarks.

In: a YAML file. Out: a `Study`. The form:

    output: runs                                  # folder of runs, relative to this file; default: results/runs
    settings: {dtype: bfloat16}                   # options of `evalkit run` for all checkpoints and benchmarks
    checkpoints:                                  # the names are those of tables, comparisons and curves
      vanilla: checkpoints/vanilla-125m           # a folder, a hub name, a .gguf file, or demo
      intg: checkpoints/intg-seed*                # several folders are seeds of one model
      cog: [checkpoints/cog-a, checkpoints/cog-b]
      diff: {model: "train/diff-seed*", steps: checkpoint-*}      # in each folder: the steps of its training
      pythia: {model: EleutherAI/pythia-160m, steps: [step1000, step2000], dtype: float32}
    benchmarks:                                   # names of suites, or names of your own with a suite
      zeroshot8: {}
      plain: {suite: zeroshot8, template: plain, rule: acc_norm}
      lm_eval: {tasks: [sciq, lambada_openai]}
      longbench: {context: 8192}
    tables:                                       # optional: how `evalkit table --study` fills a layout
      main_res: {benchmark: zeroshot8, rows: {vanilla_125m: vanilla}, drop_empty: true, caption: Ours,
                 titles: {125M parameters: Small models}}

Paths are relative to the study file. `steps` names folders in each `model`, or revisions of a hub model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.benchmarks.request import Request
from evalkit.comparison.steps import step_in
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.inputs.values import path as given_path
from evalkit.models.spec import ModelSpec
from evalkit.reporting.escape import printable
from evalkit.resources import RUNS
from evalkit.studies.patterns import StudyFolders
from evalkit.tables.layout import layout_names

_MODEL_OPTIONS = tuple(name for name in ModelSpec.__dataclass_fields__ if name != "model")


@dataclass(frozen=True)
class StudyCheckpoint:
    """One checkpoint of a study."""

    name: str
    """Its name in tables and comparisons; seeds and steps of one model share it."""
    seed: int | None
    """Number of the seed, from 1; None for a model with a single one."""
    step: int | None
    """Training step of a checkpoint that is listed under `steps`."""
    given: str
    """Folder relative to the study file, or name: the same on every machine."""
    model: str
    """As in `evalkit run --model`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ModelSpec`."""
    place: str = ""
    """Folder of the study file relative to that of the runs: other studies may use the same names."""

    @property
    def label(self) -> str:
        """Return its name with seed and step."""
        seed = "" if self.seed is None else f" seed {self.seed}"
        return printable(f"{self.name}{seed}{'' if self.step is None else f' step {self.step}'}")


@dataclass(frozen=True)
class StudyBenchmark:
    """One benchmark of a study."""

    name: str
    suite: str
    given: Mapping[str, Any]
    """Options as in the study file, the same on every machine."""
    options: Mapping[str, Any]
    """Options as `benchmarks.run.planned` takes them, with the suite."""


@dataclass(frozen=True)
class StudyTable:
    """How a study fills a table."""

    benchmark: str | None = None
    """Whose runs fill it; None: the only benchmark that fits."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Row of the layout → checkpoint, or NAME@STEP; others are assigned by their names, then by their models."""
    drop_empty: bool = False
    """Whether rows and sections without a run are left out."""
    caption: str | None = None
    """In markup."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Title of a section, as plain text → its replacement, in markup."""


@dataclass(frozen=True)
class StudyRun:
    """A checkpoint on a benchmark."""

    checkpoint: StudyCheckpoint
    benchmark: StudyBenchmark

    @property
    def label(self) -> str:
        """Return its name in messages."""
        return f"{self.checkpoint.label} on {printable(self.benchmark.name)}"

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of its plan; a benchmark's own context counts more than its checkpoint's."""
        return {**self.checkpoint.options, **self.benchmark.options}

    @property
    def key(self) -> str:
        """Return a hash of everything in the study file that determines the run, the same on every machine."""
        content = [self.checkpoint.place, self.checkpoint.given, {**self.checkpoint.options, **self.benchmark.given}]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """Checkpoints and benchmarks."""

    path: Path
    output: Path
    checkpoints: tuple[StudyCheckpoint, ...]
    benchmarks: tuple[StudyBenchmark, ...]
    tables: Mapping[str, StudyTable]

    @property
    def runs(self) -> tuple[StudyRun, ...]:
        """Return every checkpoint on every benchmark; those of one checkpoint together."""
        return tuple(StudyRun(checkpoint, one) for checkpoint in self.checkpoints for one in self.benchmarks)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of its models, in order."""
        return tuple(dict.fromkeys(one.name for one in self.checkpoints))

    def benchmark(self, name: str | None) -> StudyBenchmark:
        """Return a benchmark by name; None: the only one.

        Raises:
            UsageError: there are several, and none is named.
            UnknownNameError: there is none of that name.
        """
        known = {one.name: one for one in self.benchmarks}
        if name is None and len(known) > 1:
            raise UsageError(f"study {self.path} has several benchmarks: give --benchmark {' | '.join(known)}")
        if name is not None and name not in known:
            raise UnknownNameError(f"benchmark of study {self.path}", name, known)
        return known[name] if name is not None else self.benchmarks[0]


def read_study(path: Path, recorded: Callable[[Path, str], Collection[str]] = lambda *_: ()) -> Study:
    """Read a study file and find its checkpoints.

    Args:
        path: the file.
        recorded: (folder of runs, the study's place) → evaluated checkpoints, for readers of results: they stand for
            seeds of a pattern without a folder, and for steps whose folders are gone.

    Raises:
        UsageError: the file is invalid, or names no checkpoint: names the key.
    """
    content: Any = read_settings(path, _StudyFile, UsageError, "study")
    where = f"study {path}"
    benchmarks = tuple(
        _benchmark(f"{where}, benchmark '{name}'", path.parent, name, given or {}, content.settings)
        for name, given in content.benchmarks.items()
    )
    _check_settings(where, content.settings, benchmarks)
    of_models = {name: value for name, value in content.settings.items() if name in _MODEL_OPTIONS}
    output = RUNS if content.output is None else path.parent / given_path(f"{where}: 'output'", content.output)
    place = Path(os.path.relpath(path.parent.resolve(), output.resolve())).as_posix()
    folders = StudyFolders(path.parent, frozenset(recorded(output, place)))
    checkpoints = tuple(
        replace(one, place=place)
        for name, given in content.checkpoints.items()
        for one in _checkpoints(f"{where}, checkpoint '{name}'", folders, name, given, of_models)
    )
    study = Study(
        path=path,
        output=output,
        checkpoints=checkpoints,
        benchmarks=benchmarks,
        tables={name: StudyTable(**dict(table)) for name, table in content.tables.items()},
    )
    _check_tables(where, study)
    return study


class _CheckpointFile(FileSettings):
    """Schema of a checkpoint; further keys are the fields of `ModelSpec`."""

    model: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)]
    steps: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)] | None = None


class _TableFile(FileSettings):
    """Schema of a table's settings."""

    benchmark: NonEmpty | None = None
    rows: Named[NonEmpty] = Field(default_factory=dict)
    drop_empty: bool = False
    caption: str | None = None
    titles: Named[str] = Field(default_factory=dict)


def _of_model(given: object) -> object:
    """Expand a model without further keys."""
    return {"model": given} if isinstance(given, (str, list)) else given


def _of_names(given: object) -> object:
    """Expand a list of suites."""
    return dict.fromkeys(given) if isinstance(given, list) and all(isinstance(one, str) for one in given) else given


_make_model: Any = create_model  # mypy's overloads do not allow a mapping of fields
_Checkpoint: Any = _make_model("_Checkpoint", __base__=_CheckpointFile, **dict.fromkeys(_MODEL_OPTIONS, (Any, None)))


class _StudyFile(FileSettings):
    """Schema of a study file; see the module's docstring."""

    output: NonEmpty | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    checkpoints: Annotated[Named[Annotated[_Checkpoint, BeforeValidator(_of_model)]], Field(min_length=1)]
    benchmarks: Annotated[Named[dict[str, Any] | None], Field(min_length=1), BeforeValidator(_of_names)]
    tables: dict[str, _TableFile] = Field(default_factory=dict)


def _benchmark(
    where: str, folder: Path, name: str, given: Mapping[str, Any], settings: Mapping[str, Any]
) -> StudyBenchmark:
    suite = given.get("suite", name)
    if not isinstance(suite, str):
        raise UsageError(f"{where}: 'suite' is {suite!r}; expected a name or a YAML file")
    own_file = folder / suite
    try:
        suite = str(own_file) if suite.endswith((".yaml", ".yml")) and own_file.is_file() else suite
        known = _options_of(suite)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    for option in given:
        if option not in known:
            raise UsageError(f"{where}: {UnknownNameError('setting', option, known)}")
    shared = {option: value for option, value in settings.items() if option in known and option not in _MODEL_OPTIONS}
    written = {**shared, **given, "suite": given.get("suite", name)}
    options = {**written, "suite": suite}
    for option in ("data_dir", "include_path", "context_config", "template", "text"):
        if isinstance(value := options.get(option), str) and (folder / value).exists():
            options[option] = str(folder / value)
    return StudyBenchmark(name, suite, written, options)


def _options_of(suite: str) -> list[str]:
    """Return the options of a suite's runs; the folder of runs is the study's."""
    request: type[Request] = benchmark(kind_of_suite(suite)).request()
    names = {*_MODEL_OPTIONS, *request.__dataclass_fields__, "suite"}
    return sorted(names - {"model", "output"})


def _check_settings(where: str, settings: Mapping[str, Any], benchmarks: Sequence[StudyBenchmark]) -> None:
    """Raise if a shared setting is one of no model and of no benchmark."""
    known = {option for one in benchmarks for option in _options_of(one.suite)} - {"suite"}
    for option in settings:
        if option not in known:
            raise UsageError(f"{where}, 'settings': {UnknownNameError('setting', option, known)}")


def _checkpoints(
    where: str, folders: StudyFolders, name: str, given: Any, settings: Mapping[str, Any]
) -> Iterator[StudyCheckpoint]:
    """Yield the checkpoints of an entry: its seeds, and the steps of each."""
    options = dict(settings)
    options |= {option: value for option in _MODEL_OPTIONS if (value := getattr(given, option)) is not None}
    listed = [given.model] if isinstance(given.model, str) else given.model
    models = [one for text in listed for one in _required(where, folders.root, text, folders.models(text))]
    for number, model in enumerate(models, start=1):
        seed = number if len(models) > 1 else None
        if given.steps is None:
            yield StudyCheckpoint(name, seed, None, model, folders.located(model), options)
            continue
        for step, part in _steps(where, folders, model, given.steps):
            if folders.is_folder(model):
                inside = f"{model.rstrip('/')}/{part}"
                yield StudyCheckpoint(name, seed, step, inside, folders.located(inside), options)
            else:
                yield StudyCheckpoint(name, seed, step, f"{model}@{part}", model, options | {"revision": part})


def _required(where: str, folder: Path, text: str, found: list[str]) -> list[str]:
    if not found:
        raise UsageError(f"{where}: no folder matches '{text}' in {folder.resolve()}")
    return found


def _steps(where: str, folders: StudyFolders, model: str, given: str | Sequence[str]) -> list[tuple[int, str]]:
    """Return (step, folder in the model or revision), by step."""
    parts = [given] if isinstance(given, str) else list(given)
    if folders.is_folder(model):
        inside = f"{where}, model '{model}'"
        parts = [
            one for part in parts for one in _required(inside, folders.root / model, part, folders.steps(model, part))
        ]
    found = []
    for part in parts:
        if (step := step_in(part)) is None:
            raise UsageError(f"{where}: '{part}' has no training step; expected a name such as step1000")
        found.append((step, part))
    if len({step for step, _ in found}) < len(found):
        raise UsageError(f"{where}: two of its steps are the same ({', '.join(part for _, part in sorted(found))})")
    return sorted(found)


def _check_tables(where: str, study: Study) -> None:
    for name, table in study.tables.items():
        if not name.endswith((".yaml", ".yml")) and name not in layout_names():
            raise UsageError(f"{where}, 'tables': {UnknownNameError('table', name, layout_names())}")
        if table.benchmark is not None and table.benchmark not in {one.name for one in study.benchmarks}:
            known = [one.name for one in study.benchmarks]
            raise UsageError(f"{where}, table '{name}': {UnknownNameError('benchmark', table.benchmark, known)}")
        for row, given in table.rows.items():
            if not {given, given.rpartition("@")[0]} & set(study.names):
                raise UsageError(
                    f"{where}, table '{name}', row '{row}': {UnknownNameError('checkpoint', given, study.names)}"
                )
