"""Benchmarks of prompts and references: scoring, invalid documents, and settings in the run id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.prompted import ANSWERS, PromptDocument, PromptedBenchmark
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.session import run_plan
from evalkit.errors import ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.benchmarks.test_every_benchmark import Silent


class Words(PromptedBenchmark):
    """Two tasks."""

    kind, description, max_new_tokens = "words", "how many words", 6

    def tasks(self) -> dict[str, list[PromptDocument]]:
        """Tasks of three documents and of one."""
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
        return run_plan(own.plan(request, Silent().say), Silent())

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


def test_an_answer_ends_before_what_ends_it(made: Any) -> None:
    class Vowels(Words):
        until = ("e", "a", "o")

    answers = made(Vowels).table(ANSWERS, ())
    assert answers["text"].str.contains("[eao]").any()
    assert not answers["answer"].str.contains("[eao]").any()
    assert all(text.startswith(answer) for text, answer in zip(answers["text"], answers["answer"], strict=True))


def test_what_makes_another_run(made: Any) -> None:
    class Rescored(Words):
        version = 2

    class Longer(Words):
        max_new_tokens = 7

    assert made().folder == made().folder
    assert len({made().folder, made(limit=1).folder, made(Rescored).folder, made(Longer).folder}) == 4
    assert [task["n"] for task in made(limit=2).stored["tasks"]] == [2, 1]


def test_a_score_that_is_no_share_is_refused(made: Any) -> None:
    class Percent(Words):
        def score(self, answer: str, reference: str) -> float:
            return 100.0 if reference == "gone" else 0.0

    with pytest.raises(ScoringError, match=r"bridge document 0: benchmark words scores 100.0; expected 0 to 1"):
        made(Percent)


def test_a_prompt_that_does_not_fit_is_refused(made: Any) -> None:
    class Long(Words):
        def tasks(self) -> dict[str, list[PromptDocument]]:
            return {"long": [PromptDocument("river " * 5000, "")]}

    with pytest.raises(ScoringError, match=r"long document 0: its prompt has [\d,]+ tokens; expected 1 to 4,090"):
        made(Long)


def test_a_task_without_documents_is_refused(made: Any) -> None:
    class Empty(Words):
        def tasks(self) -> dict[str, list[PromptDocument]]:
            return {"none": []}

    with pytest.raises(UsageError, match="benchmark words: task none has no documents"):
        made(Empty)


def test_documents_as_people_read_them(made: Any) -> None:
    run = made()
    river, bridge = Words().views(run, (), silent)
    assert [view.task for view in Words().views(run, ("bridge",), silent)] == ["bridge"]
    rows = run.table(ANSWERS, ()).to_dict("records")
    assert (river.metric, [one.id for one in river.documents]) == ("score", ["0", "1", "2"])
    for one, row in zip([*river.documents, *bridge.documents], rows, strict=True):
        assert (one.answer, one.references, one.score) == (row["answer"], (row["reference"],), row["score"])
        assert [piece.text for piece in one.prompt] == [row["prompt"]]
        assert one.facts["prompt tokens"] == str(row["tokens"])
        assert one.facts["ended"] in ("end token", "stop text", "maximum length")
        assert "cut" not in one.facts
