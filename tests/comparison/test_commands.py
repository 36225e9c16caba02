"""Comparisons of tasks of lm-eval that name their sources; and the speed of `evalkit compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner

import evalkit
from evalkit.cli.root import cli
from evalkit.comparison.comparison_report import comparison_report
from evalkit.errors import UsageError
from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.comparison.made import compared, make_run, scores_of, three_tasks


def test_a_task_of_lm_eval_says_what_its_documents_share(checkpoint: Path, tmp_path: Path) -> None:
    documents = [
        {"question": f"which {number}", "story": f"story {number // 3}", "choices": ["a", "b"], "gold": number % 2}
        for number in range(9)
    ]
    task = CHOICE | {"task": "made_stories", "metadata": {"version": 1.0, "source": "story"}}
    write_task(tmp_path / "tasks", task, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_stories", "progress": evalkit.Progress(live=False)}
    runs = [evalkit.evaluate(str(checkpoint), output=tmp_path, dtype=dtype, **options)  # type: ignore[arg-type]
            for dtype in ("float32", "bfloat16")]  # fmt: skip
    [stories] = compared(*runs).tasks
    assert (stories.n, stories.sources, stories.test) == (9, 3, "sign flip and t")


def test_an_own_task_is_one_kind_of_run_under_any_template(checkpoint: Path, tmp_path: Path) -> None:
    """Runs under `plain` and `inst` have different rules; they are compared under the first one that both support."""
    documents = [{"question": f"which {number}", "choices": ["a", "b"], "gold": number % 2} for number in range(9)]
    write_task(tmp_path / "tasks", CHOICE | {"task": "made_own", "metadata": {"version": 1.0}}, documents)
    options = {"include_path": tmp_path / "tasks", "tasks": "made_own", "progress": evalkit.Progress(live=False)}
    plain, inst = (evalkit.evaluate(str(checkpoint), output=tmp_path, template=template, **options)  # type: ignore[arg-type]
                   for template in ("plain", "inst"))  # fmt: skip
    assert (plain.kind, inst.kind, plain.rule, inst.rule) == ("multiple_choice", "multiple_choice", "acc", "ppl")
    for first, second in ((plain, inst), (inst, plain)):
        comparison = compared(first, second)
        assert (comparison.rule, comparison.own_rules) == ("acc", (first.rule, second.rule))
        assert comparison.tasks == compared(first, second, rule="acc").tasks
        [note] = [note for note in comparison_report([comparison]).parts[0].notes if "own rules" in note]
        assert "acc" in note and "ppl" in note


def test_a_note_says_how_intervals_are_made_that_are_not_of_the_standard_error(tmp_path: Path) -> None:
    runs = [[three_tasks(tmp_path, f"{side}{seed}", share, seed=seed + 10 * (side == "b")) for seed in (1, 2)]
            for side, share in (("a", 0.4), ("b", 0.5))]  # fmt: skip
    (a, _), (b, _) = runs

    def note(*sides: Any, **options: Any) -> str:
        notes = comparison_report([compared(*sides, **options)]).all_notes
        return " ".join(text for text in notes if text.startswith("95 % interval"))

    assert "Bonett" in note(a, b) and "Banerjee" not in note(a, b) and "extended" not in note(a, b)
    assert "Bonett" in note(*runs) and "Banerjee" in note(*runs)
    assert "Hall" in note(a, b, outcome="log_loss") and "Bonett" not in note(a, b, outcome="log_loss")
    # 16 documents won and 6 lost: t would exclude zero where the exact test (p = 0.052) cannot
    a, b = (make_run(tmp_path, {"piqa": scores_of("piqa", [*first, *[1] * 378])}, model=name)
            for name, first in (("c", [0] * 16 + [1] * 6), ("d", [1] * 16 + [0] * 6)))  # fmt: skip
    assert compared(a, b).tasks[0].low == 0 and "extended to 0" in note(a, b)


def test_several_sides_are_compared_under_one_rule(tmp_path: Path) -> None:
    """Not each pair under a rule of its own."""
    rules = ("acc_norm", "acc", "acc_norm")
    runs = [three_tasks(tmp_path, name, 0.4, seed, manifest={"rule": rule})
            for seed, (name, rule) in enumerate(zip("abc", rules, strict=True))]  # fmt: skip
    comparisons = evalkit.compare(*runs)
    assert isinstance(comparisons, list)
    assert {compared.rule for compared in comparisons} == {"acc_norm"}
    assert {compared.own_rules for compared in comparisons} == {("acc_norm", "acc")}


def test_documents_of_two_runs_with_different_rules(tmp_path: Path) -> None:
    """The first run's rule needs scores that the second lacks; the error names those that both have."""
    table = {"arc_easy": scores_of("arc_easy", [1, 0, 1])}
    first = make_run(tmp_path, table, model="a", manifest={"rule": "pmi"})
    runs = [str(first), str(make_run(tmp_path, table, model="b"))]
    for command in (["--won"], ["--lost"], [], ["--document", "arc_easy/1"]):
        failed = CliRunner().invoke(cli, ["show", *runs, *command], standalone_mode=False)
        assert isinstance(failed.exception, UsageError) and "--rule acc" in str(failed.exception)
        assert CliRunner().invoke(cli, ["show", *runs, *command, "--rule", "acc"]).exit_code == 0
    assert CliRunner().invoke(cli, ["show", *runs[::-1], "--won"]).exit_code == 0
