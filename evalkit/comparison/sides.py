"""Sides of a comparison, and the claim that it supports.

In: references to runs and groups, as on the command line. Out: `Side`s of finished runs with unique names, and no run
twice; and a `Claim`: about checkpoints, settings, or, with several seeds of each side, architectures.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import median
from typing import TypeAlias

from evalkit.benchmarks.differences import differences
from evalkit.comparison.naming import settings_words
from evalkit.errors import CheckpointError, UsageError
from evalkit.escape import counted, printable
from evalkit.inputs.reading import MOST_TEXT_BYTES, read_json
from evalkit.reporting.decimals import fixed
from evalkit.runs.finding import is_generic
from evalkit.runs.folder import Run
from evalkit.runs.traits import Trait, checkpoint_of, model_differences, same_checkpoint
from evalkit.stats.noise import Bounded, independent_checkpoints

_STEP = re.compile(r"(?:global_?step|step|iter(?:ation)?|checkpoint|ckpt)[-_= ]?(\d+)([kKmM]?)(?![0-9a-zA-Z])")
_SCALE = {"": 1, "k": 1_000, "m": 1_000_000}


_SEED = re.compile(r"seed[-_= ]?(\d+)")
_SUBJECTS = {"limit": "sample", "quantisation": "rounding", "scoring version": "evalkit version"}
_SUBJECTS |= dict.fromkeys(("template", "template's text", "prompts", "solved examples", "prompt tokens"), "prompt")
"""Setting → what a claim is about, if two sides differ in it."""


def check_pairs(a: Side, b: Side) -> None:
    """Raise `UsageError` if the n-th runs of two sides cannot have the same seed, by their number or their names."""
    if len(a.runs) != len(b.runs) or a.marks != b.marks:
        counts = (f"{side.name} has {counted(len(side.runs), 'run')}" for side in (a, b))
        raise UsageError(f"seeds in pairs need the same seeds on both sides: {' and '.join(counts)}")
    for pair in zip(a.runs, b.runs, strict=True):
        numbers = {int(seeds[-1]) for run in pair if (seeds := _SEED.findall(str(run.manifest["model"])))}
        if len(numbers) > 1:
            names = " and ".join(run.folder.name for run in pair)
            raise UsageError(f"seeds in pairs: {names} have different seeds; name the runs of all sides in one order")


def step_in(text: str) -> int | None:
    """Return the training step in a name ("step1000", "checkpoint-500", "iter_20k"), the last of several; else None."""
    steps = _STEP.findall(text)
    return int(steps[-1][0]) * _SCALE[steps[-1][1].lower()] if steps else None


def step_of(run: Run) -> int | None:
    """Return a run's step, from its checkpoint's revision, trainer_state.json or name; None if none has it."""
    revision, model = str(run.manifest.get("revision") or ""), str(run.manifest["model"])
    steps = (step_in(revision), step_of_checkpoint(model), step_in(run.folder.name))
    return next((step for step in steps if step is not None), None)


def step_of_checkpoint(model: str) -> int | None:
    """Return the step of a checkpoint folder or name, from its trainer_state.json or its last part; else None."""
    path = Path(model) / "trainer_state.json"
    # Not there: not a checkpoint of transformers' trainer, or no longer on this machine
    with suppress(CheckpointError, ValueError, KeyError, TypeError, OverflowError):
        return int(read_json(path, CheckpointError, most=MOST_TEXT_BYTES)["global_step"])
    return step_in(model.rstrip("/").rpartition("/")[2])


def steps_of(runs: Sequence[Run]) -> list[int] | None:
    """Return the runs' steps; None if any run has none."""
    steps = [step_of(run) for run in runs]
    return [step for step in steps if step is not None] if None not in steps else None


@dataclass(frozen=True)
class Side:
    """A side of a comparison: a name, and one run, or several seeds or checkpoints of the same thing."""

    name: str
    runs: tuple[Run, ...]
    marks: tuple[str, ...] = ()
    """What the name of each run adds to that of the side, such as " seed 2"; empty where only the side is shown."""
    each: int = 1
    """Consecutive runs whose mean is one score: the last checkpoints of one training after the other."""

    @property
    def trainings(self) -> int:
        return len(self.runs) // self.each


Group: TypeAlias = tuple[str, Sequence[Run]]


def trainings_of(singles: Sequence[Run], groups: Sequence[Group]) -> list[Side]:
    """Return the trainings of a curve: all single runs are one training, and each group is one."""
    trainings = list(groups)
    if singles:
        folders = {str(run.manifest["model"]).rstrip("/").rpartition("/")[0].rpartition("/")[2] for run in singles}
        common = folders.pop() if len(folders) == 1 else ""
        trainings.insert(0, (printable(common or "training"), singles))
    if not trainings:
        raise UsageError("name the runs of a training's checkpoints: evalkit compare --curve RUN RUN RUN")
    return sides_of([], trainings)


def read_group(text: str) -> tuple[str, list[str]]:
    """Return name and run references of a group, "NAME=run,run,…"."""
    name, _, listed = text.partition("=")
    runs = [part.strip() for part in listed.split(",") if part.strip()]
    if not (name.strip() and runs):
        raise UsageError(f"--group {text}: write it as NAME=RUN,RUN,…")
    return printable(name.strip()), runs


def sides_of(singles: Sequence[Run], groups: Sequence[Group], single_names: Sequence[str] = ()) -> list[Side]:
    """Return sides in their order: single runs, under these names or their own, then groups; none twice."""
    if empty := [name for name, runs in groups if not runs]:
        raise UsageError(f"group {empty[0]} has no runs; name one or more")
    sides = [Side(name, (run,), ("",)) for name, run in zip(single_names or names(singles), singles, strict=True)]
    sides += [Side(name, tuple(runs), tuple(f" {n + 1}" for n in range(len(runs)))) for name, runs in groups]
    check_unique(sides)
    return sides


def last_checkpoints(side: Side, last: int) -> Side:
    """Return a side of the last checkpoints of one training, whose mean counts.

    Raises `UsageError` if a run has no step, two have the same one, or there are fewer runs.
    """
    steps = steps_of(side.runs)
    if steps is None or len(set(steps)) < len(steps) or len(steps) < last:
        listed = "unknown" if steps is None else ", ".join(f"{step:,}" for step in sorted(steps))
        raise UsageError(
            f"group {side.name}: --last {last} needs as many checkpoints of one training, each of another step; the "
            f"steps are {listed}"
        )
    runs = [run for _, run in sorted(zip(steps, side.runs, strict=True), key=lambda pair: pair[0])]
    return Side(side.name, tuple(runs[-last:]), each=last)


def check_unique(sides: Sequence[Side]) -> None:
    """Raise `UsageError` if a run or a side's name occurs twice."""
    runs = {run.manifest["id"]: run.folder.name for side in sides for run in side.runs}
    ids = [run.manifest["id"] for side in sides for run in side.runs]
    if twice := [identity for identity in ids if ids.count(identity) > 1]:
        why = "one checkpoint under the same settings, so that nothing can differ"
        raise UsageError(f"two sides are one run, {runs[twice[0]]}: {why}; remove one")
    names_of_sides = [side.name for side in sides]
    if alike := [name for name in names_of_sides if names_of_sides.count(name) > 1]:
        raise UsageError(f"two sides are called '{alike[0]}'; give the groups different names")


def names(runs: Sequence[Run]) -> list[str]:
    """Return a unique name for each run: its model, with the settings that distinguish runs of models of that name."""
    models, settings = _model_names(runs), list(map(settings_words, runs))
    unique = []
    for model, mine in zip(models, settings, strict=True):
        alike = zip(*(theirs for other, theirs in zip(models, settings, strict=True) if other == model), strict=True)
        differing = [value for value, values in zip(mine, alike, strict=True) if value and len(set(values)) > 1]
        unique.append(printable(" ".join([model, *differing])))
    ids = [run.manifest["id"] for run in runs]
    return [name if unique.count(name) == 1 else f"{name} {ids[n]}" for n, name in enumerate(unique)]


def _model_names(runs: Sequence[Run]) -> list[str]:
    """Return each run's given name, or the last parts of its checkpoint's path, as many as tell checkpoints apart.

    A seed, a step or a common word is no name without its parent.
    """
    paths = [tuple(part for part in str(run.manifest["model"]).split("/") if part) for run in runs]
    shown = []
    for run, path in zip(runs, paths, strict=True):
        others = [other for other in paths if other != path]
        counts = range(1, len(path) + 1)
        named = (path[-n:] for n in counts if not (is_generic(path[-n]) or step_in(path[-n]) is not None))
        count = len(next(named, path[-2:]))
        count = next((n for n in counts if n >= count and all(other[-n:] != path[-n:] for other in others)), count)
        shown.append(run.manifest.get("name") or "/".join(path[-count:]) or run.folder.name)
    return shown


@dataclass(frozen=True)
class Claim:
    """Subject of a comparison."""

    kind: str
    """checkpoints, setting, architectures, trainings, or mixed."""
    sentence: str
    settings: Mapping[str, tuple[str, str]]
    """Setting that differs besides the checkpoint → (A's values, B's); several values if a side's own runs differ."""
    caution: str = ""
    """First sentence of every verdict, where A and B differ in more than the checkpoint; else empty."""


def claim_of(a: Side, b: Side, in_pairs: bool = False) -> Claim:
    """Return the claim that a difference between two sides, or their pairs of runs, supports.

    Raises:
        UsageError: the runs of one side differ in more than their checkpoint.
    """
    for side in (a, b):
        if pair := same_checkpoint(side.runs):
            runs = " and ".join(run.folder.name for run in pair)
            raise UsageError(f"group {side.name}: runs {runs} have the same checkpoint; remove one")
        check_uniform(side)
    settings, refused = _differing(a, b)
    together = [name for name in refused if _subject(name) != "sample"]
    subjects = list(dict.fromkeys(map(_subject, together)))
    listed = ", ".join(f"{name} ({' | '.join(settings[name])})" for name in together)
    samples = [" | ".join(settings[name]) for name in refused if _subject(name) == "sample"]
    of_common = f" Only the common documents of two samples are compared ({samples[0]})." if samples else ""
    if {checkpoint_of(run) for run in a.runs} == {checkpoint_of(run) for run in b.runs}:
        others = [name for name in settings if _subject(name) != "sample"]
        what = f"the {_joined(subjects)}" if subjects else _joined(others) or "its location"
        sentence = f"The claim is about {what}, not about models: {a.name} and {b.name} are the same checkpoint"
        sentence += (f" under {listed}." if listed else ".") + of_common
        return Claim("setting", sentence, settings, sentence)
    caution = of_common.lstrip()
    if subjects:
        about = _joined(["checkpoint", *subjects])
        caution = f"The claim is about {about} together: {a.name} and {b.name} differ in {listed}.{of_common}"
    counts, last = (a.trainings, b.trainings), a.each
    few = "; with two pairs" if in_pairs else "; with two seeds of a side"
    few = f"{few} the spread is hardly known, so only large differences show" if 2 in counts else ""
    if counts == (1, 1) and last > 1:
        kind, covered = "trainings", "the errors cover other documents, not other trainings"
        sentence = f"The claim is about the means of these {last} checkpoints of two trainings: {covered}"
        sentence += "; a claim about training noise needs seeds."
    elif counts == (1, 1):
        kind, about = "checkpoints", "These are two single" if caution else "The claim is about these two"
        unknown = "could score differently, and one run does not show by how much"
        sentence = f"{about} checkpoints: another seed of either {unknown}."
    elif 1 in counts:
        alone, many = (a, b) if counts[0] == 1 else (b, a)
        what = "training" if last > 1 else "checkpoint"
        kind, about = "mixed", f"{many.name} ({max(counts)} runs) and this one {what} of {alone.name}"
        limit = f"it does not extend to other seeds of {alone.name}, since one run does not show their spread{few}"
        sentence = f"The claim is about {about}; {limit}."
    elif last == 1 and any(
        steps is not None and len(set(steps)) == len(steps) for steps in map(steps_of, (a.runs, b.runs))
    ):
        kind, about = "trainings", f"checkpoints of one training ({counts[0]} and {counts[1]})"
        limit = "their spread replaces the spread between seeds, and is likely smaller"
        sentence = f"The runs of a side are {about}, so the claim is about these trainings: {limit}."
    else:
        seeds = f"{counts[0]} pairs" if in_pairs else f"{counts[0]} and {counts[1]}"
        kind, errors = "architectures", f"other seeds ({seeds} here) and other documents"
        sentence = f"The claim is about two architectures: the errors cover {errors}{few}."
        sentence += f" A seed's score is the mean of its last {last} checkpoints." * (last > 1)
    return Claim(kind, sentence, settings, caution)


def autocorrelation_sentence(last: int, estimates: Sequence[Bounded]) -> str:
    """Return how many independent checkpoints the last ones are worth, for the median of estimated autocorrelations."""
    if not (known := [estimate for estimate in estimates if not isnan(estimate.value)]):
        return f"{last} checkpoints do not show their autocorrelation: too few for a statement about training noise."
    value, low, high = map(median, zip(*known, strict=True))
    count, most, least = (independent_checkpoints(last, number) for number in (value, low, high))
    words = f"Neighbouring checkpoints correlate by {fixed(value, 2)} ({fixed(low, 2)} to {fixed(high, 2)}), so {last} "
    words += f"are worth {fixed(count, 1)} ({fixed(least, 1)} to {fixed(most, 1)}) independent checkpoints"
    return words + (": too few for a statement about training noise." if least < last / 2 else ".")


def check_uniform(side: Side, may_differ: Collection[str] = ()) -> None:
    """Raise `UsageError` if the runs of a side have different models, or settings other than those that may differ."""
    first = side.runs[0]
    for run in side.runs[1:]:
        models = model_differences(first, run)
        differing = list(models)
        for mine, theirs in differences(first, run):
            if mine.refused and mine.name not in ("rule", *may_differ):
                differing.append(f"{mine.name} ({mine.value} and {theirs.value})")
        if differing:
            mixed = f"group {side.name} mixes {'models' if models else 'settings'}"
            raise UsageError(f"{mixed}: {first.folder.name} and {run.folder.name} differ in {', '.join(differing)}")


def _joined(words: Sequence[str]) -> str:
    """Return "a", "a and b", or "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _subject(setting: str) -> str:
    """Return what a claim is about, if two sides differ in a setting."""
    return "prompt" if setting.startswith("examples of ") else _SUBJECTS.get(setting, setting)


def _differing(a: Side, b: Side) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the settings that differ between any two runs → (A's values, B's); and those that tables refuse."""
    # Of each run the settings that differ from those of A's first; the rule is the same for all runs of a comparison
    of_a, of_b = ([differences(a.runs[0], run) for run in side.runs] for side in (a, b))
    of_first = {mine.name: mine.value for pairs in of_a + of_b for mine, _ in pairs if mine.name != "rule"}

    def values(of_runs: list[list[tuple[Trait, Trait]]], name: str) -> str:
        others = [{theirs.name: theirs.value for _, theirs in pairs} for pairs in of_runs]
        return ", ".join(dict.fromkeys(of_run.get(name, of_first[name]) for of_run in others))

    refused = {mine.name for pairs in of_a + of_b for mine, _ in pairs if mine.refused}
    settings = {name: (values(of_a, name), values(of_b, name)) for name in of_first}
    return settings, [name for name in settings if name in refused]
