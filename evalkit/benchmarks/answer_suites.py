"""Suites of generated answers: a user's file of prompts and references, or a suite file that names several.

In: an `AnswersRequest`. Out: a run as of `prompted.AnswersBenchmark`, of the suite with the file's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evalkit.benchmarks.base import ListedSuite
from evalkit.benchmarks.generated import AnswerPlan
from evalkit.benchmarks.prompted import AnswersBenchmark, FinishedPrompted, PromptedRequest, PromptTask
from evalkit.benchmarks.request import UserSuiteRequest
from evalkit.data.requests import own_file
from evalkit.display import Say, doing
from evalkit.suites.suites import AnswerTask, Label, chosen_suite, label_of


@dataclass(frozen=True)
class AnswersRequest(PromptedRequest, UserSuiteRequest):
    """Settings of a run of prompts of a suite file, or of a file of requests."""


class FinishedAnswerSuite(FinishedPrompted):
    def label(self, task: str) -> Label:
        return label_of(task, self.run.manifest)


class AnswerSuites(AnswersBenchmark):
    kind = "answers"
    request = AnswersRequest
    read = FinishedAnswerSuite

    def plan(self, request: AnswersRequest, say: Say) -> AnswerPlan:
        suite = chosen_suite(request.suite, request.requests, request.tasks)
        with doing("reading documents"):
            tasks = {name: _task(suite.answers[name]) for name in suite.tasks}
        groups = {group: list(members) for group, members in suite.groups.items()}
        request = replace(request, chat=request.chat or suite.chat)
        plan = self.prompted_plan(request, tasks, {"suite": suite.name, "groups": groups}, say)
        sizes = {**suite.sizes, "Average": sum(suite.sizes.values())}
        about = {"sizes": sizes, "labels": suite.labels, "short": suite.short}
        return replace(plan, manifest=plan.manifest | about)

    def suites(self) -> Mapping[str, ListedSuite]:
        return {}


def _task(about: AnswerTask) -> PromptTask:
    file = own_file(about.requests)
    return PromptTask(file.answer_documents(), file.source, about)
