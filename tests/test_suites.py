"""The suite that the paper runs."""

from __future__ import annotations

import pytest

from evalkit.errors import UnknownNameError, UsageError
from evalkit.suites import choose_tasks, load_suite, suite_names


def test_zeroshot8_is_the_papers() -> None:
    """Appendix A.3: three reasoning tasks, five of knowledge."""
    suite = load_suite("zeroshot8")
    assert suite.groups == {
        "Reasoning": ("winogrande", "arc_easy", "arc_challenge"),
        "Knowledge": ("hellaswag", "piqa", "openbookqa", "boolq", "mmlu"),
    }
    assert suite.task_dir.is_dir()


def test_every_suite_loads() -> None:
    for name in suite_names():
        assert load_suite(name).tasks


def test_unknown_suite_offers_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown suite 'zeroshot': did you mean 'zeroshot8'\?"):
        load_suite("zeroshot")


def test_chosen_tasks_keep_the_suites_order_and_drop_empty_averages() -> None:
    suite = load_suite("zeroshot8")
    assert choose_tasks(suite, ("mmlu", "piqa")).groups == {"Knowledge": ("piqa", "mmlu")}
    assert choose_tasks(suite, ("boolq", "arc_easy")).tasks == ("arc_easy", "boolq")
    assert choose_tasks(suite, ()) == suite


def test_wrong_choices_of_tasks() -> None:
    suite = load_suite("zeroshot8")
    with pytest.raises(UnknownNameError, match=r"unknown task 'hellaswg': did you mean 'hellaswag'\?"):
        choose_tasks(suite, ("hellaswg",))
    with pytest.raises(UsageError, match="named twice"):
        choose_tasks(suite, ("piqa", "piqa"))
