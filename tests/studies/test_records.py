"""Records of runs: written by every process, read by all."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from evalkit.errors import RunError
from evalkit.runs.folder import RESULTS
from evalkit.studies.study import Study, finished_run_of, record_of, recorded_checkpoints, save_record
from evalkit.studies.study_file import read_study
from tests.studies.tiny_studies import made_study


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study of one checkpoint that does not exist."""
    return read_study(made_study(tmp_path, {"A": "org/a"}))


def test_a_record_is_read_back(study: Study) -> None:
    [run] = study.runs
    assert record_of(study.output, run) is None
    save_record(study.output, run, study.output / "folder", "0123", "it broke", 7)
    record = record_of(study.output, run)
    assert record is not None
    assert (record.label, record.folder, record.id, record.error, record.parameters) == (
        "A on zeroshot8", "folder", "0123", "it broke", 7,
    )  # fmt: skip


def test_success_clears_a_failure_and_parameters_stay(study: Study) -> None:
    [run] = study.runs
    folder = study.output / "folder"
    save_record(study.output, run, folder, "0123", "it broke", 7)
    save_record(study.output, run, folder, "0123")
    known = record_of(study.output, run)
    assert known is not None
    assert (known.error, known.parameters) == ("", 7)
    # Another checkpoint in its place
    save_record(study.output, run, folder, "0123", "it broke", 7)
    save_record(study.output, run, study.output / "other", "4567")
    known = record_of(study.output, run)
    assert known is not None
    assert (known.error, known.parameters) == ("", None)


def test_an_unchanged_record_is_not_written_again(study: Study) -> None:
    [run] = study.runs
    save_record(study.output, run, study.output / "folder", "0123")
    [path] = (study.output / ".studies").iterdir()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    save_record(study.output, run, study.output / "folder", "0123")
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_the_same_failure_again_is_a_new_record(study: Study) -> None:
    """So that a process that waits can tell that it is not the one from before."""
    [run] = study.runs
    times = set()
    for _ in range(2):
        save_record(study.output, run, study.output / "folder", "0123", "it broke")
        record = record_of(study.output, run)
        assert record is not None
        times.add(record.written)
        time.sleep(0.01)
    assert len(times) == 2


def test_only_checkpoints_with_a_finished_run_are_recorded(tmp_path: Path) -> None:
    study = read_study(made_study(tmp_path, {"A": "org/a", "B": "org/b"}))
    for run, folder in zip(study.runs, ("one", "two"), strict=True):
        save_record(study.output, run, study.output / folder, "0123")
        (study.output / folder).mkdir()
    place = study.checkpoints[0].place
    assert recorded_checkpoints(study.output, place) == set()
    (study.output / "two" / RESULTS).touch()
    assert recorded_checkpoints(study.output, place) == {"org/b"}
    assert recorded_checkpoints(study.output, "../elsewhere") == set()


@pytest.mark.parametrize("content", ["", "[]", '{"label": 1}', '{"label": "a", "folder": "../../x", "id": "1"}'])
def test_a_damaged_record_is_no_record(content: str, study: Study) -> None:
    [run] = study.runs
    save_record(study.output, run, study.output / "folder", "0123")
    [path] = (study.output / ".studies").iterdir()
    path.write_text(content)
    assert record_of(study.output, run) is None
    assert finished_run_of(study, run) is None


def test_a_folder_that_cannot_be_written_is_named(study: Study) -> None:
    [run] = study.runs
    study.output.mkdir()
    (study.output / ".studies").touch()
    with pytest.raises(RunError, match=r"\.studies.* cannot be written"):
        save_record(study.output, run, study.output / "folder", "0123")


_WRITING = """
import sys
from pathlib import Path
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
study = read_study(Path(sys.argv[1]))
for number in range(200):
    save_record(study.output, study.runs[0], study.output / "folder", "0123", f"{sys.argv[2]} {number}")
"""


def test_processes_may_write_a_record_at_the_same_time(study: Study) -> None:
    command = [sys.executable, "-c", _WRITING, str(study.path)]
    started = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(3)]
    for one in started:
        _, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
    record = record_of(study.output, study.runs[0])
    assert record is not None
    assert record.error.endswith(" 199")
    assert len(list((study.output / ".studies").iterdir())) == 1
