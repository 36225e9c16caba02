"""Suites of generated answers: a user's file of prompts and references, or a suite file that names several.

In: an `AnswersRequest`. Out: a run as of `prompted.AnswersBenchmark`, of the suite with the file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from evalkit.benchmarks.answer_metrics import AnswerSettings
from evalkit.benchmarks.generated import DocumentPlan
from evalkit.benchmarks.multiple_choice.suites import AnswerTask, chosen_suite, label_of
from evalkit.benchmarks.outcomes import Label
from evalkit.benchmarks.prompted import AnswersBenchmark, PromptedRequest, PromptTask
from evalkit.data.requests import own_file
from evalkit.display import Say, doing
from evalkit.inputs.settings import setting
from evalkit.runs.folder import Run


@dataclass(frozen=True)
class AnswersRequest(PromptedRequest):
    """Settings of a run of a suite file, or a file of requests, with prompts; those of `SuiteRequest` that apply."""

    suite: str | None = setting(None, names="name or file")
    tasks: tuple[str, ...] = setting(())
    requests: Path | None = setting(None, names="file")


class AnswerSuites(AnswersBenchmark):
    kind = "answers"
    request = AnswersRequest

    def plan(self, request: AnswersRequest, say: Say) -> DocumentPlan:
        suite = chosen_suite(request.suite, request.requests, request.tasks)
        with doing("reading documents"):
            tasks = {name: _task(suite.answers[name]) for name in suite.tasks}
        groups = {group: list(members) for group, members in suite.groups.items()}
        request = replace(request, chat=request.chat or suite.chat)
        plan = self.prompted_plan(request, tasks, {"suite": suite.name, "groups": groups}, say)
        sizes = {**suite.sizes, "Average": sum(suite.sizes.values())}
        about = {"sizes": sizes, "labels": suite.labels, "short": suite.short}
        return replace(plan, manifest=plan.manifest | about)

    def suites(self) -> Mapping[str, str]:
        return {}

    def label(self, run: Run, task: str) -> Label:
        return label_of(task, run.manifest)


def _task(about: AnswerTask) -> PromptTask:
    file = own_file(about.requests)
    settings = AnswerSettings(**about.model_dump(exclude={"requests"}))
    return PromptTask(file.answer_documents(), file.source, settings)
