"""A needle test on a terminal. In: a finished run. Out: a table, how often needles were found by depth and length."""

from __future__ import annotations

from evalkit.benchmarks.generated_plan import about_run
from evalkit.reporting.escape import printable
from evalkit.reporting.page import aligned
from evalkit.runs.folder import Run


def needle_table(run: Run) -> str:
    """Needles found, in percent; one row a depth, one column a length."""
    stored = run.stored
    lengths, found = stored["lengths"], stored["found"]
    rows = [
        [f"{depth:g} %", *(f"{100 * share:.0f}" for share in shares)]
        for depth, shares in zip(stored["depths"], found, strict=True)
    ]
    means = [sum(column) / len(column) for column in zip(*found, strict=True)]
    rows.append(["all", *(f"{100 * mean:.0f}" for mean in means)])
    table = aligned(
        rows,
        ["depth", *(f"{length:,}" for length in lengths)],
        colalign=("left", *("right" for _ in lengths)),
    )
    [task] = stored["tasks"]
    n, texts = task["n"], stored["repeats"]
    source = run.manifest["documents"]["needle"]["source"]
    about = "\n".join(map(printable, (f"text: {source}", *about_run(run))))
    return (
        f"{table}\n\nneedles found in %, by tokens of the prompt and depth in it; {task['found']} of {n} in all, "
        f"{texts} text{'s' if texts > 1 else ''} a cell\n{about}"
    )
