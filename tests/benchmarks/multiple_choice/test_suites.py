"""The paper's suite."""

from __future__ import annotations

import pytest

from evalkit.benchmarks.multiple_choice.suites import TASK_DIR, choose_tasks, load_suite, shipped_suites, with_fewshot
from evalkit.errors import UsageError
from evalkit.paths import resource


def test_zeroshot8_is_the_papers() -> None:
    """Appendix A.3: three reasoning tasks, five of knowledge."""
    suite = load_suite("zeroshot8")
    assert suite.groups == {
        "Reasoning": ("winogrande", "arc_easy", "arc_challenge"),
        "Knowledge": ("hellaswag", "piqa", "openbookqa", "boolq", "mmlu"),
    }
    assert resource(*TASK_DIR).is_dir()


def test_every_suite_loads() -> None:
    for name in shipped_suites():
        assert load_suite(name).tasks


def test_chosen_tasks_keep_the_suites_order_and_drop_empty_averages() -> None:
    suite = load_suite("zeroshot8")
    assert choose_tasks(suite, ("mmlu", "piqa")).groups == {"Knowledge": ("piqa", "mmlu")}
    assert choose_tasks(suite, ("boolq", "arc_easy")).tasks == ("arc_easy", "boolq")
    assert choose_tasks(suite, ()) == suite


@pytest.mark.parametrize(("name", "task"), [("zeroshot8", "mmlu"), ("zeroshot8_text", "mmlu_continuation")])
def test_mmlu_has_five_examples(name: str, task: str) -> None:
    suite = choose_tasks(load_suite(name), (task,))
    assert with_fewshot(suite, 5).num_fewshot == 5
    with pytest.raises(UsageError, match=f"--num-fewshot is 6, but {task} has no more than 5 examples"):
        with_fewshot(suite, 6)


def test_tasks_without_pinned_examples_are_refused_with_the_way_out() -> None:
    suite = choose_tasks(load_suite("zeroshot8"), ("piqa", "boolq", "mmlu"))
    with pytest.raises(UsageError) as caught:
        with_fewshot(suite, 3)
    assert "no few-shot examples for piqa, boolq:" in str(caught.value)
    assert "--suite lm_eval --tasks piqa,boolq --num-fewshot 3" in str(caught.value)
    assert with_fewshot(suite, 0) == suite
