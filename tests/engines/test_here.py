"""Jobs in this process: the same tables as single runs, outcomes, jobs of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.run import planned
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.models.live import state_digest
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import ModelSpec
from evalkit.runs.folder import MANIFEST, load_run
from evalkit.runs.writing import locked
from evalkit.studies.running import Job, Outcome, run_here
from tests.benchmarks.conftest import plugin
from tests.benchmarks.kinds import KINDS, files, options_of, same
from tests.benchmarks.lm_eval.made import write_task
from tests.studies.made import Told


def plan_of(kind: str, files: Path, output: Path, seed: int = 0, **more: Any) -> Any:
    """Plan a run of a kind; all kinds load the model in the same way."""
    options, settings = options_of(kind, files, output)
    return planned(files / f"model{seed}", options | settings | {"context": "none"} | more, silent)


__all__ = ["files", "plugin"]  # fixtures


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checkpoints that are loaded."""
    found: list[str] = []
    load: Callable[..., Any] = ModelSpec.load

    def counted(spec: ModelSpec, *arguments: Any) -> Any:
        found.append(Path(spec.model).name)
        return load(spec, *arguments)

    monkeypatch.setattr(ModelSpec, "load", counted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_benchmarks_that_alternate_on_one_model_give_the_tables_of_single_runs(
    dtype: str, files: Path, tmp_path: Path, loads: list[str]
) -> None:
    single = {kind: run_plan(plan_of(kind, files, tmp_path / "single", dtype=dtype), Told()) for kind in KINDS}
    assert len(loads) == len(KINDS)
    holder, kinds = ModelHolder(), list(KINDS)
    for number, kind in enumerate((*kinds, *kinds[::-1], *kinds[::2], *kinds[1::2])):
        one = plan_of(kind, files, tmp_path / str(number), dtype=dtype)
        model = holder.model_of(one, silent).model
        before = state_digest(model), model.config.to_dict(), model.generation_config.to_dict(), model.training
        same(run_plan(one, Told(), holder), single[kind])
        assert (
            state_digest(model),
            model.config.to_dict(),
            model.generation_config.to_dict(),
            model.training,
        ) == before
    assert len(loads) == len(KINDS) + 1


def test_jobs_of_one_checkpoint_load_it_once(files: Path, tmp_path: Path, loads: list[str]) -> None:
    kinds = ("multiple_choice", "copying", "lm_eval")
    plans = [plan_of(kind, files, tmp_path / "study", seed) for kind in kinds for seed in (0, 1)]
    jobs = [Job(f"job {number}", plan) for number, plan in enumerate(plans)]
    told, known = Told(), list[Outcome]()
    outcomes = run_here(jobs, told, known.append)
    assert [one.job for one in outcomes] == jobs
    assert {one.state for one in outcomes} == {"finished"}
    assert len(known) == len(jobs)
    assert loads == ["model0", "model1"]
    numbers = [line for line in told.lines if " of 6: job " in line]
    assert numbers == [f"{n + 1} of 6: job {n}" for n in (0, 2, 4, 1, 3, 5)]
    for number, (kind, seed) in enumerate((kind, seed) for kind in kinds for seed in (0, 1)):
        whole = run_plan(plan_of(kind, files, tmp_path / "single", seed), Told())
        same(load_run(plans[number].folder), whole)
    # Again: nothing is loaded, and nothing is said
    del loads[:]
    again = Told()
    assert {one.state for one in run_here(jobs, again)} == {"finished"}
    assert (loads, again.lines) == ([], [])


def test_a_job_of_another_process_is_left_and_tried_again_at_the_end(files: Path, tmp_path: Path) -> None:
    plans = [plan_of(kind, files, tmp_path) for kind in ("copying", "norms", "multiple_choice")]
    jobs = [Job(plan.manifest["kind"], plan) for plan in plans]
    for plan in plans[:2]:
        plan.folder.mkdir(parents=True)
    known: list[Outcome] = []
    # The first holder ends while the third job is computed; the second never does
    with locked(plans[1].folder):
        held = locked(plans[0].folder)
        held.__enter__()

        def done(outcome: Outcome) -> None:
            known.append(outcome)
            if outcome.job is jobs[2]:
                held.__exit__(None, None, None)

        outcomes = run_here(jobs, Told(), done)
    assert [one.state for one in outcomes] == ["finished", "in use", "finished"]
    assert [one.job.label for one in known] == ["multiple_choice", "copying", "norms"]
    assert "is in use by another process (process" in outcomes[1].message
    assert not (plans[1].folder / MANIFEST).exists()


def test_requests_that_draw_random_numbers_are_those_of_a_single_run(files: Path, tmp_path: Path) -> None:
    """Whatever is planned and computed between a run's plan and its requests."""
    write_task(
        tmp_path / "tasks",
        {
            "task": "drawing",
            "output_type": "multiple_choice",
            "doc_to_text": "!function drawing.text",
            "doc_to_choice": ["yes", "no"],
            "doc_to_target": 0,
        },
        [{"q": f"question {n}"} for n in range(6)],
    )
    path = tmp_path / "tasks" / "drawing.yaml"
    path.write_text(path.read_text().replace("'!function drawing.text'", "!function drawing.text"))
    (tmp_path / "tasks" / "drawing.py").write_text(
        "import random\nimport numpy\n\n\ndef text(doc):\n"
        "    return f\"{doc['q']} {random.random()} {numpy.random.rand()}\"\n"
    )

    def options(output: str, suite: Any) -> dict[str, Any]:
        own = {} if suite == mine else {"include_path": tmp_path / "tasks"}
        return {"suite": suite, "tasks": ("drawing",), "output": tmp_path / output, **own}

    mine = tmp_path / "mine.yaml"
    mine.write_text("description: drawn\ngroups: {Drawn: [drawing]}\ntask_files: tasks\ntemplate: plain\nrule: acc\n")
    both = ("lm_eval", mine)
    single = [run_plan(planned(files / "model0", options("single", one), silent), Told()) for one in both]
    plans = [planned(files / f"model{seed}", options("jobs", one), silent) for seed in (1, 0) for one in both]
    outcomes = run_here([Job(str(n), plan) for n, plan in enumerate(plans)], Told())
    assert [one.state for one in outcomes] == ["finished"] * 4, [one.message for one in outcomes]
    for plan, whole in zip(plans[2:], single, strict=True):
        same(load_run(plan.folder), whole)
    # A different prompt would have another score
    found = single[0].scores
    assert found["ll_continuation"].nunique() == len(found)
