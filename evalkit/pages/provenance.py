"""How a run was made, and the sources of its documents. In: finished runs. Out: `Panel`s."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from evalkit.benchmarks.document_views import AnswerView, ChoiceView, Piece
from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import EvalkitError, RunError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.pages.page import Panel
from evalkit.reporting.decimals import fixed
from evalkit.reporting.report import Report
from evalkit.reporting.table import Table, simple_table
from evalkit.runs.folder import Run
from evalkit.runs.traits import caveats, is_imported, mixture, origin_notes, traits, unofficial_notes


def provenance_panel(run: Run, name: str) -> Panel:
    """Return the panel of a finished run's settings, documents and template; `name` is its anchor."""
    settings = simple_table("settings", ["setting", "value"], list(_settings(run)), texts=2)
    marked = (f"*: {note}" for note in unofficial_notes(run.manifest))
    notes = (*origin_notes(run.manifest), *marked, *mixture(run.manifest))
    report = Report((settings, _documents_table(run)), notes=notes)
    return Panel(name, "How it was made", (report,), prompts=(*_template(run.manifest), *_example(run)))


def _example(run: Run) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Yield the prompt of the run's first document, with its gold choice, if it can be read."""
    tasks = tuple(run.manifest["documents"])[:1]
    try:
        view = next(iter(benchmark_of(run).views(run, tasks, silent)), None)
    except EvalkitError:
        return
    if isinstance(view, ChoiceView) and view.texts:
        first = view.scores.iloc[0]
        gold, key = int(first["gold"]), (str(first["subtask"]), int(first["doc_id"]))
        if (text := view.texts.get(key)) is not None:
            yield f"{key[0]} document {key[1]} with its gold choice", (*text.common, *text.choices[gold])
    elif isinstance(view, AnswerView) and view.documents and view.documents[0].prompt:
        document = view.documents[0]
        yield f"{document.subtask} document {document.id}", document.prompt


def _settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and value of each setting, from the checkpoint to the run's folder."""
    manifest, loaded = run.manifest, run.manifest.get("loaded") or {}
    yield "checkpoint", str(manifest["model"])
    if revision := manifest["revision"]:
        yield "revision", str(revision)
    for part, fingerprint in manifest["specification"]["checkpoint"].items():
        yield part if is_imported(manifest) else f"fingerprint of its {part}", str(fingerprint)
    for name, digest in manifest.get("imported", {}).get("files", {}).items():
        yield "imported file", f"{name}, SHA-256 {digest}"
    if architecture := loaded.get("architecture"):
        yield "architecture", str(architecture)
    if parameters := loaded.get("parameters"):
        yield "parameters", f"{parameters:,}"
    if window := manifest.get("context") or loaded.get("window"):
        yield "context window", f"{window:,} tokens"
    yield "suite", run.suite
    versions = {f"{package} version" for package in manifest["versions"]}  # these are listed together
    for name, trait in traits(run).items():
        if name == "limit":
            yield "documents", trait.words
        elif trait.value and name not in versions:
            yield name, trait.value
    if isinstance(template := manifest["template"], Mapping):
        names = {"description": "template's description", "system": "system prompt"}
        yield from ((words, str(template[key])) for key, words in names.items() if template.get(key))
    yield "versions", ", ".join(f"{package} {version}" for package, version in manifest["versions"].items())
    yield "date", str(manifest["created"])
    if command := manifest.get("command"):
        yield "command", shlex.join(map(str, command))
    yield "run", str(manifest["id"])
    yield "folder", str(run.folder)


def _documents_table(run: Run) -> Table:
    """Return the table of the tasks: source, number of documents, and time."""
    benchmark = benchmark_of(run)
    try:
        seconds = run.seconds
    except RunError:  # they are not stored
        seconds = {}
    counts: dict[str, int] = {}
    for metric in benchmark.metrics(run):
        counts.setdefault(metric.task, metric.n)
    rows = []
    for task, source in run.manifest["documents"].items():
        label = benchmark.label(run, task).full + "*" * bool(caveats(run.manifest, task))
        count = f"{counts[task]:,}" if task in counts else "–"
        rows.append([label, str(source["source"]), count, f"{source['count']:,}", fixed(seconds.get(task), 1)])
    for task, source in run.manifest.get("examples", {}).items():
        label = f"{benchmark.label(run, task).full}: solved examples"
        rows.append([label, str(source["source"]), "", f"{source['count']:,}", ""])
    headers = ["task", "source of the documents", "n", "of", *(["seconds"] if seconds else [])]
    return simple_table("documents", headers, [row[: len(headers)] for row in rows], texts=2)


def _template(manifest: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Yield the template's name and text, with its placeholders, if the manifest has it."""
    template = manifest["template"]
    if isinstance(template, Mapping) and template.get("parts"):
        pieces = tuple(Piece(str(part["segment"]), str(part["text"])) for part in template["parts"])
        yield f"Template {template['name']}", pieces


class Licence(NamedTuple):
    """Licence of a dataset."""

    name: str
    url: str
    """The licence's text, or the page of the authors that names it."""
    authors: str
    """Who to credit."""
    limits: str = ""
    """What the licence does not cover."""


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
            label = benchmark_of(run).label(run, task).full + "*" * bool(caveats(run.manifest, task))
            rows[label, *_dataset(run, task), str(source["source"])] = None
    headers = ["task", "dataset", "authors", "licence", "page", "source used"]
    table = simple_table("sources", headers, list(rows), texts=len(headers))
    notes = ("*: not the official documents of the task",) * any(label.endswith("*") for label, *_ in rows)
    return Panel("sources", "Sources and licences of the documents", (Report((table,), notes=notes),))


def _dataset(run: Run, task: str) -> tuple[str, str, str, str]:
    """Return a task's dataset, its authors, its licence, and the licence's page."""
    try:
        split = benchmark_of(run).dataset(run, task)
    except UsageError:  # of lm-eval's tasks the dataset is not known
        split = None
    if split is None:
        return "–", "–", "see the source", "–"
    described = ", ".join(part for part in (split.path, split.config, split.split) if part)
    if (licence := LICENCES.get(split.path)) is None:
        return described, "–", "see the dataset's page", f"https://huggingface.co/datasets/{split.path}"
    name = f"{licence.name} ({licence.limits})" if licence.limits else licence.name
    return described, licence.authors, name, licence.url
