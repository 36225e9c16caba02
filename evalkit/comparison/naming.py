"""Which runs names mean: the one rule of every command that takes a run (docs/runs.md).

In: names as on the command line, and a folder of runs. Out: the finished `Run` of each name. The folder of a run, its
id, the name that it was given, and the beginning of any, mean this run. Any other name means a checkpoint, and of its
runs the one of the default suite with the fewest other settings, measured as the runs of the other names are. No name
is guessed: an error lists the runs that it may mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from evalkit.benchmarks.differences import differences
from evalkit.display import news
from evalkit.errors import CheckpointError, EvalkitError, RunError, SeveralRunsError, UnknownNameError, UsageError
from evalkit.escape import counted
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import locate
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import CHECKPOINT, MANIFEST, Run, is_file, is_run_folder, load_run
from evalkit.runs.traits import checkpoint_of, documents_read, is_imported, traits
from evalkit.suites.suites import DEFAULT_SUITE, shipped_suites

_MOST_LISTED = 20
_ID_SHOWN = 7
_LEAST_OF_ID = 4
"""Characters from which the beginning of an id is one, and no name of a checkpoint."""
_DERIVED = ("rule", "template's text")
"""Traits that follow from others: every rule reads the same scores."""
_USUAL = {"limit": "none", "context extension": "none", "solved examples": "0"}


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
    given: Sequence[str | Run],
    root: Path,
    usable: Callable[[Run], bool] = lambda _: True,
    finished: bool = True,
    may_differ: bool = False,
) -> list[Run]:
    """Return the run that each name means, and print which run was taken.

    Args:
        given: names as on the command line, and runs, which mean themselves.
        root: folder of run folders.
        usable: which runs a command can use; if it can use none of a name's, all count.
        finished: whether runs that are not finished are left out.
        may_differ: whether each name is resolved by itself if no runs of all names are measured alike.

    Raises:
        UsageError: no run matches, or a name does not mean one of several; lists them.
        RunError: the run is damaged or not finished, or a checkpoint has no run.
    """
    meant = [_meant(name, root, usable, finished) for name in given]
    chosen = _chosen(meant, root, may_differ)
    notes = []
    for each, run in zip(meant, chosen, strict=True):
        if each.name != run.manifest["id"] and Path(each.name).name != run.folder.name:
            several = f", of {each.matching} runs that match" * (each.matching > 1)
            notes.append(f"{each.name}: {run.folder.name} ({_about(run)}){several}")
    for note in dict.fromkeys(notes):
        news(note)
    return chosen


def find_groups(
    singles: Sequence[str | Run],
    groups: Sequence[tuple[str, Sequence[str | Run]]],
    root: Path,
    usable: Callable[[Run], bool] = lambda _: True,
    may_differ: bool = False,
) -> tuple[list[Run], list[tuple[str, list[Run]]]]:
    """Return the runs of single names and of named groups; arguments and errors as of `find_runs`."""
    members = [name for _, names in groups for name in names]
    opened = iter(find_runs([*singles, *members], root, usable, may_differ=may_differ))
    first = list(islice(opened, len(singles)))
    return first, [(group, list(islice(opened, len(names)))) for group, names in groups]


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
    if len(matching) == 1 and (matching[0].manifest.get("name") == name or _begins(matching[0], name)):
        return _Meant(name, [_opened(matching[0], finished)], True)
    if not (runs := [run for run in matching if not _is_special(run)]):
        why = "alone means no control, varied, rounded or imported run, and no look of evalkit decide"
        raise _ambiguous({name: matching}, root, why)
    if len({checkpoint_of(run) for run in runs}) > 1:
        raise _ambiguous({name: runs}, root, "is the name of several checkpoints, or of several states of one")
    runs = [run for run in runs if run.complete or not finished] or [_opened(runs[0], finished)]
    return _Meant(name, list(filter(usable, runs)) or runs, False, len(matching))


def _opened(run: Run, finished: bool) -> Run:
    if finished:
        run.require_finished()
    return run


def _is_special(run: Run) -> bool:
    """Return whether a run is none that a checkpoint's name means: not all its scores are the checkpoint's own."""
    specification = run.manifest["specification"]
    is_changed = any(specification.get(name) for name in ("control", "prompts", "quantise"))
    return is_imported(run.manifest) or is_changed or "earlier" in specification


def _chosen(meant: Sequence[_Meant], root: Path, may_differ: bool) -> list[Run]:
    """Return the run of each name: the usual one of those that are measured as all other names'."""
    if all(each.is_exact for each in meant):
        return [each.runs[0] for each in meant]
    every = {each.name: each.runs for each in meant}
    first, *others = every.values()
    fitting = [run for run in first if all(any(are_alike(run, other) for other in runs) for runs in others)]
    if not fitting and may_differ:
        return [run for each in meant for run in _chosen([each], root, may_differ)]
    if not fitting:
        raise _ambiguous(every, root, "have no runs that are measured alike")
    baseline, chosen = _usual(fitting), list[Run]()
    for each in meant if baseline else ():
        alike = [run for run in each.runs if run is baseline or (baseline and are_alike(baseline, run))]
        if run := _usual(alike):
            chosen.append(run)
    if len(chosen) < len(meant):
        several = "have several runs that are measured alike" if others else f"matches {len(first)} runs"
        raise _ambiguous(every, root, several)
    return chosen


def are_alike(a: Run, b: Run) -> bool:
    """Return whether two runs are of one suite, tasks and documents, without a difference that tables refuse."""
    if (a.kind, a.suite) != (b.kind, b.suite) or a.manifest["documents"].keys() != b.manifest["documents"].keys():
        return False
    return not any(mine.refused for mine, _ in differences(a, b, str(a.manifest["rule"])))


def _usual(runs: Sequence[Run]) -> Run | None:
    """Return the run, first of the default suite, without any setting but the default that not all others have, too."""
    runs = [run for run in runs if run.suite == DEFAULT_SUITE] or runs
    settings = [_settings(run) for run in runs]
    least = min(settings, key=len)
    is_usual = all(least < other for other in settings if other is not least)
    return runs[settings.index(least)] if is_usual else None


def _settings(run: Run) -> set[tuple[str, str]]:
    """Return the settings of a run that are not the default; those without a known default are among them."""
    suite = shipped_suites().get(run.suite)
    of_suite = {} if suite is None else {"template": suite.template or "inst", "tasks": ", ".join(sorted(suite.tasks))}
    given = {"suite": run.suite, "tasks": ", ".join(sorted(run.manifest["documents"]))}
    for trait in traits(run).values():
        if trait.refused and trait.name not in _DERIVED:
            given[trait.name] = trait.value
    return given.items() - (_USUAL | of_suite).items()


def _ambiguous(runs: Mapping[str, Sequence[Run]], root: Path, why: str) -> UsageError:
    """Return an error that lists the runs of each name, the newest first."""
    every = {run.folder: run for of_name in runs.values() for run in of_name}
    newest = sorted(every.values(), key=lambda run: str(run.manifest["created"]), reverse=True)
    has_models = len({run.model for run in newest}) > 1
    abouts = list(map(_about, newest))
    lines = []
    for run, about in zip(newest, abouts, strict=True):
        words = [run.model, about] if has_models else [about]
        if abouts.count(about) > 1:
            words.append(counted(len(run.manifest["documents"]), "task"))
        date = str(run.manifest["created"])[:19].replace("T", " ")
        lines.append(f"{run.manifest['id'][:_ID_SHOWN]} ({', '.join([*words, date])})")
    names = " and ".join(f"'{name}'" for name in runs)
    return SeveralRunsError(f"{names} {why} in {root}; name a run by its id", _shortened(lines))


def _shortened(lines: Sequence[str]) -> list[str]:
    return [*lines[:_MOST_LISTED], "…"] if len(lines) > _MOST_LISTED else [*lines]


def _about(run: Run) -> str:
    return ", ".join(filter(None, (run.suite, *settings_words(run))))


def _unknown(name: str, root: Path) -> EvalkitError:
    # Unlike `Path.exists`, false for a path that the file system rejects
    if os.path.exists(os.path.expanduser(name)):  # noqa: PTH110, PTH111
        return RunError(
            f"{name} is no run folder (it has no {MANIFEST}), and no run in {root} is of a checkpoint with its present "
            "files; evaluate it, or name a run by its id"
        )
    if not (stored := list(scan(root))):
        return UsageError(
            f"'{name}' is no run folder, and there are no runs in {root} (--in or --output of their command)"
        )
    begun = [run.folder.name for run in stored if any(known.startswith(name) for known in _names(run))]
    if begun:
        why = f"'{name}' is only the beginning of names of runs in {root}; name one of them"
        return SeveralRunsError(why, _shortened(begun))
    return UnknownNameError("run", name, [run.folder.name for run in stored])


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


def _has_name(run: Run | DamagedRun, given: str) -> bool:
    """Return whether a run is of the checkpoint with a name, or with the last parts of its path or name."""
    if isinstance(run, DamagedRun):
        return False
    name, local = given.rstrip("/"), run.manifest.get("path")
    return name in _names(run) or (local is not None and bool(name) and local.endswith(f"/{name}"))


def _names(run: Run | DamagedRun) -> set[str]:
    """Return the names of a run's folder and of its checkpoint, but not its path."""
    if isinstance(run, DamagedRun):
        return {run.folder.name}
    model = run.manifest["model"].rstrip("/")
    names = {run.folder.name, model, str(run.manifest.get("name") or model), _checkpoint_in(run)}
    if run.manifest.get("path") is None:  # of the hub: also without its revision, and with its commit
        hub = model.partition("@")[0]
        names |= {hub, f"{hub}@{run.manifest['revision']}"}
    return names | {name.rpartition("/")[2] for name in names}


def _begins(run: Run | DamagedRun, given: str) -> bool:
    """Return whether a text is the beginning of a run's id, or of its folder's name with more than its checkpoint."""
    if isinstance(run, DamagedRun):
        return run.folder.name.startswith(given)
    is_id = len(given) >= _LEAST_OF_ID and run.manifest["id"].startswith(given)
    return is_id or (run.folder.name.startswith(given) and given.startswith(f"{_checkpoint_in(run)}-"))


def _checkpoint_in(run: Run) -> str:
    """Return what the name of a run's folder has of its checkpoint, before suite and id."""
    name = run.folder.name.removesuffix(f"-{run.manifest['id']}")
    return name.rpartition(f"-{run.suite}-")[0] or name
