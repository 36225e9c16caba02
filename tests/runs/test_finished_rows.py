"""The rows in a journal: keys in memory, rows from the file, tables written incrementally."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evalkit.errors import RunError
from evalkit.runs import writing
from evalkit.runs.batch_devices import BatchDevice
from evalkit.runs.columns import record_batch, schema_of
from evalkit.runs.folder import JOURNAL, RESULTS, load_run
from evalkit.runs.forms import digest
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.writing import RunWriter, open_run
from tests.runs.test_folder import MANIFEST as OTHERS

PLACE = BatchDevice("cpu", "x86_64", "tiles", "here")
MANIFEST = OTHERS | {"kind": "longbench", "rule": "longbench"}
RESULT = {"tasks": [], "averages": [{"name": "Average", "accuracy": 0.5, "stderr": None}]}
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "large_run.py"


class Row(NamedTuple):
    """One of several of a document."""

    document: str
    part: int
    value: float


def rows(document: str, value: float, parts: int = 2) -> list[Row]:
    return [Row(document, part, value + part) for part in range(parts)]


def finished(path: Path) -> FinishedRows:
    return FinishedRows(Journal(path, "0123456789ab", Row, pytest.fail), ("document",))


def entry(number: int, task: str = "piqa") -> Entry:
    return Entry(task, number, 0.5, PLACE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / JOURNAL


def test_keys_are_known_at_once_and_after_reading(path: Path) -> None:
    found = finished(path)
    assert not found
    found.append(entry(0), [*rows("a", 1), *rows("b", 2)])
    found.append(entry(0, "boolq"), rows("a", 3))
    for one in (found, finished(path)):
        assert one
        assert ("piqa", "a") in one
        assert ("piqa", "b") in one
        assert ("boolq", "a") in one
        assert ("boolq", "b") not in one
        assert one.seconds == {"piqa": 0.5, "boolq": 0.5}
        assert list(one.rows("boolq")) == rows("a", 3)
        assert list(one.rows("hellaswag")) == []
        assert one.table("hellaswag").equals(schema_of(Row).empty_table())


def test_rows_come_in_the_order_of_the_batches(path: Path) -> None:
    """Where a damaged line was computed again, its batch stands last in the file."""
    found = finished(path)
    for number in (2, 0, 1):
        found.append(entry(number), rows(f"d{number}", number))
    for one in (found, finished(path)):
        assert [row.document for row in one.rows("piqa")] == ["d0", "d0", "d1", "d1", "d2", "d2"]
        assert one.table("piqa").to_pylist() == [row._asdict() for row in one.rows("piqa")]


def test_of_two_batches_with_a_key_the_first_in_the_file_counts(path: Path) -> None:
    """As a run leaves them that lost its manifest, and with it its token budget: the batches overlap."""
    found = finished(path)
    found.append(entry(1), [*rows("b", 1), *rows("c", 1)])
    found.append(entry(0), [*rows("a", 2), *rows("b", 2)])
    found.append(entry(0), rows("a", 3, parts=3))
    for one in (found, finished(path)):
        assert list(one.rows("piqa")) == [*rows("a", 2), *rows("b", 1), *rows("c", 1)]
        assert all(batch.num_rows for batch in one.batches("piqa"))


def test_a_batch_of_arrow_columns_is_kept_as_it_is(path: Path) -> None:
    batch = record_batch(rows("a", 0.1, parts=500), Row)
    finished(path).append(entry(0), pa.Table.from_batches([batch.slice(0, 200), batch.slice(200)]))
    assert finished(path).table("piqa").to_batches() == [batch]


def test_a_computer_that_returns_nan_is_said_in_a_line(path: Path) -> None:
    found = finished(path)
    found.append(entry(0), rows("a", 1))
    kept = path.read_bytes()
    with pytest.raises(
        RunError, match=r"^batch 3 of piqa cannot be stored: 'value' contains NaN or infinity; expected fin"
    ):
        found.append(entry(3), rows("b", math.nan))
    with pytest.raises(
        RunError, match=r"^batch 3 of piqa cannot be stored: its columns are part; expected document, pa"
    ):
        found.append(entry(3), pa.table({"part": [1]}))
    assert path.read_bytes() == kept
    assert ("piqa", "b") not in found


# Tables


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    with open_run(tmp_path, "run", MANIFEST) as found:
        yield found


def test_a_table_is_written_piece_by_piece(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_GROUP", 1000)
    found = writer.finished(Row, ("document",))
    for number in range(20):
        found.append(entry(number), rows(str(number), number / 7, parts=30))
    writer.save_batches("states.parquet", schema_of(Row), found.batches("piqa"))
    writer.save_results(RESULT)
    path = writer.folder / "states.parquet"
    assert 2 <= pq.ParquetFile(path).metadata.num_row_groups < 20
    assert pq.read_table(path).equals(found.table("piqa"))
    run = load_run(writer.folder)
    assert run.files["states.parquet"] == digest(path.read_bytes())
    assert run.table("states.parquet", Row._fields).shape == (600, 3)
    assert run.manifest["devices"][0]["batches"] == {"piqa": "0-19"}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RunError, match=r"states\.parquet is damaged"):
        run.table("states.parquet", Row._fields)


def test_a_table_without_rows_has_its_columns(writer: RunWriter) -> None:
    writer.save_batches("states.parquet", schema_of(Row), iter(()))
    assert pq.read_table(writer.folder / "states.parquet").equals(schema_of(Row).empty_table())


def test_a_table_that_breaks_off_leaves_nothing(writer: RunWriter) -> None:
    """The journal changes while its rows are read; what was there before stays."""
    found = writer.finished(Row, ("document",))
    for number in range(3):
        found.append(entry(number), rows(str(number), number))
    writer.save_batches("states.parquet", schema_of(Row), found.batches("piqa"))
    before = (writer.folder / "states.parquet").read_bytes()
    journal = writer.folder / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-9])
    with pytest.raises(RunError, match="was changed while it was read"):
        writer.save_batches("states.parquet", schema_of(Row), found.batches("piqa"))
    assert (writer.folder / "states.parquet").read_bytes() == before
    assert not [path.name for path in writer.folder.iterdir() if path.name.endswith(".tmp")]
    assert not (writer.folder / RESULTS).exists()


@pytest.mark.slow
def test_three_hundred_thousand_rows_need_little_memory() -> None:
    """They are 300 MiB as Python objects, and 20 MiB as columns."""
    command = [sys.executable, str(SCRIPT), "--batches", "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines()[2:]]
    memory = {step: int(mebibytes) for step, _, _, mebibytes, _ in lines}
    assert memory.keys() == {"append", "resume", "table"}
    assert memory["append"] < 100, memory
    assert memory["resume"] < 60, memory
    assert memory["table"] < 150, memory


def test_a_finished_run_is_listed_without_arrow(tmp_path: Path) -> None:
    with open_run(tmp_path, "run", MANIFEST) as writer:
        writer.finished(Row, ("document",)).append(entry(0), rows("a", 1))
        writer.save_results(RESULT)
    script = (
        "import sys\nfrom pathlib import Path\nimport evalkit.benchmarks.session\n"
        "from evalkit.benchmarks.run_listing import *\n"
        "[found] = list_found(Path(sys.argv[1]))\nprint(found.state)\n"
        "print([name for name in ('pyarrow', 'pandas', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    state, loaded = done.stdout.splitlines()
    assert json.loads(loaded.replace("'", '"')) == []
    assert state == "finished"
