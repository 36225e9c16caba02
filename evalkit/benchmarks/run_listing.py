"""List of the runs of a folder: checkpoint, settings, date and result.

In: a folder of runs. Out: a `Report`, whose JSON and CSV have all fields. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.registry import kinds as known_kinds
from evalkit.errors import RunError
from evalkit.inputs.values import by_number
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import kinds, mixture
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.traits import documents_read, is_imported, origin_notes, unofficial_notes, windows_of_text

_ID_SHOWN = 7


@dataclass(frozen=True)
class ListedRun:
    """A run in the list. A damaged run has only its folder, its state and a note with the reason."""

    folder: str
    state: str
    """finished, interrupted, begun, damaged or benchmark not installed."""
    id: str = ""
    created: str = ""
    """Start time; ISO 8601."""
    model: str = ""
    """Checkpoint as named by the user."""
    path: str | None = None
    """Path of the checkpoint; None if it is from the hub or in memory."""
    revision: str | None = None
    suite: str = ""
    template: str = ""
    num_fewshot: int | None = None
    dtype: str = ""
    context: str = ""
    """Tokens and method of a context extension; empty without one."""
    windows: str = ""
    """Windows of a text; empty without one."""
    documents: str = ""
    """Which documents of each task are read; empty: all."""
    rule: str = ""
    score: float | None = None
    """Sort key of a finished run: its last average, a fraction; for lm-eval's tasks the first metric."""
    result: str = ""
    """Printed form of the score, with its standard error."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that computed a finished run."""
    imported: bool = False
    """Whether it was imported from another program's log, which has no journal."""
    journal: bool = True
    """Whether the journal exists; no table can be recomputed without it."""
    notes: tuple[str, ...] = ()
    """Errors and warnings."""

    @property
    def checkpoint(self) -> str:
        """Printed checkpoint: a path, relative to the current folder if it lies below it, or a name."""
        if not self.model:
            return Path(self.folder).name
        if self.path is None:
            return self.model
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def settings(self) -> str:
        """Settings that are not the default: examples, documents, context, origin."""
        shots = f"{self.num_fewshot}-shot" if self.num_fewshot else ""
        origin = "imported" if self.imported else ""
        return ", ".join(filter(None, (shots, self.documents, self.context, self.windows, origin)))


def list_found(root: Path, sort: str = "date", text: str = "") -> list[ListedRun]:
    """Return the runs under a folder.

    Args:
        root: folder of runs.
        sort: by date (newest last), name (of the folder), model (of the checkpoint, by step) or score (best first).
        text: only runs whose description contains each word of it; case is ignored.

    Raises:
        RunError: the folder cannot be read.
    """
    found = [_damaged(one.folder, one.why) if isinstance(one, DamagedRun) else _listed(one) for one in scan(root)]
    words = text.lower().split()
    chosen = [run for run in found if all(word in _described(run) for word in words)]
    orders: dict[str, Any] = {
        "date": lambda run: run.created,
        "name": lambda run: run.folder,
        "model": lambda run: by_number(run.checkpoint),
        "score": lambda run: float("inf") if run.score is None else -run.score,
    }
    return sorted(chosen, key=orders[sort])


def runs_report(runs: Sequence[ListedRun], root: Path, text: str = "") -> Report:
    """Return a report with one line for each run, and notes on errors and warnings below.

    Args:
        runs: the listed runs.
        root: the folder that was searched.
        text: the filter.
    """
    headers = ["id", "date", "suite", "dtype", "settings", "result", "checkpoint"]
    rows = [
        [
            run.id[:_ID_SHOWN],
            run.created[:10],
            f"{run.suite} {run.template}".strip(),
            run.dtype,
            run.settings,
            run.result or run.state,
            run.checkpoint,
        ]
        for run in runs
    ]
    # Empty columns are dropped to save width
    keep = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    kept_headers, kept_rows = [headers[c] for c in keep], [[row[c] for c in keep] for row in rows]
    none = f"none in {root}" + (f" with {text}" if text.strip() else "")
    notes = [f"{run.id[:_ID_SHOWN] or Path(run.folder).name}: {note}" for run in runs for note in run.notes]
    if kept := [run.id[:_ID_SHOWN] for run in runs if run.state == "finished" and not (run.journal or run.imported)]:
        notes.append(f"stored without a journal, so their tables cannot be recomputed: {', '.join(kept)}")
    content = [asdict(run) for run in runs]
    return Report(
        (simple_table("runs", kept_headers, kept_rows, texts=len(keep)),) if runs else (),
        verdict=() if runs else (none,),
        notes=tuple(notes),
        content=content,
        records=[{name: _one_value(value) for name, value in record.items()} for record in content],
    )


def _one_value(value: Any) -> Any:
    return "; ".join(value) if isinstance(value, (list, tuple)) else value


def _listed(run: Run) -> ListedRun:
    manifest, specification = run.manifest, run.manifest["specification"]
    extension = specification.get("context_extension")
    about: dict[str, Any] = {
        "folder": str(run.folder),
        "id": manifest["id"],
        "created": manifest["created"],
        "model": manifest["model"],
        "path": manifest.get("path"),
        "revision": manifest["revision"],
        "suite": specification["suite"],
        "template": run.template,
        "num_fewshot": specification.get("num_fewshot"),
        "dtype": specification["dtype"],
        "context": f"{extension['target']:,} by {extension['method']}" if extension else "",
        "documents": documents_read(specification),
        "windows": windows_of_text(specification),
        "rule": manifest["rule"],
        "journal": (run.folder / JOURNAL).is_file(),
        "imported": is_imported(manifest),
        "notes": (*origin_notes(manifest), *unofficial_notes(manifest)),
    }
    if not run.complete:
        return ListedRun(state="interrupted" if about["journal"] else "begun", **about)
    try:
        score, result = benchmark_of(run).headline(run)
    except RunError as error:
        state = "damaged" if run.kind in known_kinds() else "benchmark not installed"
        return ListedRun(state=state, **about | {"notes": (str(error), *about["notes"])})
    about |= {"devices": tuple(kinds(manifest)), "notes": (*about["notes"], *mixture(manifest))}
    return ListedRun(state="finished", score=score, result=result, **about)


def _damaged(folder: Path, why: str) -> ListedRun:
    return ListedRun(str(folder), "damaged", notes=(why,))


def _described(run: ListedRun) -> str:
    """Return the text that a filter searches, in lower case."""
    about = (
        run.state,
        run.id,
        run.created,
        run.model,
        run.revision,
        run.path,
        run.suite,
        run.template,
        run.dtype,
        run.settings,
    )
    return " ".join(map(str, (Path(run.folder).name, *about, run.rule))).lower()
