"""Report of a needle test: a finished run → a `Report` with the percentage of needles found, by depth and length."""

from __future__ import annotations

from evalkit.benchmarks.generated_plan import about_run
from evalkit.benchmarks.results_report import run_content
from evalkit.reporting.decimals import percent
from evalkit.reporting.report import Report
from evalkit.reporting.table import simple_table
from evalkit.runs.folder import Run


def needle_report(run: Run) -> Report:
    """Return the percentage of needles found; one row for each depth, one column for each length."""
    stored = run.stored
    lengths, depths, found = stored["lengths"], stored["depths"], stored["found"]
    rows = [
        [f"{depth:g} %", *(percent(share, 0) for share in shares)] for depth, shares in zip(depths, found, strict=True)
    ]
    rows.append(["all", *(percent(sum(column) / len(column), 0) for column in zip(*found, strict=True))])
    [task] = stored["tasks"]
    texts = stored["repeats"]
    notes = (
        f"needles found in %, by tokens of the prompt and depth in it; {task['found']} of {task['n']} in all, "
        f"{texts} text{'s' if texts > 1 else ''} a cell",
        f"text: {run.manifest['documents']['needle']['source']}",
        *about_run(run),
    )
    table = simple_table("needle", ["depth", *(f"{length:,}" for length in lengths)], rows, ruled={len(depths)})
    records = [
        {"depth": depth, "length": length, "n": texts, "found": share}
        for depth, shares in zip(depths, found, strict=True)
        for length, share in zip(lengths, shares, strict=True)
    ]
    return Report((table,), notes=notes, content=run_content(run), records=records)
