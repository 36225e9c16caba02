"""Sources and licences in a page."""

from __future__ import annotations

from pathlib import Path

from evalkit.data import TASKS
from evalkit.pages.provenance import sources_panel
from evalkit.runs.folder import load_run
from tests.comparison.made import make_run, scores_of
from tests.pages.test_overview import rows_of


def test_every_pinned_task_names_dataset_licence_and_source(tmp_path: Path) -> None:
    tables = {task: scores_of(task, [1, 0]) for task in TASKS}
    documents = {task: {"official": task != "piqa", "source": f"from {task}", "count": 2} for task in TASKS}
    run = load_run(make_run(tmp_path, tables, manifest={"documents": documents}))
    report = sources_panel([run]).reports[0]
    rows = rows_of(report.tables[0])
    assert len(rows) == 8
    assert rows["PIQA*"] == [
        "baber/piqa, validation",
        "Bisk et al. 2019",
        "AFL 3.0",
        "https://opensource.org/license/afl-3-0-php",
        "from piqa",
    ]
    assert rows["OpenBookQA"][2:4] == [
        "see the dataset's page",
        "https://huggingface.co/datasets/allenai/openbookqa",
    ]
    assert all(one[3].startswith("https://") for one in rows.values())
    assert report.notes == ("*: not the official documents of the task",)
