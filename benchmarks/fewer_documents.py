"""How many documents each outcome needs to show the difference of two finished runs.

    python benchmarks/fewer_documents.py RUN_A RUN_B --sizes 10,25,50,100,200,400 --repeats 300

Draws many random samples of so many documents of each task (`--sample N --seed S` for many S), and prints in how many
the average difference is significant in the direction of all documents, for accuracy and every continuous outcome;
below, the ratio of documents that `evalkit compare` prints, from the variances of all documents.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from evalkit.comparison.comparison import p_value
from evalkit.comparison.line import by_task, efficiency
from evalkit.comparison.naming import find_run
from evalkit.comparison.pairing import PairedTask, Pairing, pair
from evalkit.comparison.sides import Side
from evalkit.data.sampling import DocumentSample
from evalkit.reporting.table import simple_table
from evalkit.reporting.terminal import terminal_table
from evalkit.runs.accuracies import available_outcomes
from evalkit.runs.score_table import MARGIN


def main() -> None:
    """Draw samples of two runs, and print the shares that show the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs=2)
    parser.add_argument("--sizes", default="10,25,50,100,200,400", help="documents of each task")
    parser.add_argument("--repeats", type=int, default=300, help="samples of each size")
    parser.add_argument("--rule", default="acc")
    options = parser.parse_args()
    runs = [find_run(name, Path("results/runs")) for name in options.runs]
    sides = [Side(f"run {place}", (run,)) for place, run in enumerate(runs)]
    pairing = pair(sides[0], sides[1], {})
    keys = {"accuracy": options.rule}
    for outcome in available_outcomes(runs[0].scores):
        keys[outcome.title] = f"{MARGIN}:{options.rule}" if outcome.name == MARGIN else outcome.name
    rows = [[title, *_powers(pairing, key, options), _ratio(pairing, options.rule, key)] for title, key in keys.items()]
    sizes = [f"n = {size}" for size in options.sizes.split(",")]
    title = f"Samples of n documents of each task that show the average difference, of {options.repeats} (%)"
    table = simple_table("power", ["outcome", *sizes, "times fewer documents"], rows, title=title)
    print(terminal_table(table, 200))


def _powers(pairing: Pairing, key: str, options: argparse.Namespace) -> list[str]:
    """Return the share of samples of each size that show the difference of all documents."""
    direction = np.sign(np.mean([one.documents.value for one in by_task(pairing, key)]))
    return [
        f"{100 * np.mean([_shows(pairing, key, int(size), seed, direction) for seed in range(options.repeats)]):.0f}"
        for size in options.sizes.split(",")
    ]


def _shows(pairing: Pairing, key: str, size: int, seed: int, direction: float) -> bool:
    tasks = tuple(_sampled(pairing, task, DocumentSample(size, seed)) for task in pairing.tasks)
    sample = Pairing(pairing.a, pairing.b, tasks, {}, pairing.graded)
    difference = np.mean([one.documents.value for one in by_task(sample, key)])
    return bool(np.sign(difference) == direction and p_value(sample, [task.task for task in tasks], key) <= 0.05)


def _sampled(pairing: Pairing, task: PairedTask, sample: DocumentSample) -> PairedTask:
    subjects = pairing.graded[0].documents["subtask"].to_numpy()[task.rows[0]]
    places = np.array(sample.places(task.task, subjects.tolist()))
    return PairedTask(
        task.task,
        None if task.clusters is None else task.clusters[places],
        None if task.strata is None else task.strata[places],
        tuple(rows[places] for rows in task.rows),
        0,
        task.official,
    )


def _ratio(pairing: Pairing, rule: str, key: str) -> str:
    found = None if key == rule else efficiency(by_task(pairing, rule), by_task(pairing, key))
    return "" if found is None else "{:.1f} ({:.1f} to {:.1f})".format(*found)


if __name__ == "__main__":
    main()
