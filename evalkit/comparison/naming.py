"""Which runs names mean: the one rule of every command that takes a run (docs/runs.md).

In: names as on the command line, and a folder of runs. Out: the finished `Run` of each name. The folder of a run, its
id, the name that it was given, and the beginning of any, mean this run. Any other name means a checkpoint, and of its
runs the one under the default settings, measured as the runs of the other names are. No name is guessed: an error lists
the runs that it may mean, with what distinguishes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from evalkit.benchmarks.differences import differences
from evalkit.benchmarks.multiple_choice.suites import shipped_suites
from evalkit.benchmarks.request import DEFAULT_SUITE, SCORING_VERSION
from evalkit.display import news
from evalkit.errors import CheckpointError, EvalkitError, RunError, UnknownNameError, UsageError
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import locate, resolve_dtype
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import CHECKPOINT, MANIFEST, Run, is_file, is_run_folder, load_run
from evalkit.runs.traits import checkpoint_of, documents_read, is_imported, traits

_MOST_LISTED = 10
_ID_SHOWN = 7
_LEAST_OF_ID = 4
"""Characters from which the beginning of an id is one, and no name of a checkpoint."""
_DERIVED = ("rule", "template's text")
"""Traits that follow from others: every rule reads the same scores."""


class _Meant(NamedTuple):
    """Runs that a name may mean."""

    name: str
    runs: Sequence[Run]
    is_exact: bool
    """Whether the name is that of one run, not of a checkpoint."""
    matching: int = 1
    """Runs that match, also those that a checkpoint's name does not mean."""


def find_run(name: str, root: Path, usable: Callable[[Run], bool] = lambda _: True) -> Run:
    """Return the finished run that a name means; arguments and errors as of `find_runs`."""
    [run] = find_runs([name], root, usable)
    return run


def find_runs(
    given: Sequence[str | Run], root: Path, usable: Callable[[Run], bool] = lambda _: True, finished: bool = True
) -> list[Run]:
    """Return the run that each name means, and print which one was taken of several.

    Args:
        given: names as on the command line, and runs, which mean themselves.
        root: folder of run folders.
        usable: which runs a command can use; if it can use none of a name's, all count.
        finished: whether runs that are not finished are left out.

    Raises:
        UsageError: no run matches, or a name does not mean one of several; lists them.
        RunError: the run is damaged or not finished, or a checkpoint has no run.
    """
    meant = [_meant(name, root, usable, finished) for name in given]
    chosen = _chosen(meant, root)
    notes = []
    for each, run in zip(meant, chosen, strict=True):
        if each.matching > 1 or not _is_whole(run, each.name):
            about = ", ".join(filter(None, (run.suite, *settings_words(run))))
            several = f", of {each.matching} runs that match" * (each.matching > 1)
            notes.append(f"{each.name}: {run.folder.name} ({about}){several}")
    for note in dict.fromkeys(notes):
        news(note)
    return chosen


def settings_words(run: Run) -> tuple[str, ...]:
    """Return what usually distinguishes runs of one checkpoint on a suite, in words; empty where it is usual."""
    specification = run.manifest["specification"]
    shots, control = specification.get("num_fewshot"), specification.get("control")
    extension = specification.get("context_extension")
    return (
        str(run.manifest.get("revision") or ""),
        run.template,
        "varied prompts" if specification.get("prompts") else "",
        f"control {control}" if control else "",
        str(specification["dtype"] or ""),
        str(specification.get("quantise") or ""),
        f"context {extension['target']:,}" if extension else "",
        f"{shots}-shot" if shots else "",
        documents_read(specification) or "all documents",
        "imported" if is_imported(run.manifest) else "",
    )


def _meant(name: str | Run, root: Path, usable: Callable[[Run], bool], finished: bool) -> _Meant:
    if isinstance(name, Run):
        return _Meant(str(name.folder), [_opened(name, finished)], True)
    if not name.strip():
        raise UsageError("a run's name is empty; give its folder, id or checkpoint (evalkit ls runs lists them)")
    for folder in (Path(name), root / name):
        if is_file(folder / MANIFEST) and is_run_folder(folder):
            return _Meant(name, [_opened(load_run(folder), finished)], True)
    matching = [run if isinstance(run, Run) else load_run(run.folder) for run in matching_runs(name, root)]
    if not matching:
        raise _unknown(name, root)
    if len(matching) == 1 and (matching[0].manifest.get("name") == name or _is_completed(matching[0], name)):
        return _Meant(name, [_opened(matching[0], finished)], True)
    if not (runs := [run for run in matching if not _is_special(run)]):
        raise _ambiguous({name: matching}, root, "alone means no control, varied, rounded or imported run")
    if len({checkpoint_of(run) for run in runs}) > 1:
        raise _ambiguous({name: runs}, root, "is the name of several checkpoints, or of several states of one")
    runs = [run for run in runs if run.complete or not finished] or [_opened(runs[0], finished)]
    return _Meant(name, list(filter(usable, runs)) or runs, False, len(matching))


def _opened(run: Run, finished: bool) -> Run:
    if finished:
        run.require_finished()
    return run


def _is_special(run: Run) -> bool:
    """Return whether a run is none that a checkpoint's name means: its scores are not the checkpoint's own."""
    specification = run.manifest["specification"]
    return is_imported(run.manifest) or any(specification.get(name) for name in ("control", "prompts", "quantise"))


def _chosen(meant: Sequence[_Meant], root: Path) -> list[Run]:
    """Return the run of each name: the one under default settings of those that are measured as all other names'."""
    if all(each.is_exact for each in meant):
        return [each.runs[0] for each in meant]
    every = {each.name: each.runs for each in meant}
    first, *others = every.values()
    fitting = [run for run in first if all(any(are_alike(run, other) for other in runs) for runs in others)]
    if not fitting:
        raise _ambiguous(every, root, "have no runs that are measured alike")
    several = "have several runs that are measured alike" if others else f"matches {len(first)} runs"
    if (baseline := _under_defaults(fitting)) is None:
        raise _ambiguous(every, root, several)
    chosen = list[Run]()
    for each in meant:
        run = _under_defaults([run for run in each.runs if run is baseline or are_alike(baseline, run)])
        if run is None:
            raise _ambiguous(every, root, several)
        chosen.append(run)
    return chosen


def are_alike(a: Run, b: Run) -> bool:
    """Return whether two runs are of one suite, tasks and documents, without a difference that tables refuse."""
    if (a.kind, a.suite) != (b.kind, b.suite) or a.manifest["documents"].keys() != b.manifest["documents"].keys():
        return False
    return not any(mine.refused for mine, _ in differences(a, b, str(a.manifest["rule"])))


def _under_defaults(runs: Sequence[Run]) -> Run | None:
    """Return the run that has no setting, other than the default, that not all others have, too; None if none is so."""
    if len(runs) == 1:
        return runs[0]
    settings = [_settings(run) for run in runs]
    least = min(settings, key=len)
    if all(least < other for other in settings if other is not least):
        return runs[settings.index(least)]
    return None


def _settings(run: Run) -> set[tuple[str, str]]:
    """Return the settings of a run that are not the default; those without a known default are among them."""
    suite = shipped_suites().get(run.suite)
    usual = {"suite": DEFAULT_SUITE, "limit": "none", "context extension": "none", "solved examples": "0",
             "scoring version": str(SCORING_VERSION)}  # fmt: skip
    if suite is not None:
        usual |= {"template": suite.template or "inst", "tasks": _tasks(suite.tasks)}
    for library in run.manifest["specification"].get("versions", {}):
        with suppress(PackageNotFoundError):
            usual[f"{library} version"] = version(library)
    path = run.manifest.get("path")
    if path is not None and Path(path).exists():
        with suppress(CheckpointError):
            usual["dtype"] = resolve_dtype(locate(path), "auto")
    given = {"suite": run.suite, "tasks": _tasks(run.manifest["documents"])}
    for trait in traits(run).values():
        if trait.name not in _DERIVED and (trait.refused or trait.name.endswith(" version")):
            given[trait.name] = trait.value
    return {(name, value) for name, value in given.items() if usual.get(name) != value}


def _tasks(tasks: Sequence[str] | Mapping[str, object]) -> str:
    return ", ".join(sorted(tasks))


def _ambiguous(runs: Mapping[str, Sequence[Run]], root: Path, why: str) -> UsageError:
    every = {run.folder: run for of_name in runs.values() for run in of_name}
    words = dict(zip(every, _distinctions([*every.values()]), strict=True))
    lists = []
    for name, of_name in runs.items():
        listed = "; ".join(words[run.folder] for run in of_name[:_MOST_LISTED]) + "; …" * (len(of_name) > _MOST_LISTED)
        lists.append(f"{name}: {listed}" if len(runs) > 1 else listed)
    names = " and ".join(f"'{name}'" for name in runs)
    return UsageError(f"{names} {why} in {root}: {' | '.join(lists)}; name a run by its id")


def _distinctions(runs: Sequence[Run]) -> list[str]:
    """Return each run's id, and in parentheses all that distinguishes it from the others."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    differing = [name for name in names if len({of_run.get(name) for of_run in facts}) > 1]
    listed = []
    for run, of_run in zip(runs, facts, strict=True):
        words = ", ".join(of_run.get(name) or f"no {name}" for name in differing)
        listed.append(f"{run.manifest['id'][:_ID_SHOWN]} ({words or run.folder.name})")
    return listed


def _facts(run: Run) -> dict[str, str]:
    """Return what a run is of, under, and from, in words."""
    facts = {"model": run.model, "revision": str(run.manifest["revision"] or ""), "suite": run.suite}
    facts["tasks"] = _tasks(run.manifest["documents"])
    facts |= {trait.name: trait.words for trait in traits(run).values() if trait.name not in _DERIVED}
    return facts | {"date": str(run.manifest["created"])[:19].replace("T", " ")}


def _unknown(name: str, root: Path) -> EvalkitError:
    # Unlike `Path.exists`, false for a path that the file system rejects
    if os.path.exists(os.path.expanduser(name)):  # noqa: PTH110, PTH111
        return RunError(
            f"{name} is no run folder (it has no {MANIFEST}), and no run in {root} is of a checkpoint with its present "
            "files; evaluate it, or name a run by its id"
        )
    if not (folders := [run.folder.name for run in scan(root)]):
        return UsageError(
            f"'{name}' is no run folder, and there are no runs in {root} (--in or --output of their command)"
        )
    return UnknownNameError("run", name, folders)


def matching_runs(given: str, root: Path) -> list[Run | DamagedRun]:
    """Return the runs in a folder that a text may mean: of a checkpoint that is here, those of its present files."""
    stored, path = list(scan(root)), _resolved(given)
    at_path = [run for run in stored if isinstance(run, Run) and path and run.manifest.get("path") == str(path)]
    is_here = path is not None and (is_file(path / CHECKPOINT) or (path.suffix == ".gguf" and is_file(path)))
    if is_here:
        return _of_present_files(given, stored, at_path)
    named = [run for run in stored if _has_name(run, given)]
    begun = [run for run in stored if _begins(run, given)]
    return [*(at_path or named or begun)]


def _resolved(given: str) -> Path | None:
    """Return the path that a name may be; None for the demo checkpoint, and for what is no path."""
    with suppress(OSError, RuntimeError):
        return None if given == "demo" else Path(given).expanduser().resolve()
    return None


def _of_present_files(given: str, stored: Sequence[Run | DamagedRun], at_path: Sequence[Run]) -> list[Run | DamagedRun]:
    """Return the runs of the files that a checkpoint has now, with its own tokenizer, first those at its path.

    If it has no weights any more, its files are unknown, and so are those of a model in memory that was saved to it.
    """
    prints = []
    for trusted in (False, True):
        with suppress(CheckpointError):
            checkpoint = locate(given, allow_pickle=True, trust_remote_code=trusted)
            prints.append(asdict(fingerprint(checkpoint)))
    if not prints:
        return [*at_path]
    runs = [run for run in stored if isinstance(run, Run)]
    of_files = [run for run in runs if run.manifest["specification"]["checkpoint"] in prints]
    here = [run for run in of_files if run in at_path]
    unknown = [run for run in at_path if "live" in run.manifest]
    return [*(here or of_files or unknown)]


def _is_whole(run: Run, given: str) -> bool:
    """Return whether a name is a run's folder or id, or a name or the path of its checkpoint."""
    paths = (run.manifest.get("path"), str(run.folder.resolve()))
    is_path = str(_resolved(given)) in paths
    return is_path or given in (run.folder.name, run.manifest["id"]) or _has_name(run, given)


def _is_completed(run: Run, given: str) -> bool:
    """Return whether a text is only the beginning of the name of a run's folder, or of its id."""
    return not _has_name(run, given) and _begins(run, given)


def _has_name(run: Run | DamagedRun, given: str) -> bool:
    """Return whether a run is of the checkpoint with a name, or with the last parts of its path or name."""
    if isinstance(run, DamagedRun):
        return False
    model, local = run.manifest["model"].rstrip("/"), run.manifest.get("path")
    names = {model, model.rpartition("/")[2], run.manifest.get("name"), _checkpoint_in(run)}
    if local is None:  # of the hub: also without its revision, and with its commit
        name = model.partition("@")[0]
        names |= {name, name.rpartition("/")[2], f"{name}@{run.manifest['revision']}"}
    name = given.rstrip("/")
    return name in names or (local is not None and bool(name) and local.endswith(f"/{name}"))


def _begins(run: Run | DamagedRun, given: str) -> bool:
    """Return whether a text is the beginning of a run's id, or of its folder's name with its checkpoint's name."""
    if isinstance(run, DamagedRun):
        return run.folder.name.startswith(given)
    is_id = len(given) >= _LEAST_OF_ID and run.manifest["id"].startswith(given)
    return is_id or (run.folder.name.startswith(given) and given.startswith(_checkpoint_in(run)))


def _checkpoint_in(run: Run) -> str:
    """Return what the name of a run's folder has of its checkpoint, before suite and id."""
    name = run.folder.name.removesuffix(f"-{run.manifest['id']}")
    return name.rpartition(f"-{run.suite}-")[0] or name
