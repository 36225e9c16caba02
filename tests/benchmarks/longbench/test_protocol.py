"""The constants, compared with recorded facts of the official code; the cost of importing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evalkit.benchmarks.longbench.data import OFFICIAL_BLOBS
from evalkit.benchmarks.longbench.protocol import E_TASKS, GROUPS, TASKS, find_task, suite_tasks
from evalkit.errors import UnknownNameError
from tests.fixtures import facts


def test_tasks_are_the_official_ones() -> None:
    official = facts("protocol")
    assert list(TASKS) == list(official["tasks"])
    for name, task in TASKS.items():
        fact = official["tasks"][name]
        assert task.name == name
        assert [task.group, task.metric, task.max_new_tokens, task.documents, task.prompt_sha256] == [
            fact[key] for key in ("group", "metric", "max_new_tokens", "documents", "prompt_sha256")
        ]
        assert task.chat == (name not in official["chat_wrapper_skipped"])
        assert task.first_line_only == (name in official["first_line_only"])
        assert task.newline_ends == (name == "samsum")
    assert sum(task.documents for task in TASKS.values()) == 3750
    assert set(GROUPS) == {task.group for task in TASKS.values()}


def test_e_has_the_tasks_of_the_official_files() -> None:
    assert set(E_TASKS) == {name.removesuffix("_e") for name in facts("blobs") if name.endswith("_e")}
    assert [task.name for task in suite_tasks("longbench-e")] == list(E_TASKS)
    assert [task.name for task in suite_tasks("longbench")] == list(TASKS)


def test_files_are_pinned_as_published() -> None:
    assert facts("blobs") == OFFICIAL_BLOBS
    assert {*TASKS, *(f"{name}_e" for name in E_TASKS)} <= set(OFFICIAL_BLOBS)
    assert len(OFFICIAL_BLOBS) == 34


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'hotpotqa'"):
        find_task("hotpot_qa")
    with pytest.raises(UnknownNameError, match="'longbench-e'"):
        suite_tasks("longbench-f")


def test_nothing_here_needs_a_model() -> None:
    modules = (
        "data",
        "metrics",
        "official_format",
        "benchmark",
        "prompts",
        "protocol",
        "scores",
        "results_report",
    )
    script = "import sys\n" + "".join(f"import evalkit.benchmarks.longbench.{module}\n" for module in modules)
    script += "from evalkit.benchmarks.longbench import prompts, protocol\nprompts.template(protocol.TASKS['lcc'])\n"
    script += "print(*({'torch', 'transformers', 'lm_eval', 'datasets', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
