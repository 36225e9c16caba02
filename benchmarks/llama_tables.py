"""Tables of versus_llama_cpp.py.

In: measured rows. Out: llama_cpp.json with all figures, and llama_cpp.md with a table of scoring and one of commands.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass
class TaskRow:
    """Measurements of one task with one file, in seconds and nats; documents decided in one way or another."""

    file: str
    dtype: str
    task: str
    documents: int
    left_out: int
    """Documents that llama-perplexity cannot score."""
    ours: float = math.inf
    theirs: float = math.inf
    before: float = 0.0
    """Seconds of a call of llama-perplexity before scoring: loading, a warm-up pass, tokenising."""
    has_same_tokens: bool = False
    """Whether llama-perplexity computed as many tokens as evalkit's sequences have, counting shared ones once."""
    same: int = 0
    """Documents with the same decision."""
    other_tokens: int = 0
    """Documents with another decision, but the same one by llama-perplexity's choice of tokens."""
    rounding: int = 0
    """Documents with another decision by both choices of tokens."""
    margin: float = 0.0
    """Largest difference, by llama.cpp's choice of tokens, of evalkit's means of its choice and of llama.cpp's."""
    as_float32: tuple[int, int] | None = None
    """Documents decided as by evalkit in float32 by the same choice of tokens: evalkit, llama.cpp. None if unknown."""


@dataclass
class CommandRow:
    """Whole commands over all tasks, in seconds and bytes."""

    file: str
    dtype: str
    documents: int
    ours: float = math.inf
    theirs: float = math.inf
    our_peak: int = 0
    their_peak: int = 0


def total(rows: list[TaskRow]) -> TaskRow:
    """Return the total over one file's tasks."""
    names = ("documents", "left_out", "ours", "theirs", "before", "same", "other_tokens", "rounding")
    known = [row.as_float32 for row in rows if row.as_float32]
    return TaskRow(
        rows[0].file, rows[0].dtype, "all", **{name: sum(getattr(row, name) for row in rows) for name in names},
        has_same_tokens=all(row.has_same_tokens for row in rows), margin=max(row.margin for row in rows),
        as_float32=(sum(a for a, _ in known), sum(b for _, b in known)) if len(known) == len(rows) else None,
    )  # fmt: skip


def write(out: Path, rows: Sequence[TaskRow | CommandRow], about: dict[str, Any]) -> None:
    """Write the results so far, so that an interrupted benchmark is not lost."""
    out.mkdir(parents=True, exist_ok=True)
    scoring = [row for row in rows if isinstance(row, TaskRow)]
    whole = [row for row in rows if isinstance(row, CommandRow)]
    figures = {"about": about, "scoring": list(map(asdict, scoring)), "commands": list(map(asdict, whole))}
    (out / "llama_cpp.json").write_text(json.dumps(figures, indent=1) + "\n")
    (out / "llama_cpp.md").write_text(markdown(scoring, whole, about))


def markdown(scoring: list[TaskRow], whole: list[CommandRow], about: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [
        f"{about['model']}; {about['machine']}, {about['threads']} threads on both sides; {versions}; at most "
        f"{about['limit']} documents of each task; shortest of {about['rounds']} rounds; numbers of tokens "
        + ("equal." if all(row.has_same_tokens for row in scoring) else "differ."),
        "",
        _header(
            "file | evalkit's dtype | task | documents | evalkit s | llama.cpp s | ratio | same decision "
            "| other tokens | rounding | largest margin | decided as in float32: evalkit, llama.cpp"
        ),
    ]
    for key in dict.fromkeys((row.file, row.dtype) for row in scoring):
        members = [row for row in scoring if (row.file, row.dtype) == key]
        for row in [*members, *([total(members)] if len(members) > 1 else [])]:
            exact = f"{row.as_float32[0]}, {row.as_float32[1]}" if row.as_float32 else ""
            lines.append(
                f"| {row.file} | {row.dtype} | {row.task} | {row.documents} | {row.ours:.1f} | {row.theirs:.1f} "
                f"| {row.theirs / row.ours:.2f}× | {row.same} | {row.other_tokens} | {row.rounding} "
                f"| {row.margin:.4f} | {exact} |"
            )
    lines += [
        "",
        _header("file | MB | evalkit's dtype | documents | evalkit s | llama.cpp s | ratio | MiB: evalkit, llama.cpp"),
    ]
    lines += [
        f"| {row.file} | {about['files'][row.file] / 1e6:.0f} | {row.dtype} | {row.documents} | {row.ours:.1f} "
        f"| {row.theirs:.1f} | {row.theirs / row.ours:.2f}× "
        f"| {row.our_peak / 2**20:.0f}, {row.their_peak / 2**20:.0f} |"
        for row in whole
    ]
    return "\n".join(lines) + "\n"


def _header(names: str) -> str:
    return f"| {names} |\n" + "|---" * (names.count("|") + 1) + "|"
