"""Finished runs in a page: results of each benchmark, each run, figures, and sources of documents.

Of each run: results under its rule, how its numbers move under others, subjects, and how it was made.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from evalkit.benchmarks.registry import results_of
from evalkit.errors import EvalkitError, RunError, UsageError
from evalkit.inspection.outcomes import TaskOutcomes, run_outcomes
from evalkit.models.loading.locate import silent
from evalkit.pages.page import PageFigure, Panel, svg_of
from evalkit.pages.tables import PageBenchmark, benchmark_report
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run
from evalkit.runs.notes import notes_of_runs, run_notes
from evalkit.runs.traits import (
    caveat_mark,
    is_imported,
    traits,
)
from evalkit.suites.templates import Piece


def result_panels(benchmark: PageBenchmark, number: int) -> tuple[list[Panel], list[Panel]]:
    """Return the panels of a benchmark's results and of its single runs; a run that has none beside it is a result."""
    runs = list(map(_run_panel, benchmark.runs, benchmark.names))
    if len(runs) < 2:
        return runs, []
    folded = Panel(f"runs-{number}", f"{len(runs)} runs of {benchmark.title}", panels=tuple(runs))
    return [Panel(f"table-{number}", benchmark.title, (benchmark_report(benchmark),))], [folded]


def by_suite(runs: Sequence[Run]) -> dict[tuple[str, str], list[int]]:
    """Return (kind, suite) → numbers of its runs, in the order of the first of each."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, run in enumerate(runs):
        numbers.setdefault((run.kind, run.suite), []).append(number)
    return numbers


def _run_panel(run: Run, name: str) -> Panel:
    run.require_finished()
    results = results_of(run)
    report = results.report()
    detailed = results.report(detail=True)
    shown, address = [table.name for table in report.tables], f"run-{anchor(str(run.manifest['id']))}"
    subjects = tuple(table for table in detailed.tables if table.name not in shown)
    panels = (Panel(f"{address}-detail", "In detail", (Report(subjects),)),) if subjects else ()
    title = name if name.endswith(f" on {run.suite}") else f"{name}: {run.suite}"
    return Panel(address, title, (report,), panels=(*panels, _provenance_panel(run, f"{address}-made")))


def figure_panels(runs: Sequence[Run], names: Sequence[str], models: Sequence[str] = ()) -> tuple[Panel, ...]:
    """Return a panel with the figures of each benchmark that has any; those that cannot be drawn are named."""
    panels = []
    for kind in dict.fromkeys(run.kind for run in runs):
        members = [each for each in zip(runs, names, models or names, strict=True) if each[0].kind == kind]
        address, figures, problems = f"figures-{anchor(kind)}", [], []
        try:
            drawn = results_of(members[0][0]).figures(*zip(*members, strict=True))
        except EvalkitError as error:
            drawn, problems = [], [f"the figures cannot be drawn: {error}"]
        for figure in drawn:
            try:
                figures.append(PageFigure(f"{address}-{figure.name}", figure.words, svg_of(figure.draw)))
            except EvalkitError as error:
                problems.append(f"{figure.name}: not drawn, {error}")
        if figures or problems:
            reports = (Report((), notes=problems),) if problems else ()
            panels.append(Panel(address, f"Figures of {kind}", reports, tuple(figures)))
    return tuple(panels)


def anchor(text: str) -> str:
    """Return a text with hyphens in place of what an anchor may not contain."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def _provenance_panel(run: Run, name: str) -> Panel:
    settings = simple_table("settings", ["setting", "value"], _settings(run), texts=2)
    report = Report((settings, _documents_table(run)), notes=run_notes(run.manifest))
    template, prompts = run.manifest["template"], []
    if isinstance(template, Mapping) and template.get("parts"):  # with its placeholders
        pieces = tuple(Piece(str(part["segment"]), str(part["text"])) for part in template["parts"])
        prompts.append((f"Template {template['name']}", pieces))
    return Panel(name, "How it was made", (report,), prompts=(*prompts, *_example(run)))


def _example(run: Run) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Yield the prompt of the run's first document, with its gold choice, if it can be read."""
    tasks: list[TaskOutcomes] = []
    with suppress(EvalkitError):
        tasks = list(run_outcomes(run, tuple(run.manifest["documents"])[:1], None, silent))
    for document in [document for task in tasks for document in task.documents.values()][:1]:
        name = " document ".join(document.key)
        if text := document.text:
            yield f"{name} with its gold choice", (*text.common, *text.choices[document.gold])
        elif document.answer and document.answer.prompt:
            yield name, document.answer.prompt


def _settings(run: Run) -> list[tuple[str, str]]:
    manifest, loaded, template = run.manifest, run.manifest.get("loaded") or {}, run.manifest["template"]
    part_of = "" if is_imported(manifest) else "fingerprint of its "
    parameters, window = loaded.get("parameters"), manifest.get("context") or loaded.get("window")
    imported = manifest.get("imported", {}).get("files", {})
    described = template if isinstance(template, Mapping) else {}
    versions = manifest["versions"]  # these are listed together
    made = [(name, trait) for name, trait in traits(run).items() if name.removesuffix(" version") not in versions]
    settings = [
        ("name", manifest.get("name")),
        ("checkpoint", manifest["model"]),
        ("revision", manifest["revision"]),
        *((part_of + part, digest) for part, digest in manifest["specification"]["checkpoint"].items()),
        *(("imported file", f"{name}, SHA-256 {digest}") for name, digest in imported.items()),
        ("architecture", loaded.get("architecture")),
        ("parameters", parameters and f"{parameters:,}"),
        ("context window", window and f"{window:,} tokens"),
        ("suite", run.suite),
        *(("documents", trait.words) if name == "limit" else (name, trait.value) for name, trait in made),
        ("template's description", described.get("description")),
        ("system prompt", described.get("system")),
        ("versions", ", ".join(f"{package} {version}" for package, version in versions.items())),
        ("date", manifest["created"]),
        ("command", shlex.join(map(str, manifest.get("command") or ()))),
        ("run", manifest["id"]),
        ("folder", run.folder),
    ]
    return [(name, str(value)) for name, value in settings if value]


def _documents_table(run: Run) -> Table:
    results, seconds, rows = results_of(run), dict[str, float](), []
    with suppress(RunError):  # they are not stored
        seconds = run.seconds
    counts = {metric.task: metric.n for metric in reversed(results.metrics())}
    for task, source in run.manifest["documents"].items():
        shown = f"{counts[task]:,}" if task in counts else "–"
        of_all = "–" if source["total"] is None else f"{source['total']:,}"
        numbers = [shown, of_all, fixed(seconds.get(task), 1)]
        rows.append([_label(run, task), str(source["source"]), *numbers])
    for task, source in run.manifest.get("examples", {}).items():
        label = f"{results.label(task).full}: solved examples"
        rows.append([label, str(source["source"]), "", f"{source['total']:,}", ""])
    headers = ["task", "source of the documents", "n", "of", *(["seconds"] if seconds else [])]
    return simple_table("documents", headers, [row[: len(headers)] for row in rows], texts=2)


def _label(run: Run, task: str) -> str:
    return results_of(run).label(task).full + caveat_mark(run.manifest, [task])


class Licence(NamedTuple):
    """Licence of a dataset: its name, its text or the authors' page that names it, whom to credit, and its limits."""

    name: str
    url: str
    authors: str
    limits: str = ""


LICENCES = {
    "allenai/winogrande": Licence("CC BY", "https://github.com/allenai/winogrande#license", "Sakaguchi et al. 2019"),
    "allenai/ai2_arc": Licence("CC BY-SA 4.0", "https://creativecommons.org/licenses/by-sa/4.0/", "Clark et al. 2018"),
    "Rowan/hellaswag": Licence("MIT", "https://github.com/rowanz/hellaswag", "Zellers et al. 2019",
                               "texts from WikiHow have a licence of their own"),
    "baber/piqa": Licence("AFL 3.0", "https://opensource.org/license/afl-3-0-php", "Bisk et al. 2019"),
    "aps/super_glue": Licence("CC BY-SA 3.0", "https://creativecommons.org/licenses/by-sa/3.0/", "Clark et al. 2019",
                              "for BoolQ"),
    "cais/mmlu": Licence("MIT", "https://github.com/hendrycks/test/blob/master/LICENSE", "Hendrycks et al. 2020"),
    "THUDM/LongBench": Licence("MIT", "https://github.com/THUDM/LongBench/blob/main/LICENSE", "Bai et al. 2023",
                               "for the collection; its parts have licences of their own"),
}  # fmt: skip
"""Repository on the hub → licence."""


def sources_panel(runs: Sequence[Run]) -> Panel:
    """Return the panel that names dataset, source and licence of every task, for those whose licence asks for it."""
    rows: dict[tuple[str, ...], None] = {}
    for run in runs:
        for task, source in run.manifest["documents"].items():
            rows[_label(run, task), *_dataset(run, task), str(source["source"])] = None
    headers = ["task", "dataset", "authors", "licence", "page", "source used"]
    table = simple_table("sources", headers, list(rows), texts=len(headers))
    notes = notes_of_runs((run.model, run.manifest) for run in runs)
    return Panel("sources", "Sources and licences of the documents", (Report((table,), notes=notes),))


def _dataset(run: Run, task: str) -> tuple[str, str, str, str]:
    """Return a task's dataset, its authors, its licence, and the licence's page."""
    split = None
    with suppress(UsageError):  # of lm-eval's tasks the dataset is not known
        split = results_of(run).dataset(task)
    if split is None:
        return "–", "–", "see the source", "–"
    described = ", ".join(part for part in (split.path, split.config, split.split) if part)
    unknown = Licence("see the dataset's page", f"https://huggingface.co/datasets/{split.path}", "–")
    licence = LICENCES.get(split.path, unknown)
    name = licence.name + f" ({licence.limits})" * bool(licence.limits)
    return described, licence.authors, name, licence.url
