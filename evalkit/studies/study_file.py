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
      longbench: {context: 8192, checkpoints: [vanilla, intg]}      # these only; default: all
    tables:                                       # optional: how `evalkit table --study` fills a layout
      main_res: {benchmark: zeroshot8, rows: {vanilla_125m: vanilla}, drop_empty: true, caption: Ours,
                 titles: {125M parameters: Small models}}
    figures:                                      # optional: which models `evalkit figure --study` draws
      bos: [vanilla, intg]
    pair_seeds: true                              # optional: the n-th seeds of all models read the same data in the
                                                  # same order, so they are compared in pairs; default: false

Paths are relative to the study file; `~` is the user's folder, `$NAME` an environment variable. `steps` names folders
in each `model`, or revisions of a hub model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from evalkit.benchmarks.registry import benchmark, kind_of_suite
from evalkit.comparison.sides import step_in
from evalkit.errors import UnknownNameError, UsageError
from evalkit.inputs.settings import Setting, settings_of
from evalkit.inputs.validated import FileSettings, Listed, Named, NonEmpty, read_settings
from evalkit.inputs.values import by_number, names, text
from evalkit.inputs.values import path as given_path
from evalkit.models.loading.files import is_pattern, matching
from evalkit.models.loading.spec import ModelSpec
from evalkit.paths import RUNS
from evalkit.studies.study import Study, StudyBenchmark, StudyCheckpoint, StudyTable, recorded_checkpoints
from evalkit.tables.layout import layout_names

_MODEL_OPTIONS = tuple(settings_of(ModelSpec))
_SOURCES = ("data_dir", "include_path", "allow_unofficial_data")
"""Settings of where documents come from, which benchmarks that make their own do not need."""
_YAML = (".yaml", ".yml")
_FIGURES = [
    "evalkit.attention.groups:KINDS",
]
"""Figures of capabilities, by name."""


class _CheckpointFile(FileSettings):
    """Schema of a checkpoint; further keys are the fields of `ModelSpec`."""

    model: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)]
    steps: NonEmpty | Annotated[Listed[NonEmpty], Field(min_length=1)] | None = None


def _of_model(given: object) -> object:
    return {"model": given} if isinstance(given, (str, list)) else given


def _of_names(given: object) -> object:
    return dict.fromkeys(given) if isinstance(given, list) and all(isinstance(name, str) for name in given) else given


_make_model: Any = create_model  # mypy's overloads do not allow a mapping of fields
_Checkpoint: Any = _make_model("_Checkpoint", __base__=_CheckpointFile, **dict.fromkeys(_MODEL_OPTIONS, (Any, None)))


class _StudyFile(FileSettings):
    """Schema of a study file; see the module's docstring."""

    output: NonEmpty | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    checkpoints: Annotated[Named[Annotated[_Checkpoint, BeforeValidator(_of_model)]], Field(min_length=1)]
    benchmarks: Annotated[Named[dict[str, Any] | None], Field(min_length=1), BeforeValidator(_of_names)]
    tables: dict[str, StudyTable] = Field(default_factory=dict)
    figures: dict[str, Listed[NonEmpty]] = Field(default_factory=dict)
    pair_seeds: bool = False


def read_study(path: Path, root: Path | None = None) -> Study:
    """Read a study file and find its checkpoints; `root` is a folder of its runs in place of its own, such as a copy.

    Checkpoints that were evaluated stand for seeds of a pattern without a folder, and for steps whose folders are gone.

    Raises:
        UsageError: the file is invalid, or names no checkpoint: names the key.
    """
    content: Any = read_settings(path, _StudyFile, UsageError, "study")
    where = f"study {path}"
    output = RUNS
    if content.output is not None:
        output = path.parent / given_path(f"{where}: 'output'", content.output).expanduser()
    location = Path(os.path.relpath(path.parent.resolve(), output.resolve())).as_posix()
    output = root or output
    folders = StudyFolders(path.parent, recorded_checkpoints(output, location))
    benchmarks = tuple(
        _benchmark(f"{where}, benchmark '{name}'", folders, name, given or {}, content.settings)
        for name, given in content.benchmarks.items()
    )
    of_models = {name: value for name, value in content.settings.items() if name in _MODEL_OPTIONS}
    checkpoints = tuple(
        replace(checkpoint, in_pairs=content.pair_seeds)
        for name, given in content.checkpoints.items()
        for checkpoint in _checkpoints(f"{where}, checkpoint '{name}'", folders, location, name, given, of_models)
    )
    study = Study(path, output, checkpoints, benchmarks, content.tables, content.figures, content.pair_seeds)
    for each in benchmarks:
        _check_known(f"{where}, benchmark '{each.name}'", "checkpoint", each.checkpoints, study.names)
    _check_known(f"{where}, 'figures'", "figure", study.figures, _figures())
    for name, models in study.figures.items():
        _check_models(f"{where}, figure '{name}'", models, study)
    for name, table in study.tables.items():
        if not name.endswith(_YAML):
            _check_known(f"{where}, 'tables'", "table", [name], layout_names())
        if table.benchmark is not None:
            known = {benchmark.name for benchmark in benchmarks}
            _check_known(f"{where}, table '{name}'", "benchmark", [table.benchmark], known)
        for row, given in table.rows.items():
            _check_models(f"{where}, table '{name}', row '{row}'", [given], study)
    return study


def _figures() -> list[str]:
    return [name for figures in _FIGURES for name in resolve_name(figures)]


def _check_models(where: str, models: Iterable[str], study: Study) -> None:
    """Check names of checkpoints, NAME or NAME@STEP."""
    without_step = (name if name in study.names else name.rpartition("@")[0] or name for name in models)
    _check_known(where, "checkpoint", without_step, study.names)


def _check_known(where: str, kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{where}: {UnknownNameError(kind, name, known)}")


def _options_of(kind: str) -> list[str]:
    """Return the options of a benchmark's runs; their folder and names are the study's."""
    return sorted(settings_of(ModelSpec, benchmark(kind).request).keys() - {"output", "name"} | {"suite"})


def _benchmark(
    where: str, folders: StudyFolders, name: str, given: Mapping[str, Any], settings: Mapping[str, Any]
) -> StudyBenchmark:
    suite = text(f"{where}: 'suite'", given.get("suite", name))
    try:
        if suite.endswith(_YAML) and folders.exists(suite):
            suite = str(folders.path(suite))
        kind = kind_of_suite(suite)
        known = _options_of(kind)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    given = dict(given)
    only = names(f"{where}: 'checkpoints'", given.pop("checkpoints")) if "checkpoints" in given else ()
    _check_known(where, "setting", given, (*known, "checkpoints"))
    # One that a benchmark lacks would change some of the study's numbers and not others
    _check_known(f"{where}: 'settings' are for all benchmarks", "setting", settings, {*known, *_SOURCES})
    shared = {option: value for option, value in settings.items() if option in known and option not in _MODEL_OPTIONS}
    written = {**shared, **given, "suite": given.get("suite", name)}
    options = folders.options({**written, "suite": suite}, ModelSpec, benchmark(kind).request)
    return StudyBenchmark(name, suite, kind, written, options, only)


def _checkpoints(
    where: str, folders: StudyFolders, location: str, name: str, given: Any, settings: Mapping[str, Any]
) -> Iterator[StudyCheckpoint]:
    """Yield the checkpoints of an entry: its seeds, and the steps of each."""
    written = dict(settings)
    written |= {option: value for option in _MODEL_OPTIONS if (value := getattr(given, option)) is not None}
    options = folders.options(written, ModelSpec)
    models = [match for name_or_pattern in _listed(given.model) for match in folders.matches(where, name_or_pattern)]
    for number, (model, is_match) in enumerate(models, start=1):
        seed = number if len(models) > 1 else None
        # What a pattern matches is a folder; it is gone if only its record is there
        is_gone = is_match and not folders.exists(model)
        if given.steps is None:
            is_path = is_match or folders.exists(model) or _is_written_as_path(model)
            path = str(folders.path(model)) if is_path else model
            yield StudyCheckpoint(name, seed, None, model, path, options, written, location, is_gone)
            continue
        for step, part, is_listed in _steps(where, folders, model, _listed(given.steps)):
            if folders.is_folder(model):
                inside = f"{model.rstrip('/')}/{part}"
                is_lost = (is_gone or is_listed) and not folders.exists(inside)
                path = str(folders.path(inside))
                yield StudyCheckpoint(name, seed, step, inside, path, options, written, location, is_lost)
            else:
                revision, shown = {"revision": part}, f"{model}@{part}"
                yield StudyCheckpoint(name, seed, step, shown, model, options | revision, written | revision, location)


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _steps(where: str, folders: StudyFolders, model: str, given: list[str]) -> list[tuple[int, str, bool]]:
    """Return (step, folder in the model or revision, whether a pattern matches it), by step."""
    parts = [(part, False) for part in given]
    if folders.is_folder(model):
        parts = [match for part in given for match in folders.matches(f"{where}, model '{model}'", part, model)]
    elif _is_written_as_path(model) or any(is_pattern(part) for part in given):
        raise UsageError(f"{where}: folder {folders.path(model)}, whose 'steps' are listed, does not exist")
    steps = []
    for part, is_match in parts:
        if (step := step_in(part)) is None:
            raise UsageError(f"{where}: '{part}' has no training step; expected a name such as step1000")
        steps.append((step, part, is_match))
    if len({step for step, *_ in steps}) < len(steps):
        raise UsageError(f"{where}: two of its steps are the same ({', '.join(part for _, part, _ in sorted(steps))})")
    return sorted(steps)


def _is_written_as_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~", "$"))


def _with_variables(path: str) -> str:
    """Replace environment variables. A path that begins with a variable is relative to the current folder, as typed."""
    return str(Path(os.path.expandvars(path)).absolute()) if path.startswith("$") else os.path.expandvars(path)


@dataclass(frozen=True)
class StudyFolders:
    """The folders beside a study file."""

    root: Path
    recorded: frozenset[str] = frozenset()
    """Checkpoints that were evaluated, relative to `root`; they need not exist any more."""

    def path(self, name: str) -> Path:
        """Return the path of a file or folder; `~` is the user's folder."""
        return self.root / Path(_with_variables(name)).expanduser()

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def is_folder(self, model: str) -> bool:
        """Return whether a name is that of a folder, which may be gone, and not of a model on the hub."""
        inside = f"{model.rstrip('/')}/"
        return self.path(model).is_dir() or any(given.startswith(inside) for given in self.recorded)

    def options(self, given: Mapping[str, Any], *kinds: type) -> dict[str, Any]:
        """Return settings of some dataclasses with the paths of their files and folders, where these exist."""
        known = settings_of(*kinds)
        return {name: self._option(known[name], value) if name in known else value for name, value in given.items()}

    def _option(self, setting: Setting, value: Any) -> Any:
        if isinstance(value, list):
            return [self._option(setting, item) for item in value]
        is_file = isinstance(value, str) and setting.is_file_at(self.path(value))
        return str(self.path(value)) if is_file else value

    def matches(self, where: str, pattern: str, model: str = "") -> list[tuple[str, bool]]:
        """Return the folders of a pattern among the models, or in a model's folder, each with True; a name with False.

        Recorded folders count, too, among the steps of a model, which trainers delete; as seeds they count only if no
        folder is left: the user has removed the others.
        """
        folder = self.path(model) if model else self.root
        given, pattern = pattern, _with_variables(pattern)
        if not is_pattern(pattern, folder):
            return [(given, False)]
        folders = {*matching(pattern, folder)}
        if model or not folders:
            prefix, patterns = f"{model.rstrip('/')}/" if model else "", pattern.split("/")
            for recorded in self.recorded:
                parts = recorded.removeprefix(prefix).split("/")
                # Folder by folder, as a shell matches
                is_inside = recorded.startswith(prefix) and len(parts) >= len(patterns)
                if is_inside and all(map(fnmatchcase, parts, patterns)):
                    folders.add("/".join(parts[: len(patterns)]))
        if not folders:
            raise UsageError(f"{where}: no folder in {folder.resolve()} matches '{pattern}'")
        return [(name, True) for name in sorted(folders, key=by_number)]
