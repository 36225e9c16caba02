"""Times of a finished run's batches: whether planning or anything else has stalled some of them.

    evalkit run --model CKPT -o runs && python benchmarks/batch_times.py runs/RUN

Reads the journal. Batches of a task are of about the same number of tokens, so each is compared with the median of its
task; a stall shows in "slowest" and "later than" columns. Prints Markdown: for each task its batches, their median, the
slowest beside the median, and how much longer its first tenth takes than the rest; then the same for the batches of the
first minute beside all later ones.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from statistics import median

from evalkit.benchmarks.registry import benchmark
from evalkit.comparison.comparison import load_run
from evalkit.runs.folder import JOURNAL
from evalkit.runs.journal import FinishedRows, Journal

FIRST = 60.0
"""Seconds of computing that are compared with the rest."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="folder of a finished run, with its journal")
    run = load_run(parser.parse_args().run)
    computation = benchmark(run.manifest["kind"]).computation
    journal = Journal(run.folder / JOURNAL, run.manifest["id"], computation.rows, print)
    entries = FinishedRows(journal, computation.key).entries
    by_task: dict[str, list[float]] = {}
    for entry in entries:
        by_task.setdefault(entry.task, []).append(entry.seconds)
    print("| task | batches | median, ms | slowest beside it | first tenth beside the rest |")
    print("|---|---|---|---|---|")
    for task, seconds in by_task.items():
        middle, tenth = median(seconds), max(1, len(seconds) // 10)
        first = f"{median(seconds[:tenth]) / median(seconds[tenth:]):.2f}" if len(seconds) > 1 else "–"
        print(f"| {task} | {len(seconds):,} | {1e3 * middle:.0f} | {max(seconds) / middle:.2f} | {first} |")
    beside = [entry.seconds / median(by_task[entry.task]) for entry in entries]
    until = list(accumulate(entry.seconds for entry in entries))
    early = [one for one, end in zip(beside, until, strict=True) if end <= FIRST]
    late = beside[len(early) :]
    for name, part in (("first minute", early), ("later", late)):
        if part:
            slow = sum(one > 1.5 for one in part)
            print(f"\n{name}: {len(part):,} batches, median {median(part):.3f} of their tasks', {slow} over 1.5")
    print(f"\n{until[-1]:.0f} s in batches, {len(entries):,} batches")


if __name__ == "__main__":
    main()
