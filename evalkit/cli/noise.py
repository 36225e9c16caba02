"""`evalkit noise`: how far a study's scores vary between checkpoints, between seeds and over documents."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from evalkit.cli.parameters import argument, command, option, typed_option
from evalkit.cli.running import BENCHMARK, PLOT, STUDY_IN, Printer
from evalkit.display import doing
from evalkit.errors import UsageError


@command()
def noise(
    *,
    study: Path = argument(metavar="STUDY"),
    names: tuple[str, ...] = argument(metavar="[NAME]...", required=False),
    last: int = option(5, "Checkpoints of each training that count, up to its last.", least=2, shows_least=True),
    larger: tuple[str, ...] = typed_option((), "A model and the same one at a larger size; again for each model.",
                                           metavar="NAME=NAME", repeated=True),
    benchmark: str | None = BENCHMARK,
    rule: str | None = option(None, "How the answer is chosen (evalkit ls rules).", "the runs' own"),
    outcome: str | None = option(None, "Only this one (evalkit ls outcomes).", "all", metavar="NAME"),
    root: Path | None = STUDY_IN,
    printer: Printer,
    plot: Path | None = PLOT,
) -> None:  # fmt: skip
    """Measure the noise of a study's scores, and which tasks and outcomes carry a decision between its models.

    STUDY is a YAML file whose checkpoints have `steps`; NAMES are some of them. For each task and outcome: deviations
    between the last checkpoints of a training, between seeds, and over documents; the signal-to-noise ratio of these
    models; whether scores improve with the step; and how often a pair of models is decided as at the last step, or as
    at a larger size. All have 95 % intervals.

    \b
    evalkit noise study.yaml --plot noise.pdf
    evalkit noise study.yaml --last 10 --outcome bits_per_byte --format latex
    evalkit noise study.yaml --larger vanilla=vanilla-1b --larger intg=intg-1b
    """
    from evalkit.comparison.noise import NoiseStudy
    from evalkit.comparison.noise_report import draw_noise, noise_report
    from evalkit.runs.continuous import outcome_key, with_default_rule
    from evalkit.studies.results import read_results, study_trainings

    sizes = {small: large for small, _, large in (text.partition("=") for text in larger)}
    if len(sizes) < len(larger) or not all(chain(*sizes.items())):
        raise UsageError(f"--larger {' --larger '.join(larger)}: write SMALL=LARGE, once for each model")
    with doing("reading and measuring runs"):
        results = read_results(study, root)
        measured, by_model = results.study.benchmark(benchmark), dict[str, dict[int, dict[int, Any]]]()
        trainings = study_trainings(results, names and [*dict.fromkeys((*names, *chain(*sizes.items())))], measured)
        for of in trainings:
            by_model.setdefault(of.model, {})[of.seed or 1] = dict(zip(of.steps, of.side.runs, strict=True))
        content = NoiseStudy(by_model, last, sizes)
        keys = content.keys(with_default_rule(outcome_key(outcome, rule), measured.rule))[: 1 if outcome else None]
        lines = {key: content.lines(key) for key in keys}
        report = noise_report(content, lines)
    printer(report.with_notes([note for training in trainings for note in training.notes]))
    if plot:
        draw_noise(content, lines, plot)
