"""The runs of a folder as a list: of which checkpoint, how measured, when, and what came out.

In: a folder of runs. Out: a `Report`; JSON and CSV have everything. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evalkit.benchmarks.registry import benchmark_of
from evalkit.errors import RunError
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.batch_devices import kinds, mixture
from evalkit.runs.finding import DamagedRun, scan
from evalkit.runs.folder import JOURNAL, Run
from evalkit.runs.traits import unofficial_notes

_ID_SHOWN = 7


@dataclass(frozen=True)
class ListedRun:
    """What is listed of a run. Of a damaged one only the folder is known, and why."""

    folder: str
    state: str
    """finished, interrupted, begun or damaged."""
    id: str = ""
    created: str = ""
    """When it was begun; ISO 8601."""
    model: str = ""
    """Its checkpoint as it was named."""
    path: str | None = None
    """Where that lies; None of a checkpoint of the hub."""
    revision: str | None = None
    suite: str = ""
    template: str = ""
    num_fewshot: int | None = None
    dtype: str = ""
    context: str = ""
    """Tokens and method of an extension; empty for a model's own window."""
    limit: int | None = None
    rule: str = ""
    score: float | None = None
    """What a finished run is sorted by: its last average, a fraction; of lm-eval's tasks the first metric."""
    result: str = ""
    """The same in words, with its standard error."""
    devices: tuple[str, ...] = ()
    """Kinds that a finished run was computed on."""
    journal: bool = True
    """Whether its journal is there, without which no table can be made again."""
    notes: tuple[str, ...] = ()
    """What is wrong or odd about it."""

    @property
    def place(self) -> str:
        """Its checkpoint for a reader: a path from here, or a name."""
        if not self.model:
            return Path(self.folder).name
        if self.path is None:
            return self.model
        path, here = Path(self.path), Path.cwd()
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    @property
    def settings(self) -> str:
        """What is otherwise than by default: examples, documents, context."""
        shots = f"{self.num_fewshot}-shot" if self.num_fewshot else ""
        return ", ".join(filter(None, (shots, f"limit {self.limit:,}" if self.limit else "", self.context)))


def list_found(root: Path, sort: str = "date", text: str = "") -> list[ListedRun]:
    """The runs under a folder.

    Args:
        root: folder of runs.
        sort: by date (the newest last), name (the folder's), model (the checkpoint's, by step) or score (the best
            first).
        text: only runs of which each word of it is found somewhere in their description, whatever its case.

    Raises:
        RunError: the folder cannot be read.
    """
    found = [_damaged(one.folder, one.why) if isinstance(one, DamagedRun) else _listed(one) for one in scan(root)]
    words = text.lower().split()
    chosen = [run for run in found if all(word in _described(run) for word in words)]
    orders: dict[str, Any] = {
        "date": lambda run: run.created,
        "name": lambda run: run.folder,
        "model": lambda run: _by_number(run.place),
        "score": lambda run: float("inf") if run.score is None else -run.score,
    }
    return sorted(chosen, key=orders[sort])


def runs_report(runs: Sequence[ListedRun], root: Path, text: str = "") -> Report:
    """A line for each run, and beneath them what is wrong with any.

    Args:
        runs: what is listed.
        root: the folder that they were looked for in.
        text: what they were filtered by.
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
            run.place,
        ]
        for run in runs
    ]
    # A column that is empty throughout only takes room
    keep = [column for column in range(len(headers)) if any(row[column] for row in rows)]
    kept_headers, kept_rows = [headers[c] for c in keep], [[row[c] for c in keep] for row in rows]
    none = f"none in {root}" + (f" with {text}" if text.strip() else "")
    notes = [f"{run.id[:_ID_SHOWN] or Path(run.folder).name}: {note}" for run in runs for note in run.notes]
    if kept := [run.id[:_ID_SHOWN] for run in runs if run.state == "finished" and not run.journal]:
        notes.append(f"kept without a journal, so that nothing of them can be made anew: {', '.join(kept)}")
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
        "limit": specification["limit"],
        "rule": manifest["rule"],
        "journal": (run.folder / JOURNAL).is_file(),
        "notes": tuple(unofficial_notes(manifest)),
    }
    if not run.complete:
        return ListedRun(state="interrupted" if about["journal"] else "begun", **about)
    try:
        score, result = benchmark_of(run).headline(run)
    except RunError as error:
        return ListedRun(state="damaged", **about | {"notes": (str(error), *about["notes"])})
    about |= {"devices": tuple(kinds(manifest)), "notes": (*about["notes"], *mixture(manifest))}
    return ListedRun(state="finished", score=score, result=result, **about)


def _damaged(folder: Path, why: str) -> ListedRun:
    return ListedRun(str(folder), "damaged", notes=(why,))


def _described(run: ListedRun) -> str:
    """All that a filter looks at, in lower case."""
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


def _by_number(text: str) -> list[tuple[int, str]]:
    """Steps in their order: checkpoint-500 before checkpoint-1000."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]
