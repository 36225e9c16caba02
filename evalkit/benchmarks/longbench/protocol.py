"""The constants of LongBench v1's English tasks: groups, limits, metrics and decoding rules.

In: nothing. Out: `TASKS`, in the order of the paper's tables.

Source: Bai et al., "LongBench" (ACL 2024), Table 1, and the configuration of THUDM/LongBench@2e00731
(`config/dataset2maxlen.json`, `pred.py`, `eval.py`). Prompts are pinned by hash; `prompts` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evalkit.errors import UnknownNameError

MetricName = Literal["f1", "rouge_l", "classification", "retrieval", "count", "edit_similarity"]
SuiteName = Literal["longbench", "longbench-e"]


@dataclass(frozen=True)
class Task:
    """A LongBench task and its constants."""

    name: str
    """Name in the official files, such as "2wikimqa"."""
    group: str
    """One of `GROUPS`."""
    metric: MetricName
    """The metric of a prediction."""
    max_new_tokens: int
    """Most generated tokens."""
    documents: int
    """Rows of the official file (LongBench-E has other files)."""
    prompt_sha256: str
    """SHA-256 of the prompt template in UTF-8, with its fields {context} and {input}."""
    chat: bool = True
    """Whether the official code applies a chat model's chat template."""
    first_line_only: bool = False
    """Whether only the first line of a prediction is scored, after leading newlines."""
    newline_ends: bool = False
    """Whether a newline ends generation too; then the first token must be neither a newline nor the EOS token."""

    @property
    def in_e(self) -> bool:
        """Whether LongBench-E has the task."""
        return self.name in E_TASKS


_SINGLE, _MULTI, _SUMMARY = "Single-Document QA", "Multi-Document QA", "Summarization"
_FEWSHOT, _SYNTHETIC, _CODE = "Few-shot Learning", "Synthetic Tasks", "Code Completion"

GROUPS: tuple[str, ...] = (_SINGLE, _MULTI, _SUMMARY, _FEWSHOT, _SYNTHETIC, _CODE)
"""The six task groups. The official average is the mean of the groups' means."""

_PROMPTS = {
    "narrativeqa": "aada7ed24b06abace5b0045ac3bcfe06fc831a6cf434f0ecfd99fb7b3d299e1c",
    "qasper": "0fbdd123fe7f83d6d6a9c583ca28cb29d68e523bf8fec01a0cf2dcd11037775d",
    "multifieldqa_en": "20b4666a2de8a1f701bdb6c4e015fa9f8758d64b361d841f7766df6c9ceba770",
    "hotpotqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "2wikimqa": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "musique": "9ec4ae308865bd0c62af20b3dc7b12b31f2b447f55684bd88c1aa40f2f636deb",
    "gov_report": "91c25d585b189ced91c9280efcb4ecb5dcff9548cd4e3bfae66c68025b569e95",
    "qmsum": "dca23b678fe0183bbd9555b57947022aed1b85739da5ad7e1b4708dd0c71c409",
    "multi_news": "2af3f28c40b902e6535d4910510d51653613c49de9b2fc287c5958395061101d",
    "trec": "0eff8bebdba99d91e9d7d91b6ab39455ac74648bea92c9255c9f68c62175b2db",
    "triviaqa": "00a802e6377e72fca39b169cf6c28893bedf23ba7286b03ecd15867c3e27a7c4",
    "samsum": "a68d884234907eefcaa0eacf7b2997f60fa46603988dceae6a44f9b49f045b3f",
    "passage_count": "986550b6c61009c629a4535766d94b7b51e2b2b9e1ed169e4ecb54417466e964",
    "passage_retrieval_en": "39b96b7fa52bdd2aa2bde34ea199158505201b9a0a2c3ce94e80249293f60431",
    "lcc": "6a1f24cf0bb83cd90f1fca8f0dd24801626c2aaea29db834ddc83b950e71190e",
    "repobench-p": "ee9ec182ea5ffeb70a7140d55baea97264a8612d88226d323afa90859c36240c",
}
"""SHA-256 of each prompt template."""


def _task(
    name: str,
    group: str,
    metric: MetricName,
    most: int,
    documents: int,
    *,
    chat: bool = True,
    line: bool = False,
    newline: bool = False,
) -> Task:
    return Task(name, group, metric, most, documents, _PROMPTS[name], chat, line, newline)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("narrativeqa", _SINGLE, "f1", 128, 200),
        _task("qasper", _SINGLE, "f1", 128, 200),
        _task("multifieldqa_en", _SINGLE, "f1", 64, 150),
        _task("hotpotqa", _MULTI, "f1", 32, 200),
        _task("2wikimqa", _MULTI, "f1", 32, 200),
        _task("musique", _MULTI, "f1", 32, 200),
        _task("gov_report", _SUMMARY, "rouge_l", 512, 200),
        _task("qmsum", _SUMMARY, "rouge_l", 512, 200),
        _task("multi_news", _SUMMARY, "rouge_l", 512, 200),
        _task("trec", _FEWSHOT, "classification", 64, 200, chat=False, line=True),
        _task("triviaqa", _FEWSHOT, "f1", 32, 200, chat=False, line=True),
        _task("samsum", _FEWSHOT, "rouge_l", 128, 200, chat=False, line=True, newline=True),
        _task("passage_count", _SYNTHETIC, "count", 32, 200),
        _task("passage_retrieval_en", _SYNTHETIC, "retrieval", 32, 200),
        _task("lcc", _CODE, "edit_similarity", 64, 500, chat=False),
        _task("repobench-p", _CODE, "edit_similarity", 64, 500, chat=False),
    )
}
"""The sixteen English tasks by name, in the order of the paper's tables."""

LABELS = {
    "narrativeqa": "NarrativeQA",
    "qasper": "Qasper",
    "multifieldqa_en": "MultiFieldQA-en",
    "hotpotqa": "HotpotQA",
    "2wikimqa": "2WikiMQA",
    "musique": "MuSiQue",
    "gov_report": "GovReport",
    "qmsum": "QMSum",
    "multi_news": "MultiNews",
    "trec": "TREC",
    "triviaqa": "TriviaQA",
    "samsum": "SAMSum",
    "passage_count": "PassageCount",
    "passage_retrieval_en": "PassageRetrieval-en",
    "lcc": "LCC",
    "repobench-p": "RepoBench-P",
}
"""Task → its name in the paper's tables."""

E_TASKS: tuple[str, ...] = tuple(name for name in TASKS if name not in ("narrativeqa", "musique", "qmsum"))
"""LongBench-E's thirteen tasks: the same prompts and metrics, on rows sampled evenly over three lengths."""

SUITES: dict[SuiteName, str] = {
    "longbench": "16 tasks over long documents",
    "longbench-e": "13 of them on other documents, with scores by length",
}
"""Suite → its description in one line."""


def find_task(name: str) -> Task:
    """Return the task with a name; raise an `UnknownNameError` if there is none."""
    if name not in TASKS:
        raise UnknownNameError("LongBench task", name, TASKS)
    return TASKS[name]


def suite_tasks(suite: str) -> tuple[Task, ...]:
    """Return the tasks of `longbench` or `longbench-e`, in order."""
    if suite not in SUITES:
        raise UnknownNameError("LongBench suite", suite, SUITES)
    return tuple(TASKS[name] for name in (E_TASKS if suite == "longbench-e" else TASKS))
