"""Benchmarks of prompts and references: scoring, invalid documents, and settings in the run id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.prompted import ANSWERS, PromptDocument, PromptedBenchmark
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.errors import ScoringError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.benchmarks.kinds import Lines


class Words(PromptedBenchmark):
    """Two tasks, of three documents and of one."""

    kind, description, max_new_tokens = "words", "how many words", 6

    def tasks(self) -> dict[str, list[PromptDocument]]:
        return {
            "river": [PromptDocument(f"The river rose in the night, {n} times", str(n)) for n in range(3)],
            "bridge": [PromptDocument("in the morning the bridge was", "gone")],
        }

    def score(self, answer: str, reference: str) -> float:
        """Score the length alone, so that random models have scores between 0 and 1."""
        return min(1.0, len(answer) / 40)


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a benchmark of the class, as the registry would."""

    def make(kind: type[PromptedBenchmark] = Words, **options: Any) -> Run:
        own = kind()
        monkeypatch.setattr("evalkit.benchmarks.session.benchmark", lambda _: own)
        request = request_of(own.request, checkpoint, {"output": tmp_path, **options})
        return run_plan(own.plan(request, silent), Lines())

    return make


def test_results_are_the_means_of_the_answers_scores(made: Any) -> None:
    run = made()
    answers = run.table(ANSWERS, ())
    assert list(answers["task"]) == ["river"] * 3 + ["bridge"]
    assert (answers["score"] == [min(1.0, len(text) / 40) for text in answers["answer"]]).all()
    river, bridge = Words().metrics(run)
    own = answers.loc[answers["task"] == "river", "score"]
    assert (river.task, river.n, river.value) == ("river", 3, pytest.approx(own.mean()))
    assert river.stderr == pytest.approx(own.sem())
    assert (bridge.n, bridge.stderr) == (1, None)
    assert run.stored["averages"][0]["accuracy"] == pytest.approx((river.value + bridge.value) / 2)
    [view, _] = Words().views(run, (), silent)
    for document, row in zip(view.documents, answers.to_dict("records")[:3], strict=True):
        assert (document.id, document.answer, document.score) == (row["id"], row["answer"], row["score"])
        assert (document.references, document.prompt[0].text) == ((row["reference"],), row["prompt"])


def test_an_answer_ends_before_what_ends_it(made: Any) -> None:
    class Vowels(Words):
        until = ("e", "a", "o")

    class Rescored(Words):
        version = 2

    vowels = made(Vowels)
    assert len({made().folder, made(limit=1).folder, made(Rescored).folder, vowels.folder}) == 4
    answers = vowels.table(ANSWERS, ())
    assert answers["text"].str.contains("[eao]").any()
    assert not answers["answer"].str.contains("[eao]").any()
    assert all(text.startswith(answer) for text, answer in zip(answers["text"], answers["answer"], strict=True))


def test_invalid_documents_and_scores(made: Any) -> None:
    class Percent(Words):
        def score(self, answer: str, reference: str) -> float:
            return 100.0 if reference == "gone" else 0.0

    class Long(Words):
        def tasks(self) -> dict[str, list[PromptDocument]]:
            return {"long": [PromptDocument("river " * 5000, "")]}

    for kind, noun in ((Percent, "bridge document 0"), (Long, "long document 0")):
        with pytest.raises(ScoringError, match=noun):
            made(kind)
