"""State of a study's runs: finished, running, interrupted, missing, failed, not planned."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evalkit.models.loading.locate import silent
from evalkit.runs.folder import JOURNAL, RESULTS
from evalkit.runs.lock import Owner, locked
from evalkit.studies.running import run_here, run_study
from evalkit.studies.status import RunState, states_of, status_report
from evalkit.studies.study import Study, record_of, save_record
from evalkit.studies.study_file import read_study
from tests.printed import printed
from tests.studies.tiny_studies import Told, made_files, made_study


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study of three checkpoints. Copy it."""
    folder = made_files(tmp_path_factory.mktemp("study"))
    path = made_study(folder, {"A": "vanilla", "B": "intg-*"})
    outcomes = run_study(read_study(path), Told(), run_here, wait=False)
    assert [one.state for _, one in outcomes] == ["finished"] * 3
    return folder


@pytest.fixture
def study(finished: Path, tmp_path: Path) -> Study:
    """A copy of the finished study."""
    return read_study(Path(shutil.copytree(finished, tmp_path / "study")) / "study.yaml")


def folder_of(study: Study, place: int) -> Path:
    """Return the folder of a run."""
    record = record_of(study.output, study.runs[place])
    assert record is not None
    return study.output / record.folder


def state(study: Study, place: int) -> RunState:
    """Return the state of a run."""
    return states_of(study, silent)[place]


def test_finished_runs_have_their_result_and_time(study: Study) -> None:
    found = states_of(study, silent)
    assert [one.state for one in found] == ["finished"] * 3
    for one in found:
        assert one.result
        assert one.score is not None
        assert one.seconds is not None
        assert one.seconds > 0
    report = status_report(study, found)
    assert report.verdict == ("3 runs: 3 finished",)
    assert report.content["seconds_left"] is None


def test_checkpoints_are_not_read_where_records_exist(study: Study) -> None:
    for name in ("vanilla", "intg-seed1"):
        for file in (study.path.parent / name).iterdir():
            file.unlink()
    assert [one.state for one in states_of(study, silent)] == ["finished"] * 3
    # Nor where a run was never begun
    shutil.rmtree(folder_of(study, 0))
    assert state(study, 0).state == "missing"


def test_a_missing_run_is_estimated_from_the_others_by_parameters(study: Study) -> None:
    shutil.rmtree(folder_of(study, 0))
    found = states_of(study, silent)
    rates = sorted((one.seconds or 0) for one in found[1:])
    assert found[0].state == "missing"
    assert found[0].seconds_left == pytest.approx(sum(rates) / 2)
    run = study.runs[0]
    record = record_of(study.output, run)
    assert record is not None
    save_record(study.output, run, folder_of(study, 0), record.id, parameters=10 * 139_584)
    assert state(study, 0).seconds_left == pytest.approx(10 * sum(rates) / 2)
    text = printed(status_report(study, states_of(study, silent)))
    assert "3 runs: 2 finished, 1 missing; about 0:" in text
    assert "in proportion to the models' parameters" in text


def test_a_run_in_use_shows_who_computes_it(study: Study) -> None:
    folder = folder_of(study, 1)
    (folder / RESULTS).unlink()
    with locked(folder) as held:
        held.report(0.5, 90.0)
        held._write()
        one = state(study, 1)
        assert (one.state, one.share, one.seconds_left) == ("running", 0.5, 90.0)
        assert (one.host, one.process) == (platform.node(), os.getpid())
        text = printed(status_report(study, states_of(study, silent)))
        assert f"process {os.getpid()} on {platform.node()}" in text
        assert "about 1:30 left" in text
    one = state(study, 1)
    assert (one.state, one.share, one.host) == ("interrupted", 0.5, "")
    assert one.seconds_left is not None


def test_a_run_of_another_machine_is_running_while_it_renews_its_file(study: Study) -> None:
    folder = folder_of(study, 1)
    (folder / RESULTS).unlink()
    owner = Owner(host="another-machine", process=7, done=0.25, seconds_left=60.0)
    (folder / ".owner").write_text(json.dumps(owner.model_dump()))
    one = state(study, 1)
    assert (one.state, one.host, one.process, one.share) == ("running", "another-machine", 7, 0.25)
    os.utime(folder / ".owner", (0, 0))
    assert state(study, 1).state == "interrupted"


def test_a_failed_run_has_its_reason_until_it_is_finished(study: Study) -> None:
    folder, run = folder_of(study, 2), study.runs[2]
    record = record_of(study.output, run)
    assert record is not None
    save_record(study.output, run, folder, record.id, "it broke")
    assert state(study, 2).state == "finished"  # by another process, meanwhile
    (folder / RESULTS).unlink()
    one = state(study, 2)
    assert (one.state, one.reason) == ("failed", "it broke")
    with locked(folder):
        assert state(study, 2).state == "running"


def test_a_damaged_run_has_failed(study: Study) -> None:
    (folder_of(study, 0) / RESULTS).write_text("{}")
    one = state(study, 0)
    assert one.state == "failed"
    assert "results.json is damaged" in one.reason


def test_a_changed_id_is_another_run(study: Study) -> None:
    """The checkpoint was replaced and planned again, in a folder of the same name."""
    run = study.runs[0]
    save_record(study.output, run, folder_of(study, 0), "0123456789ab")
    assert state(study, 0).state == "interrupted"


def test_without_records_runs_are_planned(study: Study) -> None:
    shutil.rmtree(study.output / ".studies")
    (study.path.parent / "intg-seed2" / "config.json").unlink()
    found = states_of(study, silent)
    assert [one.state for one in found] == ["finished", "finished", "not planned"]
    assert "has no config.json" in found[2].reason
    assert not (study.output / ".studies").exists()


def test_it_imports_neither_torch_nor_transformers(study: Study) -> None:
    (folder_of(study, 0) / JOURNAL).touch()
    script = (
        "import sys\nfrom pathlib import Path\nfrom evalkit.models.loading.locate import silent\n"
        "from evalkit.studies.status import states_of\nfrom evalkit.studies.status import status_report\n"
        "from evalkit.studies.study_file import read_study\n"
        f"study = read_study(Path({str(study.path)!r}))\nstatus_report(study, states_of(study, silent))\n"
        "print([name for name in ('torch', 'transformers', 'pandas', 'lm_eval') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
