"""The constants of LongBench v1's English tasks: groups, limits, metrics and decoding rules.

In: nothing. Out: `TASKS`, in the order of the paper's tables.

Source: Bai et al., "LongBench" (ACL 2024), Table 1, and the configuration of THUDM/LongBench@2e00731
(`config/dataset2maxlen.json`, `pred.py`, `eval.py`). Prompts are pinned by hash; `prompts` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evalkit.errors import check_known

MetricName = Literal["f1", "rouge_l", "classification", "retrieval", "count", "edit_similarity"]
SuiteName = Literal["longbench", "longbench-e"]
LONGBENCH = "longbench"
"""Name of the benchmark and of its suite."""


@dataclass(frozen=True)
class Task:
    """A LongBench task and its constants."""

    name: str
    """Name in the official files, such as "2wikimqa"."""
    label: str
    """Name in the paper's tables."""
    group: str
    """One of `GROUPS`."""
    metric: MetricName
    """The metric of a prediction."""
    max_new_tokens: int
    """Most generated tokens."""
    documents: int
    """Rows of the official file (LongBench-E has other files)."""
    prompt_hash: str
    """First 16 digits of the SHA-256 of the prompt template in UTF-8, with its fields {context} and {input}."""

    @property
    def chat(self) -> bool:
        """Whether the official code applies a chat model's chat template."""
        return self.group not in (_FEWSHOT, _CODE)

    @property
    def first_line_only(self) -> bool:
        """Whether only the first line of a prediction is scored, after leading newlines."""
        return self.group == _FEWSHOT

    @property
    def newline_ends(self) -> bool:
        """Whether a newline ends generation too; then the first token must be neither a newline nor the EOS token."""
        return self.name == "samsum"


_SINGLE, _MULTI, _SUMMARY = "Single-Document QA", "Multi-Document QA", "Summarization"
_FEWSHOT, _SYNTHETIC, _CODE = "Few-shot Learning", "Synthetic Tasks", "Code Completion"

GROUPS: tuple[str, ...] = (_SINGLE, _MULTI, _SUMMARY, _FEWSHOT, _SYNTHETIC, _CODE)
"""The six task groups. The official average is the mean of the groups' means."""

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("narrativeqa", "NarrativeQA", _SINGLE, "f1", 128, 200, "aada7ed24b06abac"),
        Task("qasper", "Qasper", _SINGLE, "f1", 128, 200, "0fbdd123fe7f83d6"),
        Task("multifieldqa_en", "MultiFieldQA-en", _SINGLE, "f1", 64, 150, "20b4666a2de8a1f7"),
        Task("hotpotqa", "HotpotQA", _MULTI, "f1", 32, 200, "9ec4ae308865bd0c"),
        Task("2wikimqa", "2WikiMQA", _MULTI, "f1", 32, 200, "9ec4ae308865bd0c"),
        Task("musique", "MuSiQue", _MULTI, "f1", 32, 200, "9ec4ae308865bd0c"),
        Task("gov_report", "GovReport", _SUMMARY, "rouge_l", 512, 200, "91c25d585b189ced"),
        Task("qmsum", "QMSum", _SUMMARY, "rouge_l", 512, 200, "dca23b678fe0183b"),
        Task("multi_news", "MultiNews", _SUMMARY, "rouge_l", 512, 200, "2af3f28c40b902e6"),
        Task("trec", "TREC", _FEWSHOT, "classification", 64, 200, "0eff8bebdba99d91"),
        Task("triviaqa", "TriviaQA", _FEWSHOT, "f1", 32, 200, "00a802e6377e72fc"),
        Task("samsum", "SAMSum", _FEWSHOT, "rouge_l", 128, 200, "a68d884234907eef"),
        Task("passage_count", "PassageCount", _SYNTHETIC, "count", 32, 200, "986550b6c61009c6"),
        Task("passage_retrieval_en", "PassageRetrieval-en", _SYNTHETIC, "retrieval", 32, 200, "39b96b7fa52bdd2a"),
        Task("lcc", "LCC", _CODE, "edit_similarity", 64, 500, "6a1f24cf0bb83cd9"),
        Task("repobench-p", "RepoBench-P", _CODE, "edit_similarity", 64, 500, "ee9ec182ea5ffeb7"),
    )
}
"""The sixteen English tasks by name, in the order of the paper's tables."""

E_TASKS: tuple[str, ...] = tuple(name for name in TASKS if name not in ("narrativeqa", "musique", "qmsum"))
"""LongBench-E's thirteen tasks: the same prompts and metrics, on rows sampled evenly over three lengths."""

SUITES: dict[SuiteName, str] = {
    "longbench": "16 tasks over long documents",
    "longbench-e": "13 of them on other documents, with scores by length",
}
"""Suite → its description in one line."""


def find_task(name: str) -> Task:
    """Return the task with a name; raise an `UnknownNameError` if there is none."""
    check_known("LongBench task", [name], TASKS)
    return TASKS[name]


def suite_tasks(suite: str) -> tuple[Task, ...]:
    return tuple(TASKS[name] for name in (E_TASKS if suite == "longbench-e" else TASKS))
