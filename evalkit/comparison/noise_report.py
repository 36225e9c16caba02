"""Noise in words, tables and a figure.

In: a `NoiseStudy`. Out: a `Report` with advice on which tasks and outcomes carry a decision, a table of variance
components and one of decisions; the figure, as a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import chain
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from evalkit.comparison.noise import CARRIED, LEAST_SIGNAL, NOT_CARRIED, OPEN, NoiseLine, NoiseStudy
from evalkit.comparison.sentences import unit_of
from evalkit.comparison.sides import autocorrelation_sentence
from evalkit.escape import counted
from evalkit.reporting import figures
from evalkit.reporting.decimals import fixed, percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.stats.noise import Bounded, variance_interval, window_freedom

_COMPONENTS = {
    "checkpoints": "SD between checkpoints",
    "seeds": "between seeds",
    "documents": "± documents",
    "paired": "± paired",
}
_DECISIONS = {
    "signal_to_noise": "signal / noise",
    "signal_to_seeds": "signal / seeds",
    "monotonicity": "monotonic",
    "decided": "decided as at the end, %",
    "larger": "as the larger, %",
}
_RATIO = partial(fixed, places=1)
_FORMS = {"monotonicity": partial(fixed, places=2), **dict.fromkeys(("decided", "larger"), partial(percent, places=0))}
_STATES = {CARRIED: "is carried by", NOT_CARRIED: "is not carried by", OPEN: "is not shown to be carried by"}
_LEAST, _MOST = 0.1, 100.0
"""Limits of the ratios in the figure."""


def noise_report(study: NoiseStudy, lines: dict[str, list[NoiseLine]]) -> Report:
    """Build the report of the noise under rules and outcomes, by key."""
    every = list(chain(*lines.values()))
    shown = [name for name in _COMPONENTS | _DECISIONS if not all(isnan(getattr(line, name).value) for line in every)]
    bodies: tuple[list[list[str]], list[list[str]]] = ([], [])
    ruled = set()
    for key, of_key in lines.items():
        unit = unit_of(study.pairing.measure(key), [line.documents.value for line in of_key])
        ruled.add(len(bodies[0]))
        for line in of_key:
            label = f"{study.label(line.task)}, {_title(study, key)}"
            parts = [_bounded(getattr(line, name), unit.error) for name in _COMPONENTS if name in shown]
            bodies[0].append([label, f"{line.n:,}", unit.value(line.score), *parts])
            parts = [_bounded(getattr(line, name), _FORMS.get(name, _RATIO)) for name in _DECISIONS if name in shown]
            bodies[1].append([label, *parts, line.carries])
    tables = []
    for name, titles, body in zip(("noise", "decisions"), (_COMPONENTS, _DECISIONS), bodies, strict=True):
        more, last = (["n", "score"], []) if name == "noise" else ([], ["carries"])
        headers = ["task, outcome", *more, *(title for key, title in titles.items() if key in shown), *last]
        tables.append(simple_table(name, headers, body, ruled=ruled))
    advice, notes = [*_advice(study, lines)], [*_notes(study, shown)]
    window = ", ".join(f"{step:,}" for step in study.steps[-study.last :])
    facts = (f"models: {', '.join(study.models)} ({counted(len(study.seeds), 'seed')} each)",
             f"checkpoints: the last {study.last} of {len(study.steps)} common steps, {window}")  # fmt: skip
    records = list(map(_record, every))
    by_step = [record | {"by_step": line.by_step} for record, line in zip(records, every, strict=True)]
    content = {"advice": advice, "models": study.models, "seeds": study.seeds, "steps": study.steps}
    content |= {"last": study.last, "lines": by_step, "notes": notes}
    return Report(tables, advice, facts, notes, content, records)


def _advice(study: NoiseStudy, lines: dict[str, list[NoiseLine]]) -> Iterator[str]:
    """Yield which tasks and outcomes carry a decision between these models, and what limits that claim."""
    states = []
    for state, words in _STATES.items():
        parts = []
        for key, of_key in lines.items():
            tasks = [study.label(line.task) for line in of_key if line.carries == state]
            listed = "all tasks" if len(tasks) == len(of_key) > 1 else ", ".join(tasks)
            parts += [f"{_title(study, key)} of {listed}"] if tasks else []
        states += [f"{words} {'; '.join(parts)}"] if parts else []
    yield f"A decision between these {len(study.models)} models {', and '.join(states)}."
    every = list(chain(*lines.values()))
    times = [line.seeds.value / line.checkpoints.value for line in every if line.checkpoints.value > 0]
    if len(study.seeds) > 1 and times:
        yield (f"The deviation between seeds is {fixed(median(times), 1)} times that between the last {study.last} "
               "checkpoints (median over tasks and outcomes): a claim about architectures needs seeds.")  # fmt: skip
    elif len(study.seeds) == 1:
        yield "One seed of each model does not show how other trainings would differ: a claim about them needs seeds."
    yield autocorrelation_sentence(study.last, [line.autocorrelation for line in every])


def _notes(study: NoiseStudy, shown: Sequence[str]) -> Iterator[str]:
    has_seeds = "seeds" in shown
    _, low, high = variance_interval(1.0, window_freedom(study.last)).root()
    yield (f"in brackets: 95 % intervals; {study.last} checkpoints of one training know a deviation to a factor of "
           f"{fixed(low, 1)} to {fixed(high, 1)}, whatever their autocorrelation; accuracy in points")  # fmt: skip
    deviations = "SD between checkpoints" + ", between seeds" * has_seeds
    yield (f"{deviations}: without what documents add; ± documents: error over others; ± paired: its part that models "
           "on the same documents do not share")  # fmt: skip
    yield ("signal / noise: largest difference between models by the SD of a training's last scores, over their means "
           "(2508.13144): of these models"
           + "; / seeds: by the SD of differences at a seed and step, over √2" * has_seeds)  # fmt: skip
    yield "monotonic: Spearman's correlation of score and step, positive where scores improve; least to greatest"
    yield "decided: pairs of models that a checkpoint before the last orders alike; interval: of other models"
    if study.left_out:
        yield f"left out: {counted(study.left_out, 'run')} of seeds or steps that not every model has"
    ratio = "signal / seeds" if has_seeds else "signal / noise"
    yield f"carries: {ratio} is above {fixed(LEAST_SIGNAL, 1)}, which equal models exceed in 5 % of pairs"


def _title(study: NoiseStudy, key: str) -> str:
    name = study.pairing.measure(key).name.partition(",")[0]
    return f"accuracy ({key})" if name == "accuracy" else name


def _bounded(number: Bounded, form: Any) -> str:
    return "–" if isnan(number.value) else f"{form(number.value)} ({form(number.low)} to {form(number.high)})"


def _record(line: NoiseLine) -> dict[str, Any]:
    record = dict[str, Any]()
    for name in (field.name for field in fields(line) if field.name != "by_step"):
        value = getattr(line, name)
        parts = zip(("", "_low", "_high"), value, strict=True) if isinstance(value, Bounded) else [("", value)]
        record |= {name + end: None if isinstance(part, float) and isnan(part) else part for end, part in parts}
    return record | {"carries": line.carries}


def draw_noise(study: NoiseStudy, lines: dict[str, list[NoiseLine]], path: Path) -> None:
    """Draw the ratios of signal and noise with their intervals, and the share of pairs decided by step."""
    tasks = list(dict.fromkeys(line.task for line in chain(*lines.values())))
    names = ["signal_to_noise", "signal_to_seeds"][: min(len(study.seeds), 2)]
    figure = figures.new_figure(4.2 * (1 + len(names)), 1.4 + 0.16 * len(tasks) * (1 + len(lines)))
    *panels, right = figure.subplots(1, 1 + len(names))
    for panel, name in zip(panels, names, strict=True):
        for number, of_key in enumerate(lines.values()):
            look = figures.line_look(number) | {"linestyle": "-", "markersize": 4}
            for line in (line for line in of_key if not isnan(getattr(line, name).value)):
                value, low, high = (min(max(part, _LEAST), _MOST) for part in getattr(line, name))
                height = -tasks.index(line.task) - 0.7 * (number + 0.5) / len(lines)
                panel.plot([low, value, high], [height] * 3, markevery=[1], linewidth=1.4, **look)
        panel.axvline(LEAST_SIGNAL, color=figures.GREY, linewidth=0.8, linestyle=(0, (2, 3)))
        panel.set(xscale="log", xlim=(_LEAST, _MOST), ylim=(-len(tasks), 0.3))
        panel.set_yticks([-row - 0.35 for row in range(len(tasks))], list(map(study.label, tasks)))
        panel.set_title(f"{_DECISIONS[name]}, 95 % interval", fontsize=9, loc="left")
        figures.style_axes(panel)
    for number, (key, of_key) in enumerate(lines.items()):
        shares, look = [100 * share for share in of_key[-1].by_step], figures.line_look(number)
        right.plot(study.steps, shares, label=_title(study, key), linewidth=1.3, markersize=3.5, **look)
    right.set_title(f"pairs of models decided as at the end, % ({study.label(tasks[-1])})", fontsize=9, loc="left")
    right.set(xlabel="step", ylim=(-4, 104))
    right.legend(frameon=False, fontsize=8)
    figures.style_axes(right, "y")
    figures.write_notes(figure, [f"dotted: {fixed(LEAST_SIGNAL, 1)}, above which a difference carries a decision"])
    figures.save_figure(figure, path)
