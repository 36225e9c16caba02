"""A study of tiny checkpoints, with its runs computed as `evalkit study run` does: a run folder and a record each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from evalkit.benchmarks.request import remembering
from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.runs.folder import Run, load_run
from evalkit.studies.study import StudyRun, save_record
from evalkit.studies.study_file import read_study
from tests.studies.tiny_studies import Told
from tests.tables.runs import altered, loaded

SETTINGS = {"device": "cpu", "dtype": "float32", "allow_unofficial_data": True, "data_dir": "documents"}


def write_study(path: Path, **content: Any) -> Path:
    """Write a study file; its runs are in `runs` beside it."""
    path.write_text(yaml.safe_dump({"output": "runs", "settings": SETTINGS} | content, sort_keys=False), "utf-8")
    return path


def compute(path: Path, labels: Collection[str] = ()) -> dict[str, Run]:
    """Compute the runs of a study with these labels, by default all; return them by label."""
    study, holder = read_study(path), ModelHolder()
    with remembering():
        chosen = [run for run in study.runs if not labels or run.label in labels]
        return {run.label: _computed(run, study.output, holder) for run in chosen}


def _computed(run: StudyRun, output: Path, holder: ModelHolder) -> Run:
    plan = planned(run.checkpoint.model, run.options | {"output": output}, Told().say)
    found = run_plan(plan, Told(), holder)
    save_record(output, run, plan.folder, plan.manifest["id"])
    return found


def recorded(path: Path, finished: Run, runs: Mapping[str, str | None], **specification: Any) -> None:
    """Give a study runs without computing them: copies of a finished one, each with other accuracies.

    Args:
        path: the study file.
        finished: the run that is copied.
        runs: label → named model whose sizes and attention its manifest has; None: the finished run's own.
        specification: other entries of the specifications.
    """
    study = read_study(path)
    by_label = {run.label: run for run in study.runs}
    for place, (label, model) in enumerate(runs.items()):
        folder = study.output / f"run{place}-{by_label[label].key}"
        manifest = {} if model is None else {"loaded": finished.manifest["loaded"] | loaded(model)}
        altered(finished, folder, 0.03 * place, manifest, **specification)
        save_record(study.output, by_label[label], folder, load_run(folder).manifest["id"])
