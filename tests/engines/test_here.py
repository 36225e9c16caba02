"""Jobs in this process: the same tables as single runs, outcomes, jobs of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import ModelSpec
from evalkit.models.module_state import state_digest
from evalkit.runs.folder import MANIFEST, load_run
from evalkit.runs.writing import locked
from evalkit.studies.running import Job, Outcome, run_here
from tests.benchmarks.conftest import plugin
from tests.benchmarks.kinds import KINDS, files, options_of, same
from tests.benchmarks.lm_eval.made import write_task
from tests.studies.made import Told

__all__ = ["files", "plugin"]  # fixtures


def plan_of(kind: str, files: Path, output: Path, seed: int = 0, **more: Any) -> Any:
    """Plan a run of a kind; all kinds load the model in the same way."""
    options, settings = options_of(kind, files, output)
    return planned(files / f"model{seed}", options | settings | {"context": "none"} | more, silent)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints that are loaded."""
    names: list[str] = []
    load: Callable[..., Any] = ModelSpec.load

    def counted(spec: ModelSpec, *arguments: Any) -> Any:
        names.append(Path(spec.model).name)
        return load(spec, *arguments)

    monkeypatch.setattr(ModelSpec, "load", counted)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_benchmarks_that_alternate_on_one_model_give_the_tables_of_single_runs(
    dtype: str, files: Path, tmp_path: Path, loads: list[str]
) -> None:
    single = {kind: run_plan(plan_of(kind, files, tmp_path / "single", dtype=dtype), Told()) for kind in KINDS}
    assert len(loads) == len(KINDS)
    holder, kinds = ModelHolder(), list(KINDS)

    def state(model: Any) -> Any:
        return state_digest(model), model.config.to_dict(), model.generation_config.to_dict(), model.training

    for number, kind in enumerate((*kinds, *kinds[::-1], *kinds[::2], *kinds[1::2])):
        plan = plan_of(kind, files, tmp_path / str(number), dtype=dtype)
        model = holder.model_of(plan, silent).model
        before = state(model)
        same(run_plan(plan, Told(), holder), single[kind])
        assert state(model) == before
    assert len(loads) == len(KINDS) + 1


@pytest.mark.slow
def test_jobs_of_one_checkpoint_load_it_once(files: Path, tmp_path: Path, loads: list[str]) -> None:
    members = [(kind, seed) for kind in ("multiple_choice", "copying", "lm_eval") for seed in (0, 1)]
    plans = [plan_of(kind, files, tmp_path / "study", seed) for kind, seed in members]
    jobs = [Job(f"job {number}", plan) for number, plan in enumerate(plans)]
    told, known = Told(), list[Outcome]()
    outcomes = run_here(jobs, told, known.append)
    assert [outcome.job for outcome in outcomes] == jobs and len(known) == len(jobs)
    assert {outcome.state for outcome in outcomes} == {"finished"}
    assert loads == ["model0", "model1"]
    lines = [line for line in told.lines if " of 6: job " in line]
    assert lines == [f"{number + 1} of 6: job {number}" for number in (0, 2, 4, 1, 3, 5)]
    for plan, (kind, seed) in zip(plans, members, strict=True):
        same(load_run(plan.folder), run_plan(plan_of(kind, files, tmp_path / "single", seed), Told()))
    # Again: nothing is loaded, and nothing is said
    del loads[:]
    again = Told()
    assert {outcome.state for outcome in run_here(jobs, again)} == {"finished"}
    assert (loads, again.lines) == ([], [])


def test_a_job_of_another_process_is_left_and_tried_again_at_the_end(files: Path, tmp_path: Path) -> None:
    """The first holder ends while the third job is computed; the second never does."""
    plans = [plan_of(kind, files, tmp_path) for kind in ("copying", "norms", "multiple_choice")]
    jobs, known = [Job(plan.manifest["kind"], plan) for plan in plans], list[str]()
    for plan in plans[:2]:
        plan.folder.mkdir(parents=True)
    with locked(plans[1].folder):
        held = locked(plans[0].folder)
        held.__enter__()

        def done(outcome: Outcome) -> None:
            known.append(outcome.job.label)
            if outcome.job is jobs[2]:
                held.__exit__(None, None, None)

        outcomes = run_here(jobs, Told(), done)
    assert [outcome.state for outcome in outcomes] == ["finished", "in use", "finished"]
    assert known == ["multiple_choice", "copying", "norms"]
    assert "(process" in outcomes[1].message and not (plans[1].folder / MANIFEST).exists()


def test_requests_that_draw_random_numbers_are_those_of_a_single_run(files: Path, tmp_path: Path) -> None:
    """Whatever is planned and computed between a run's plan and its requests."""
    task = {"task": "drawing", "output_type": "multiple_choice", "doc_to_text": "!function drawing.text",
            "doc_to_choice": ["yes", "no"], "doc_to_target": 0}  # fmt: skip
    write_task(tmp_path / "tasks", task, [{"q": f"question {number}"} for number in range(6)])
    path = tmp_path / "tasks" / "drawing.yaml"
    path.write_text(path.read_text().replace("'!function drawing.text'", "!function drawing.text"))
    (tmp_path / "tasks" / "drawing.py").write_text(
        "import random\nimport numpy\n\n\ndef text(doc):\n"
        "    return f\"{doc['q']} {random.random()} {numpy.random.rand()}\"\n"
    )
    suite = tmp_path / "mine.yaml"
    suite.write_text("description: drawn\ngroups: {Drawn: [drawing]}\ntask_files: tasks\ntemplate: plain\nrule: acc\n")
    both: list[dict[str, Any]] = [{"suite": "lm_eval", "include_path": tmp_path / "tasks"}, {"suite": suite}]

    def plan(seed: int, output: str, options: dict[str, Any]) -> Any:
        return planned(files / f"model{seed}", options | {"tasks": ("drawing",), "output": tmp_path / output}, silent)

    single = [run_plan(plan(0, "single", options), Told()) for options in both]
    plans = [plan(seed, "jobs", options) for seed in (1, 0) for options in both]
    outcomes = run_here([Job(str(number), plan) for number, plan in enumerate(plans)], Told())
    assert [outcome.state for outcome in outcomes] == ["finished"] * 4, [outcome.message for outcome in outcomes]
    for shared, whole in zip(plans[2:], single, strict=True):
        same(load_run(shared.folder), whole)
    assert single[0].scores["ll_continuation"].nunique() == len(single[0].scores)  # each prompt has its own numbers
