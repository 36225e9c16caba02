"""Devices of batches: stored for each, changes reported; `--device` of a finished run."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from evalkit.benchmarks.multiple_choice.results_report import accuracy_table
from evalkit.benchmarks.run_listing import list_found
from evalkit.errors import UsageError
from evalkit.models.loading.spec import model_spec
from evalkit.runs.batch_devices import BatchDevice, devices
from evalkit.runs.folder import JOURNAL, RESULTS, Run
from evalkit.runs.score_table import ScoreRow
from tests.benchmarks.multiple_choice.test_evaluation import Evaluate, Lines, small
from tests.journals import entries_of, relocate
from tests.printed import printed

ELSEWHERE = BatchDevice("cuda:1", "NVIDIA H100", "flex", "there")
__all__ = ["small"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cpu:0", "mps", "cuda", "cuda:0", "cuda:99"])
def test_what_some_machine_has(device: str) -> None:
    model_spec("demo", device=device)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:1", "CUDA", "cuda:0 ", "meta"])
def test_what_no_machine_has_is_refused_for_a_finished_run_too(small: Evaluate, device: str) -> None:
    if device == "gpu":
        small()
    with pytest.raises(UsageError, match=r"--device .*: not a device; expected auto, cpu, cuda, cuda:N or mps"):
        small(device=device)


def test_an_empty_device(small: Evaluate) -> None:
    with pytest.raises(UsageError, match="--device is empty; leave it out, or give a value"):
        small(device="")


def test_a_finished_run_says_that_nothing_is_computed(small: Evaluate) -> None:
    first = small()
    assert first.manifest["devices"] == [
        {
            "device": "cpu",
            "hardware": platform.machine(),
            "kernel": "tiles",
            "host": platform.node(),
            "threads": torch.get_num_threads(),
            "batches": first.manifest["devices"][0]["batches"],
        }
    ]
    for device, expected in (("auto", []), ("cpu", []), ("cpu:0", []), ("cuda:99", [
        "this run is finished and was computed on cpu; nothing is computed on cuda:99"
    ])):  # fmt: skip
        said = Lines()
        assert small(device=device, progress=said).folder == first.folder
        assert said.said == expected


def test_each_batch_says_where_it_was_computed(small: Evaluate) -> None:
    run = small()
    entries = [entry for entry, _ in entries_of(run, ScoreRow)]
    here = BatchDevice("cpu", platform.machine(), "tiles", platform.node(), torch.get_num_threads())
    assert {entry.place for entry in entries} == {here}
    by_task = {task: len([e for e in entries if e.task == task]) for task in ("piqa", "arc_easy")}
    assert run.manifest["devices"][0]["batches"] == {task: f"0-{count - 1}" for task, count in by_task.items()}


def begun_elsewhere(small: Evaluate, keep: int | None) -> tuple[Run, list[str]]:
    first = small(tasks=("piqa",), token_budget=60)
    (first.folder / RESULTS).unlink()
    relocate(first.folder / JOURNAL, ELSEWHERE, keep)
    said = Lines()
    return small(tasks=("piqa",), progress=said), said.said


def test_a_run_that_goes_on_elsewhere_says_so_and_keeps_which_batches(small: Evaluate, tmp_path: Path) -> None:
    run, said = begun_elsewhere(small, keep=3)
    warning = f"warning: this run was started on cuda NVIDIA H100; scores computed on cpu {platform.machine()} may"
    assert [line for line in said if line.startswith(warning)]
    there, here = run.manifest["devices"]
    assert {key: there[key] for key in ELSEWHERE._fields} == ELSEWHERE._asdict()
    assert there["batches"] == {"piqa": "0-2"}
    assert here["device"] == "cpu"
    assert here["batches"]["piqa"].startswith("3-")
    note = f"computed in part on cuda NVIDIA H100 and in part on cpu {platform.machine()}, which round differently"
    assert note in printed(accuracy_table(run.results(), run.manifest, run.seconds))
    [listed] = list_found(tmp_path / "runs")
    assert listed.devices == ("cuda NVIDIA H100", f"cpu {platform.machine()}")
    assert any(one.startswith(note) for one in listed.notes)


def test_a_run_of_another_machine_is_its_own(small: Evaluate) -> None:
    """Whole, it is only written anew here, and nothing was computed on two kinds of devices."""
    run, said = begun_elsewhere(small, keep=None)
    assert said == []
    assert [place["device"] for place in run.manifest["devices"]] == ["cuda:1"]
    assert "computed in part" not in printed(accuracy_table(run.results(), run.manifest, run.seconds))
    said_again = Lines()
    small(tasks=("piqa",), device="cpu", progress=said_again)
    assert said_again.said == ["this run is finished and was computed on cuda:1; nothing is computed on cpu"]


def test_requests_of_lm_evals_say_how_the_model_attended(checkpoint: Path, tmp_path: Path) -> None:
    from evalkit.benchmarks.run import evaluate
    from tests.benchmarks.lm_eval.made import made_tasks

    options: dict[str, Any] = {"tasks": ("made_choice", "made_answers"), "include_path": made_tasks(tmp_path / "tasks")}
    run = evaluate(str(checkpoint), output=tmp_path, progress=Lines(), **options)
    kernels = {task: place["kernel"] for place in run.manifest["devices"] for task in place["batches"]}
    assert kernels == {"loglikelihood made_choice": "tiles", "generate_until made_answers": "sdpa"}


def test_batches_are_written_as_ranges() -> None:
    other = ELSEWHERE._replace(host="here")
    batches = [("b", n, ELSEWHERE) for n in (5, 0, 1, 1, 2)] + [("a", -1, other), ("b", 4, other)]
    first, second = devices(batches)
    assert first == ELSEWHERE._asdict() | {"batches": {"b": "0-2,5"}}
    assert second["batches"] == {"a": "-1", "b": "4"}
