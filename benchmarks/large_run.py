"""Time and memory of a run of millions of rows: append every batch, resume, and write the table.

    python benchmarks/large_run.py --batches 4000 --rows 1000

No model is loaded: rows are synthetic (8 columns, as in an analysis of attention: document, layer, head, measure and
four numbers), so that time and memory are the journal's and the table's own. Each step runs in a separate process.
Prints Markdown: wall-clock seconds, CPU seconds, and the peak resident memory beyond the imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from evalkit.runs.columns import schema_of
from evalkit.runs.folder import JOURNAL, specification_id
from evalkit.runs.journal import Entry, FinishedRows
from evalkit.runs.traits import BatchDevice
from evalkit.runs.writing import RunWriter, open_run

TASK, TABLE = "analysis", "states.parquet"
LAYERS, HEADS, MEASURES = 10, 10, ("entropy", "sink", "locality", "rank", "norm")
PLACE = BatchDevice("cpu", "x86_64", "none", "here")
STEPS = ("append", "resume", "table")


class Measured(NamedTuple):
    """A row."""

    document: int
    layer: int
    head: int
    measure: str
    mean: float
    spread: float
    least: float
    most: float | None


def main() -> None:
    """Run every step and print the table."""
    arguments = parse()
    if arguments.one:
        print(json.dumps(measure(arguments, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        print("| step | seconds | on the processor | MiB | on disk |\n|---|---|---|---|---|", flush=True)
        for step in STEPS:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", step, "--folder", folder]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds, busy, memory, size = json.loads(output.splitlines()[-1])
            print(
                f"| {step} | {seconds:.1f} | {busy:.1f} | {memory / 2**20:.0f} | {size / 2**20:.0f} MiB |", flush=True
            )


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--key", choices=("document", "row"), default="document", help="column that identifies a key")
    parser.add_argument("--one", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[float, float, int, int]:
    """Return (seconds, CPU seconds, bytes of memory, bytes of the file) of one step."""
    specification = {"suite": TASK, "dtype": "float32", "limit": None, "checkpoint": {}}
    manifest = {
        "id": specification_id(specification), "kind": "multiple_choice", "specification": specification, "rule": TASK,
        "groups": {}, "group_sizes": {}, "documents": {}, "template": "none", "created": "2026-01-01T00:00:00+00:00",
        "model": "none", "revision": None, "versions": {},
    }  # fmt: skip
    key = ("document",) if arguments.key == "document" else ("document", "layer", "head", "measure")
    numbers = np.random.default_rng(0)
    batches = range(arguments.batches) if arguments.one == "append" else ()
    with open_run(folder, "run", manifest) as writer:
        baseline, started, busy = resident(), time.perf_counter(), time.process_time()
        finished = writer.finished((Measured,), key)
        for number in batches:
            finished.append(Entry(TASK, number, 0.1, PLACE), made_up(number, arguments.rows, numbers), Measured)
        if arguments.one == "table":
            finish(finished, writer, arguments.batches * arguments.rows)
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
    name = TABLE if arguments.one == "table" else JOURNAL
    return seconds, busy, highest() - baseline, (folder / "run" / name).stat().st_size


def made_up(number: int, rows: int, numbers: np.random.Generator) -> pa.RecordBatch:
    """Return a batch of whole documents with the given number of rows."""
    places = np.arange(number * rows, (number + 1) * rows)
    a_document = LAYERS * HEADS * len(MEASURES)
    values = numbers.standard_normal((4, rows)).astype(np.float32).astype(float)
    columns: dict[str, Any] = {
        "document": places // a_document,
        "layer": places // (HEADS * len(MEASURES)) % LAYERS,
        "head": places // len(MEASURES) % HEADS,
        "measure": pa.array(np.array(MEASURES)[places % len(MEASURES)]),
        "mean": values[0], "spread": values[1], "least": values[2], "most": values[3],
    }  # fmt: skip
    return pa.record_batch(columns, schema=schema_of(Measured))


def finish(finished: FinishedRows, writer: RunWriter, rows: int) -> None:
    """Write the table and check its number of rows."""
    writer.save_batches(TABLE, schema_of(Measured), finished.batches(TASK))
    found = pq.ParquetFile(writer.folder / TABLE).metadata
    if found.num_rows != rows:
        raise SystemExit(f"{found.num_rows} rows; expected {rows}")


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def highest() -> int:
    """Return the peak resident memory, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


if __name__ == "__main__":
    main()
