"""Benchmarks of prompts and references; extended contexts; values that the runs of a process share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.prompted import ANSWERS, PromptDocument, PromptedBenchmark
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.run import evaluate, planned
from evalkit.benchmarks.session import run_plan
from evalkit.cache import remembered, remembering
from evalkit.errors import ScoringError, UsageError
from evalkit.models.loading.locate import silent
from evalkit.runs.folder import Run
from tests.benchmarks.kinds import Lines
from tests.printed import printed
from tests.tiny import tiny_checkpoint


class Words(PromptedBenchmark):
    """Two tasks, of three documents and of one."""

    kind, description, max_new_tokens = "words", "how many words", 6

    def tasks(self) -> dict[str, list[PromptDocument]]:
        return {
            "river": [PromptDocument(f"The river rose in the night, {n} times", str(n)) for n in range(3)],
            "bridge": [PromptDocument("in the morning the bridge was", "gone")],
        }

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Score the length alone, so that random models have scores between 0 and 1."""
        return min(1.0, len(answer) / 40)


@pytest.fixture
def made(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(kind: type[PromptedBenchmark] = Words, **options: Any) -> Run:
        own = kind()
        for module in ("registry", "session"):
            monkeypatch.setattr(f"evalkit.benchmarks.{module}.benchmark", lambda _: own)
        request = request_of(own.request, checkpoint, {"output": tmp_path, **options})
        return run_plan(own.plan(request, silent), Lines())

    return make


def test_results_are_the_means_of_the_answers_scores(made: Any) -> None:
    run = made()
    answers = run.table(ANSWERS, ())
    assert list(answers["task"]) == ["river"] * 3 + ["bridge"]
    assert (answers["score"] == [min(1.0, len(text) / 40) for text in answers["answer"]]).all()
    river, bridge = Words.read(run).metrics()
    own = answers.loc[answers["task"] == "river", "score"]
    assert (river.task, river.n, river.value) == ("river", 3, pytest.approx(own.mean()))
    assert river.stderr == pytest.approx(own.sem())
    assert (bridge.n, bridge.stderr) == (1, None)
    assert run.stored["averages"][0]["value"] == pytest.approx((river.value + bridge.value) / 2)
    [view, _] = Words.read(run).views((), silent)
    for document, row in zip(view.documents, answers.to_dict("records")[:3], strict=True):
        assert (document.id, document.answer, document.score) == (row["id"], row["answer"], row["score"])
        assert (list(document.references), document.prompt[0].text) == (json.loads(row["references"]), row["prompt"])


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
        def score(self, answer: str, references: Sequence[str]) -> float:
            return 100.0 if references == ("gone",) else 0.0

    with pytest.raises(ScoringError, match="bridge document 0"):
        made(Percent)

    class OneReference(Words):
        def score(self, answer: str, reference: str) -> float:  # type: ignore[override]
            return float(answer == reference)

    with pytest.raises(UsageError, match=r"score\(answer, references\)"):
        made(OneReference)


def test_one_prompt_for_all_documents_is_noted(made: Any) -> None:
    class Constant(Words):
        def tasks(self) -> dict[str, list[PromptDocument]]:
            return {
                "river": [PromptDocument("The river", str(n)) for n in range(3)],
                "bridge": super().tasks()["bridge"],
            }

    run = made(Constant)
    assert run.stored["caveats"] == {"river": ["3 documents have one and the same prompt"]}
    assert "caveats" not in made().stored
    lines = printed(Constant.read(run).report()).splitlines()
    assert "river*: 3 documents have one and the same prompt" in lines
    assert {line.partition(" ")[0] for line in lines} >= {"river*", "bridge"}


WINDOW = 300
"""Fewer tokens than the longest of the made-up documents have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", window=WINDOW)


@pytest.mark.slow
def test_a_stretched_run_is_a_run_of_its_own(model: Path, documents: Path, tmp_path: Path) -> None:
    """Neither a context within the window nor a missing one shows in its identity."""
    common = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("piqa",), "limit": 2, "output": tmp_path}
    run = evaluate(str(model), progress=Lines(), context=1200, **common)
    extension = run.manifest["specification"]["context_extension"]
    expected = {"method": "yarn", "target": 1200, "original": WINDOW, "factor": 4.0}
    assert extension.items() >= expected.items()
    assert extension["attention_factor"] == pytest.approx(1.138629, abs=1e-6)
    loaded = run.manifest["loaded"]
    assert (loaded["window"], loaded["context_extension"]["method"]) == (1200, "yarn")
    plain = evaluate(str(model), progress=Lines(), **common)
    assert not plain.scores["ll_continuation"].equals(run.scores["ll_continuation"])

    def manifest(**options: Any) -> dict[str, Any]:
        return dict(planned(model, common | options, silent).manifest)

    same = [manifest(), manifest(context="none"), manifest(context=WINDOW)]
    assert {each["id"] for each in same} == {plain.manifest["id"]}
    assert same[0]["specification"]["context_extension"] is None
    ids = {plain.manifest["id"], run.manifest["id"], manifest(context=1200, context_method="linear")["id"]}
    assert len(ids) == 3


def test_a_value_is_made_once_within_the_outermost_block() -> None:
    numbers = count()

    def make() -> int:
        return next(numbers)

    assert [remembered("kind", 1, make) for _ in range(2)] == [0, 1]
    with remembering():
        with remembering():
            assert [remembered("kind", 1, make) for _ in range(2)] == [2, 2]
        assert remembered("kind", 1, make) == 2
        # Kinds and keys are apart, and the key that was used least recently is forgotten
        assert [remembered("a", key, make, most=2) for key in (1, 2, 1, 3, 1, 2)] == [3, 4, 3, 5, 3, 6]
        with pytest.raises(ZeroDivisionError):
            remembered("failing", 1, lambda: 1 // 0)
        assert remembered("failing", 1, lambda: 1) == 1
    assert remembered("kind", 1, make) == 7
