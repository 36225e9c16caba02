"""Requests of made-up tasks: their rows, batches, resumption and texts without tokens, beside plain loops and sums."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evalkit.benchmarks.lm_eval.requests import likelihood_of
from evalkit.benchmarks.run import planned as plan_run
from evalkit.benchmarks.session import ModelHolder, run_plan
from evalkit.cache import remembering
from evalkit.errors import CheckpointError, RunError, ScoringError
from evalkit.generation.prompts import Capacity, Prompt, Speed
from evalkit.models.loading.locate import silent
from evalkit.models.loading.spec import tokenizer_alone
from evalkit.requests.batches import Batch, Budget
from evalkit.requests.computation import REQUESTS
from evalkit.requests.computer import RequestComputer
from evalkit.requests.encoded import EmptyTexts, EncodedDocuments, ScoreBatch, scored_rows
from evalkit.requests.planner import Stopped, is_missing, planned
from evalkit.requests.requests import (
    Encoder,
    Facts,
    Generate,
    RunRequests,
    Score,
    ScoreDocument,
    TaskRequests,
)
from evalkit.requests.rows import (
    KEY,
    GeneratedRow,
    NothingFinished,
    RequestKey,
    ScoredRow,
    is_finished,
    segment_columns,
)
from evalkit.runs.columns import record_batch, schema_of, to_bytes
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, Run
from evalkit.runs.journal import Entry, FinishedRows, Journal
from evalkit.runs.score_table import COLUMNS, SEGMENTS
from evalkit.runs.traits import NO_BATCH, BatchDevice
from evalkit.scoring.forward import Scores
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.questions import Question
from evalkit.suites.templates import load_template
from tests.benchmarks.kinds import Lines, files, same
from tests.benchmarks.kinds import plan as plan_of_kind
from tests.benchmarks.lm_eval.made import ANSWERS, TEXTS, made_tasks, write_task
from tests.journals import entries_of
from tests.models.loading import load_folder
from tests.questions import question
from tests.tiny import TOKENS, tiny_checkpoint

__all__ = ["files"]  # a fixture

CONTINUATION = 3
"""Code of the segment whose tokens may be the argmax."""
CAPACITY = Capacity(tokens=40, most_rows=3, chunk=4, token_bytes=0)
SPEED = Speed(2.0, 1.0, 3.0, 1.0, 1.0)
FACTS = Facts(window=100, token_budget=40, way="tree", capacity=CAPACITY)
HERE = BatchDevice("cpu", "x86_64", "tiles", "here")


def scored(tokens: Sequence[int], choice: int = 0, **about: Any) -> Score:
    """A sequence of which all tokens are in the continuation, with a context of the first."""
    segments = np.full(len(tokens), CONTINUATION, np.int8)
    segments[:1] = 2
    return Score(choice, "", np.array(tokens, np.int32), segments, segments == CONTINUATION, **about)


@dataclass(frozen=True)
class ScoredTask(TaskRequests):
    """Documents that are scored; a document in order may have several windows."""

    task: str
    documents: Sequence[ScoreDocument]
    in_order: bool = False
    first: int = 0
    contents: Any = None

    @property
    def journal(self) -> str:
        return f"scored {self.task}"

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        costs: dict[RequestKey, float] = {}
        for document in self.documents:
            for score in document.scores:
                key = RequestKey(self.journal, document.document, score.choice, score.texts)
                costs[key] = costs.get(key, 0.0) + document.work / len(document.scores)
        yield from costs.items()

    def without(self, keys: Collection[Any]) -> ScoredTask:
        left = [each for each in self.documents if (self.journal, each.document, 0, "", 0) not in keys]
        return replace(self, documents=left)

    def candidates(self) -> ScoredTask:
        return replace(self, documents=self.documents[:1])

    def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
        yield from self.documents


@dataclass(frozen=True)
class GeneratedTask(TaskRequests):
    """Prompts, of each of which several texts may be sampled."""

    task: str
    asked: Sequence[Generate]
    generates = True

    @property
    def journal(self) -> str:
        return f"generated {self.task}"

    def costs(self) -> Iterator[tuple[RequestKey, float]]:
        for each in self.asked:
            if each.part == 0:
                yield each.key(self.journal), 10.0

    def without(self, keys: Collection[Any]) -> GeneratedTask:
        return self

    def candidates(self) -> GeneratedTask:
        return replace(self, asked=self.asked[:1])

    def generated(self, encoder: Encoder) -> Sequence[Generate]:
        return self.asked


@dataclass(frozen=True)
class Done:
    """What planning needs of finished rows: keys of rows, and numbers of parts."""

    keys: Collection[Any] = ()
    parts: Mapping[Any, int] = field(default_factory=dict)
    without_batch: Collection[Any] = ()

    def __contains__(self, key: Any) -> bool:
        return key in self.keys


def encoder(facts: Facts = FACTS, **about: Any) -> Encoder:
    return Encoder(None, facts, **about)


def batches_of(tasks: Sequence[TaskRequests], finished: Any = None, facts: Facts = FACTS, **about: Any) -> list[Batch]:
    plan = planned(RunRequests(tasks, **about), encoder(facts), NothingFinished() if finished is None else finished)
    return list(plan.batches)


def content_of(batch: Batch) -> Any:
    """All that determines the rows of a batch."""
    content = batch.content
    if isinstance(content, EmptyTexts):
        return content.rows
    if isinstance(content, ScoreBatch):
        sequences = content.tree.sequences
        heads = [(head.document, head.heads, head.texts, head.lengths) for head in content.documents]
        arrays = [content.tree.trunk, sequences.tokens, sequences.is_scored, sequences.starts, sequences.first]
        return repr(heads), [array.tolist() for array in arrays], content.way
    return [(asked.document, asked.part, asked.prompt.tokens.tolist()) for asked in content]


def keys_of(batch: Batch) -> list[Any]:
    """Keys of the rows that a batch will have."""
    if isinstance(batch.content, EmptyTexts):
        return [(batch.journal, row.document, row.choice, row.texts, row.part) for row in batch.content.rows]
    if isinstance(batch.content, ScoreBatch):
        return [key for head in batch.content.documents for key in head.keys(batch.journal)]
    return [(*asked.key(batch.journal), asked.part) for asked in batch.content]


# Rows of scores


@st.composite
def answered(draw: st.DrawFn) -> tuple[list[Score], list[Scores]]:
    """Sequences of a document and what the engine returns: NaN of tokens that are not scored."""
    dice = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts_bytes = draw(st.booleans())
    scores = []
    answers = []
    for choice in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 12))
        segments = np.array(draw(st.lists(st.integers(0, 5), min_size=length, max_size=length)), np.int8)
        is_scored = np.isin(segments, draw(st.lists(st.integers(0, 5))))
        score = Score(
            choice=choice,
            texts=draw(st.sampled_from(["", "a", "b"])),
            tokens=dice.integers(0, 9, length).astype(np.int32),
            segments=segments,
            is_scored=is_scored,
            part=draw(st.integers(0, 3)),
            parts=4,
            greedy=draw(st.booleans()),
            truncated=draw(st.integers(0, 5)),
            straddles=draw(st.integers(0, 5)),
            bytes=dice.integers(0, 5, length).astype(np.int32) if counts_bytes else None,
        )
        logprobs = np.where(is_scored, -dice.exponential(size=length), np.nan).astype(np.float32)
        logprobs[0] = np.nan
        scores.append(score)
        answers.append(Scores(logprobs, dice.random(length) < 0.8))
    return scores, answers


@given(st.lists(answered(), min_size=1, max_size=4))
def test_rows_are_sums_over_tokens(documents: list[tuple[list[Score], list[Scores]]]) -> None:
    """Of every token but the first of a sequence, whatever the other sequences and documents."""
    if len({scores[0].bytes is None for scores, _ in documents}) > 1:
        documents = documents[:1]
    asked = [ScoreDocument(f"d{n}", f"label {n}", "g", scores, 1.0) for n, (scores, _) in enumerate(documents)]
    encoded = EncodedDocuments.of(iter(asked))
    for number, (scores, answers) in enumerate(documents):
        rows = scored_rows(encoded.head(number), answers)
        for score, answer, row in zip(scores, answers, rows, strict=True):
            sums: dict[int, list[Any]] = {}
            for at in range(1, len(score.tokens)):
                of_segment = sums.setdefault(int(score.segments[at]), [0, 0, None])
                of_segment[0] += 1
                of_segment[1] += 0 if score.bytes is None else int(score.bytes[at])
                if score.is_scored[at]:
                    of_segment[2] = (of_segment[2] or 0.0) + float(answer.logprobs[at])
            assert row.segments == sorted(sums)
            assert row.tokens == [sums[code][0] for code in row.segments]
            assert row.bytes == ([] if score.bytes is None else [sums[code][1] for code in row.segments])
            for code, likelihood in zip(row.segments, row.likelihoods, strict=True):
                assert likelihood == (None if sums[code][2] is None else pytest.approx(sums[code][2], rel=1e-12))
                assert row.of(code) == (sums[code][0], likelihood)
            assert row.of(6) == (0, None)
            places = [at for at, code in enumerate(score.segments) if code == CONTINUATION]
            assert row.greedy == (all(bool(answer.greedy[at]) for at in places) if score.greedy else None)
            assert (row.document, row.choice, row.texts) == (f"d{number}", score.choice, score.texts)
            assert (row.part, row.parts) == (score.part, score.parts)
            assert (row.truncated, row.straddles) == (score.truncated, score.straddles)
        record_batch(rows, ScoredRow)  # every number is finite


SUMS = st.tuples(st.integers(1, 9), st.none() | st.floats(-9, 0))
SEGMENT_ROWS = st.dictionaries(st.integers(0, 6), SUMS, max_size=5)


@given(st.lists(SEGMENT_ROWS, max_size=8), st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
def test_columns_of_segments(rows: list[dict[int, tuple[int, float | None]]], wanted: list[int]) -> None:
    stored = [
        ScoredRow(
            *("d", 0, 0, 1, ""),
            segments=sorted(row),
            tokens=[row[code][0] for code in sorted(row)],
            bytes=[],
            likelihoods=[row[code][1] for code in sorted(row)],
            greedy=None,
            truncated=0,
            straddles=0,
        )
        for row in rows
    ]
    # As of a journal: in several batches
    pieces = [record_batch(stored[:3], ScoredRow), record_batch(stored[3:], ScoredRow)]
    likelihoods, tokens = segment_columns(pa.Table.from_batches(pieces), wanted)
    absent = (0, None)
    expected = [[row.get(code, absent)[1] for code in wanted] for row in rows]
    assert [[None if np.isnan(value) else value for value in values] for values in likelihoods] == expected
    assert tokens.tolist() == [[row.get(code, absent)[0] for code in wanted] for row in rows]


# Batches, whatever is finished


@st.composite
def tasks(draw: st.DrawFn) -> list[TaskRequests]:
    """Tasks that are sorted, in order and generated, with texts that share beginnings and texts without tokens."""

    def tokens(least: int, most: int) -> list[int]:
        return [7, 7, 7] * draw(st.integers(0, 2)) + draw(st.lists(st.integers(0, 2), min_size=least, max_size=most))

    made: list[TaskRequests] = []
    for number, kind in enumerate(draw(st.lists(st.sampled_from(["sorted", "in order", "generated"]), max_size=3))):
        documents = []
        asked = []
        for name in map(str, range(draw(st.integers(1, 6)))):
            label = f"{number} {name}"
            if kind == "sorted":
                choices = [scored(tokens(0, 9), choice) for choice in range(draw(st.integers(1, 3)))]
                documents.append(ScoreDocument(name, label, draw(st.sampled_from("ab")), choices, 3.0))
            elif kind == "in order":
                windows = draw(st.integers(1, 3))
                for part in range(windows):
                    score = scored(tokens(2, 20), part=part, parts=windows)
                    documents.append(ScoreDocument(name, label, "", [score], 3.0))
            else:
                samples = draw(st.integers(1, 2))
                for part in range(samples):
                    prompt = Prompt(len(asked), np.array(tokens(1, 9), np.int64), 5, label=label)
                    asked.append(Generate(name, prompt, "", part=part, parts=samples))
        if kind == "generated":
            made.append(GeneratedTask(str(number), asked))
        else:
            made.append(ScoredTask(str(number), documents, kind == "in order", first=draw(st.integers(0, 3))))
    return made


@settings(max_examples=50)
@given(tasks(), st.data())
def test_batches_do_not_depend_on_what_is_finished(made: list[TaskRequests], data: st.DataObject) -> None:
    every = batches_of(made)
    keys = [key for batch in every for key in keys_of(batch)]
    assert len(keys) == len(set(keys))
    assert {key[:-1] for key in keys} == {tuple(key) for task in made for key, _ in task.costs()}
    for task in made:
        numbers = [batch.number for batch in every if batch.task == task.task and batch.number != NO_BATCH]
        assert numbers == list(range(task.first, task.first + len(numbers)))
    parts: dict[Any, int] = {}
    for key in keys:
        parts[key[:-1]] = parts.get(key[:-1], 0) + 1
    is_done = data.draw(st.lists(st.booleans(), min_size=len(every), max_size=len(every)))
    done = [batch for batch, is_one in zip(every, is_done, strict=True) if is_one]
    # Some rows of another batch, as a run leaves them that lost its manifest
    some = data.draw(st.sets(st.sampled_from(keys))) if keys else set()
    finished = Done({key for batch in done for key in keys_of(batch)} | some, parts)
    expected = [batch for batch in every if any(key not in finished for key in keys_of(batch))]
    found = batches_of(made, finished)
    assert [batch.key for batch in found] == [batch.key for batch in expected]
    for mine, theirs in zip(found, expected, strict=True):
        if mine.number != NO_BATCH:
            assert content_of(mine) == content_of(theirs)
            assert (mine.work, mine.documents) == (theirs.work, theirs.documents)
    assert {key for batch in found for key in keys_of(batch)} | {*finished.keys} == {*keys}
    # What is done is what has all its rows
    plan = planned(RunRequests(made), encoder(), finished)
    costs = {key: size for task in made for key, size in task.costs()}
    whole = {key for key in costs if all((*key, part) in finished for part in range(parts[tuple(key)]))}
    assert (plan.total, plan.done) == (sum(costs.values()), sum(costs[key] for key in whole))
    assert [is_missing(task, finished) for task in made] == [
        any(key not in whole for key, _ in task.costs()) for task in made
    ]


def test_the_work_and_the_documents_of_all_batches_are_those_of_the_run() -> None:
    windows = [
        ScoreDocument(name, name, "", [scored(range(30), part=part, parts=3)], 2.0)
        for name in "ab"
        for part in range(3)
    ]
    choices = [ScoreDocument(name, name, "", [scored([1, 2, 3]), scored([1, 4], 1)], 5.0) for name in "abc"]
    samples = [
        Generate(name, Prompt(2 * number + part, np.arange(1, 9), 5), "", part=part, parts=2)
        for number, name in enumerate("abcd")
        for part in range(2)
    ]
    made = [ScoredTask("windows", windows, in_order=True), ScoredTask("choices", choices), GeneratedTask("g", samples)]
    plan = planned(RunRequests(made), encoder(), NothingFinished())
    batches = list(plan.batches)
    assert sum(batch.work for batch in batches) == plan.total == 6 * 2 + 3 * 5 + 4 * 10
    documents = Counter[str]()
    for batch in batches:
        documents[batch.task] += batch.documents
    assert (documents["windows"], documents["choices"]) == (2, 3)
    assert [batch.row for batch in batches if batch.task == "g"] == [GeneratedRow] * 3
    assert len([batch for batch in batches if batch.task == "windows"]) == 6  # each is more than half of the budget
    assert all(batch.content.way == "alone" for batch in batches if batch.task == "windows")


def test_the_work_of_texts_alone_is_in_measured_seconds() -> None:
    asked = [Generate(str(n), Prompt(n, np.arange(1, 9 + n), 5), "") for n in range(7)]
    facts = replace(FACTS, speed=SPEED)
    plan = planned(RunRequests([GeneratedTask("g", asked)]), encoder(facts), NothingFinished())
    batches = list(plan.batches)
    assert plan.total == pytest.approx(sum(SPEED.seconds(each.prompt, CAPACITY) for each in asked))
    assert sum(batch.work for batch in batches) == pytest.approx(plan.total) and plan.done == 0
    finished = Done([key for batch in batches[:2] for key in keys_of(batch)])
    rest = planned(RunRequests([GeneratedTask("g", asked)]), encoder(facts), finished)
    assert rest.total == pytest.approx(sum(batch.work for batch in batches[2:]))
    assert list(map(content_of, rest.batches)) == list(map(content_of, batches[2:]))
    assert plan.message and not planned(RunRequests([]), encoder(facts), finished).message


def test_a_budget_that_is_too_small_for_a_later_task_fails_at_once() -> None:
    small = ScoredTask("small", [ScoreDocument("a", "small a", "", [scored([1, 2, 3])], 1.0)])
    choices = [scored(range(60)), scored(range(1, 61), 1)]
    large = ScoredTask("large", [ScoreDocument("a", "large a", "", choices, 1.0)])
    with pytest.raises(ScoringError, match="large a takes 118 tokens"):
        next(planned(RunRequests([small, large], budget=40), encoder(), NothingFinished()).batches)
    # Of a budget that was not requested, a larger document is a batch by itself
    assert len(batches_of([small, large])) == 2


def test_batches_that_are_not_needed_are_not_encoded() -> None:
    begun = threading.Event()
    later = threading.Event()

    class Endless(ScoredTask):
        def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
            while True:
                begun.set()
                yield self.documents[0]

    class Later(ScoredTask):
        def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
            later.set()
            yield from self.documents

    documents = [ScoreDocument("a", "a", "", [scored([1, 2, 3])], 1.0)]
    tasks = [ScoredTask("a", documents), Endless("b", documents), Later("c", documents)]
    plan = planned(RunRequests(tasks), encoder(), NothingFinished())
    assert next(plan.batches).task == "a"
    assert begun.wait(10)
    started = time.monotonic()
    plan.stop()
    plan.batches.close()
    assert time.monotonic() - started < 5
    # With a requested budget all tasks are encoded before the first batch
    begun.clear()
    plan = planned(RunRequests(tasks, budget=40), encoder(), NothingFinished())

    def interrupt() -> None:
        begun.wait(10)
        plan.stop()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Stopped):
        next(plan.batches)
    thread.join()
    assert not later.is_set()


def test_several_small_tasks_are_encoded_ahead_but_one_large_task_at_a_time() -> None:
    begun = {name: threading.Event() for name in "abcde"}

    class Observed(ScoredTask):
        def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
            begun[self.task].set()
            yield from self.documents

    large = 2.0**40
    works = {"a": 1.0, "b": 1.0, "c": 1.0, "d": large, "e": large}
    tasks = [Observed(name, [ScoreDocument("a", "a", "", [scored([1, 2, 3])], work)]) for name, work in works.items()]
    expected = {"a": "abc", "b": "abc", "c": "abcd", "d": "abcde", "e": "abcde"}
    found = {}
    for batch in planned(RunRequests(tasks), encoder(), NothingFinished()).batches:
        assert all(begun[name].wait(10) for name in expected[batch.task])
        found[batch.task] = "".join(name for name, event in begun.items() if event.is_set())
    assert found == expected


def test_a_failure_of_the_next_task_ends_the_task_before_it() -> None:
    """The error of a task after that one comes later; an interrupted run waits for neither."""
    failed = threading.Event()

    class Failing(ScoredTask):
        def scored(self, encoder: Encoder) -> Iterator[ScoreDocument]:
            yield from self.documents
            failed.set()
            raise ScoringError(f"{self.task} does not fit")

    def documents(count: int) -> list[ScoreDocument]:
        # Each is a batch by itself
        return [ScoreDocument(str(n), str(n), "", [scored([n] * 40)], 1.0) for n in range(count)]

    tasks = [ScoredTask("a", documents(2)), ScoredTask("b", documents(9)), Failing("c", documents(2))]
    taken = []
    with pytest.raises(ScoringError, match="c does not fit"):
        for batch in planned(RunRequests(tasks), encoder(), NothingFinished()).batches:
            assert failed.wait(10)
            time.sleep(0.05)
            taken.append(batch.task)
    assert taken.count("a") == 2 and taken.count("b") < 9


def test_a_message_is_said_once() -> None:
    said: list[str] = []
    saying = encoder(messages=said.append)
    for line in ("a", "b", "a"):
        saying.say(line)
    assert said == ["a", "b"]


# Requests of several rows, in a journal


def finished_in(path: Path, *batches: tuple[str, int, list[Any]]) -> FinishedRows:
    finished = FinishedRows(Journal(path, "run", (ScoredRow, GeneratedRow), pytest.fail), KEY)
    for task, number, rows in batches:
        finished.append(Entry(task, number, 0.5, HERE), rows, type(rows[0]))
    return finished


def row_of(document: str, part: int = 0, parts: int = 1, texts: str = "") -> ScoredRow:
    return ScoredRow(document, 0, part, parts, texts, [3], [1], [], [-1.0], None, 0, 0)


def test_a_request_is_finished_with_all_its_rows(tmp_path: Path) -> None:
    text = GeneratedRow("a", 0, 1, 2, "", "", 5, 5, False, 0, "text", 1, "end", 0.0)
    path = tmp_path / "journal.jsonl"
    # The second of three windows first, as workers may return them
    rows = finished_in(path, ("t", 1, [row_of("a", 1, 3), row_of("b")]), ("g", 0, [text]))

    def states(rows: FinishedRows) -> dict[str, bool]:
        keys = {"a": ("t", "a"), "b": ("t", "b"), "c": ("t", "c"), "text": ("g", "a"), "empty": ("t", "e")}
        return {name: is_finished(RequestKey(*key, 0, ""), rows) for name, key in keys.items()}

    assert states(rows) == states(finished_in(path)) == {"b": True} | dict.fromkeys(("a", "c", "text", "empty"), False)
    assert not is_finished(RequestKey("t", "b", 0, "other texts"), rows)
    assert not is_finished(RequestKey("t", "b", 1, ""), rows)
    empty = ScoredRow("e", 0, 0, 0, "", [], [], [], [], True, 0, 0)
    rows = finished_in(path, ("t", 0, [row_of("a", 0, 3)]), ("t", NO_BATCH, [empty]), ("g", 1, [text._replace(part=0)]))
    assert states(rows) == {"a": False, "b": True, "c": False, "text": True, "empty": True}
    rows = finished_in(path, ("t", 2, [row_of("a", 2, 3)]))
    assert states(rows) == states(finished_in(path)) == {"a": True, "b": True, "c": False, "text": True, "empty": True}
    assert rows.parts == {("t", "a", 0, ""): 3, ("g", "a", 0, ""): 2}


@pytest.mark.parametrize(
    "lists",
    [
        {"segments": [[1, 3], [3]], "likelihoods": [[-1.0], [-2.0, -3.0]]},
        {"segments": [[1, 3], [3]], "tokens": [[1], [1, 1]]},
        {"segments": [[1, 3], [3]], "bytes": [[1], []]},
        {"segments": [[1, 1], [3]]},
        {"segments": [[3, 1], [3]]},
        {"segments": [[-1, 3], [3]]},
    ],
)
def test_rows_whose_numbers_are_not_those_of_their_segments(tmp_path: Path, lists: dict[str, Any]) -> None:
    """They would be the numbers of other segments, or of another row: neither written nor read."""
    good = [row_of("a")._replace(segments=[1, 3], tokens=[1, 1], likelihoods=[None, -1.0]), row_of("b")]
    arrays = pa.RecordBatch.from_pylist([row._asdict() for row in good], schema_of(ScoredRow))
    for name, values in lists.items():
        place = arrays.schema.get_field_index(name)
        arrays = arrays.set_column(place, arrays.schema.field(name), pa.array(values, arrays.schema.field(name).type))
    path = tmp_path / "journal.jsonl"
    finished = finished_in(path)
    with pytest.raises(RunError, match="segments"):
        finished.append(Entry("t", 0, 0.5, HERE), arrays, ScoredRow)
    finished.append(Entry("t", 0, 0.5, HERE), good, ScoredRow, to_bytes(arrays))
    with pytest.raises(RunError, match="segments"):
        finished_in(path)


def test_texts_without_tokens(tmp_path: Path) -> None:
    """Each is a row without a batch of sequences, also beside another choice, and where no text has a token."""
    documents = [
        ScoreDocument("a", "a", "", [scored([]), scored([1, 2], 1)], 1.0),
        ScoreDocument("b", "b", "", [scored([])], 1.0),
        ScoreDocument("c", "c", "", [scored([1, 3])], 1.0),
    ]
    task = ScoredTask("t", documents)
    empty, batch = batches_of([task])
    assert (empty.number, empty.documents, empty.work) == (NO_BATCH, 2, 0.0)
    assert [(row.document, row.choice, row.parts, row.segments) for row in empty.content.rows] == [
        ("a", 0, 0, []),
        ("b", 0, 0, []),
    ]
    assert [key[1:3] for key in keys_of(batch)] == [("a", 1), ("c", 0)]
    [alone] = batches_of([ScoredTask("t", documents[1:2])])
    assert alone.content.rows == empty.content.rows[1:]
    finished = finished_in(tmp_path / "journal.jsonl", ("scored t", NO_BATCH, empty.content.rows))
    [left] = batches_of([replace(task, documents=documents[::2])], Done(finished.without_batch))
    assert (left.key, content_of(left)) == (batch.key, content_of(batch))
    assert not is_missing(replace(task, documents=documents[1:2]), finished)


# The score table of requests with choices


def choice_row(asked: Question, choice: int, segments: dict[str, float | None], texts: str = "") -> ScoredRow:
    """A row with so many tokens of each segment as its code, and one more."""
    codes = sorted(SEGMENTS.index(name) for name in segments)
    return ScoredRow(
        asked.identity,
        choice,
        0,
        1,
        texts or asked.texts_digest,
        segments=codes,
        tokens=[code + 1 for code in codes],
        bytes=[],
        likelihoods=[segments[SEGMENTS[code]] for code in codes],
        greedy=len(asked.choices) == 1,
        truncated=choice,
        straddles=2 * choice,
    )


def test_the_score_table_is_in_the_order_of_the_questions(tmp_path: Path) -> None:
    """Whatever the order of batches and rows; rows of other texts are left out, and missing ones are an error."""
    options = [["é", "bb"], ["c"], ["d", "e", "f"]]
    asked = [question("Why?", choices, doc_id=9 - n, gold=len(choices) - 1) for n, choices in enumerate(options)]
    requests = ChoiceRequests("made_up", load_template("plain"), asked, "", (), unconditional=True)
    rows = []
    expected = []
    for number, each in enumerate(asked):
        for choice in range(len(each.choices)):
            value = -1.0 - number - choice / 4
            rows.append(choice_row(each, choice, {"context": None, "continuation": value}))
            rows.append(choice_row(each, len(each.choices) + choice, {"continuation": value * 2}))
            expected.append((each, choice, value))
    others = [row._replace(texts="0" * 16, likelihoods=[-99.0] * len(row.likelihoods)) for row in rows[:3]]
    shuffled = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    path = tmp_path / "journal.jsonl"
    finished = finished_in(path, ("made_up", 1, shuffled[:4]), ("made_up", 0, [*others, *shuffled[4:-1]]))
    with pytest.raises(RunError, match="made_up"):
        requests.scores(finished)
    assert list(requests.costs()) and is_missing(requests, finished)
    table = requests.scores(finished_in(path, ("made_up", 2, shuffled[-1:])))
    assert not is_missing(requests, finished_in(path)) and list(table.columns) == list(COLUMNS)
    for line, (each, choice, value) in zip(table.itertuples(), expected, strict=True):
        assert (line.task, line.subtask, line.doc_id) == ("made_up", "made_up", each.doc_id)
        assert (line.choice, line.choices, line.gold) == (choice, len(each.choices), each.gold)
        assert (line.ll_continuation, line.ll_unconditional) == (value, 2 * value)
        assert (line.n_continuation, line.n_context, line.n_end, line.n_special) == (4, 3, 0, 0)
        # Neither scored nor present: not the log-likelihood of no token
        assert np.isnan([line.ll_context, line.ll_instruction, line.ll_special, line.ll_end]).all()
        option = each.choices[choice]
        assert (line.chars, line.bytes) == (len(option), len(option.encode()))
        assert (line.truncated, line.straddles, line.greedy) == (choice, 2 * choice, len(each.choices) == 1)
    # A template that scores whole sequences: a segment that a sequence lacks has the log-likelihood of no token
    whole = ChoiceRequests("made_up", load_template("inst"), asked[:1], "", ())
    pair = [choice_row(asked[0], choice, {"context": -2.0, "continuation": -1.0}) for choice in range(2)]
    table = whole.scores(finished_in(tmp_path / "whole.jsonl", ("made_up", 0, pair)))
    assert (
        table[["ll_special", "ll_instruction", "ll_context", "ll_continuation", "ll_end"]].to_numpy().tolist()
        == [[0.0, 0.0, -2.0, -1.0, 0.0]] * 2
    )
    assert table["ll_unconditional"].isna().all()
    # Nor is a missing log-likelihood of tokens one of no token
    lacking = [pair[0], choice_row(asked[0], 1, {"context": None, "continuation": -1.0})]
    with pytest.raises(RunError, match="made_up"):
        whole.scores(finished_in(tmp_path / "lacking.jsonl", ("made_up", 0, lacking)))
    with pytest.raises(RunError, match="document 7"):
        likelihood_of(row_of("7")._replace(likelihoods=[None]))


# The computer


def test_rows_are_computed_from_a_pickled_batch(checkpoint: Path) -> None:
    """Of a run with scores and texts, in any order; a batch without sequences needs no pass."""
    loaded = load_folder(checkpoint)
    dice = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in dice.integers(3, TOKENS, count)]

    begin = tokens(9)
    choices = [
        ScoreDocument(name, name, "", [scored(begin + tokens(n), choice) for choice, n in enumerate((2, 5))], 1.0)
        for name in "abcd"
    ]
    choices.append(ScoreDocument("e", "e", "", [scored([])], 1.0))
    windows = [ScoreDocument("w", "w", "", [scored(tokens(50), part=part, parts=2)], 1.0) for part in range(2)]
    asked = [Generate(str(n), Prompt(n, np.array(tokens(5 + n)), 4), "") for n in range(3)]
    made = [ScoredTask("c", choices), ScoredTask("w", windows, in_order=True), GeneratedTask("g", asked)]
    computer = RequestComputer(loaded, Budget(40, 30), pytest.fail, remembers=False)
    candidates = pickle.loads(pickle.dumps([task.candidates() for task in made]))
    facts = computer.prepare(candidates)
    assert (facts.token_budget, facts.way, facts.capacity.tokens) == (40, "tree", 30)  # type: ignore[union-attr]
    assert facts.speed is not None and pickle.loads(pickle.dumps(facts)) == facts
    assert (computer.about["token_budget"], computer.about["kept_tokens"]) == (40, 30)
    batches = batches_of(made, facts=facts)
    assert len(batches) > 5
    rows = {}
    for batch in batches:
        rows[batch.key] = computer.compute(batch)
        assert all(isinstance(row, batch.row) for row in rows[batch.key])
        record_batch(rows[batch.key], batch.row)
    other = RequestComputer(loaded, Budget(40, 30), pytest.fail, remembers=False)
    other.prepare(candidates, is_timed=False)
    for batch in batches[::-1]:
        again = other.compute(pickle.loads(pickle.dumps(batch)))
        assert without_time(again) == without_time(rows[batch.key])
    # One pass over each sequence by itself
    by_document = {(row.document, row.choice, row.part): row for of_batch in rows.values() for row in of_batch}
    for document in [*choices[:-1], *windows]:
        for score in document.scores:
            expected = float(computer.engine._forward.score_alone(score.tokens).logprobs[1:].sum(dtype=np.float64))
            row = by_document[document.document, score.choice, score.part]
            assert row.of(CONTINUATION) == (len(score.tokens) - 1, pytest.approx(expected, rel=1e-4))


def test_a_model_is_checked_before_its_first_pass(checkpoint: Path) -> None:
    """Also where no candidate has a token, such as lm-eval's empty texts."""
    documents = [ScoreDocument(name, name, "", [scored(tokens)], 1.0) for name, tokens in (("a", []), ("b", [5, 6, 7]))]
    computer = RequestComputer(load_folder(checkpoint), Budget(40), pytest.fail)
    task = ScoredTask("t", documents)
    facts = computer.prepare([task.candidates()])
    assert not computer.engine.checked
    empty, batch = batches_of([task], facts=facts)
    computer.compute(empty)
    assert not computer.engine.checked
    with torch.no_grad():
        computer.loaded.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="NaN"):
        computer.compute(batch)


def without_time(rows: Any) -> list[Any]:
    return [row._replace(seconds=0.0) if isinstance(row, GeneratedRow) else row for row in rows]


def test_batches_are_kept_for_other_models_with_the_same_documents_only(checkpoint: Path) -> None:
    """A run that has taken rows of another run plans the rest; the next run, without such rows, plans all."""
    tokenizer = load_folder(checkpoint).tokenizer
    questions = [question(f"Why {number}?", ["a", "b"], doc_id=number) for number in range(6)]
    task = ChoiceRequests("made_up", load_template("inst"), questions, "", (), settings="all")
    keys = [key for key, _ in task.costs()]
    taken = {(*key, 0) for key in keys if key.document in ("made_up 1", "made_up 4")}
    assert len(taken) == 4

    def documents(finished: Any) -> set[str]:
        plan = planned(RunRequests([task]), Encoder(tokenizer, replace(FACTS, window=500)), finished)
        return {head.document for batch in plan.batches for head in batch.content.documents}

    every = {asked.identity for asked in questions}
    some = Done(taken, without_batch=taken)
    for order in ([some, NothingFinished()], [NothingFinished(), some]):
        with remembering():
            found = [documents(finished) for finished in order]
        expected = [every - {"made_up 1", "made_up 4"} if finished is some else every for finished in order]
        assert found == expected


# Runs


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of a run with scored continuations, windows of texts, one of them empty, and generated texts."""
    folder = tmp_path_factory.mktemp("mixed")
    made_tasks(folder / "tasks", count=8)
    texts = [{"text": text} for text in ("", "The river rose. " * 40, "Rice")]
    write_task(folder / "tasks", TEXTS, texts)
    sampled = ANSWERS | {"task": "made_sampled", "repeats": 2}
    sampled["generation_kwargs"] = {"until": [], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
    write_task(folder / "tasks", sampled, [{"text": f"The river {n}", "answer": "a"} for n in range(3)])
    return {
        "model": str(tiny_checkpoint(folder / "model", window=160)),
        "suite": "lm_eval",
        "include_path": folder / "tasks",
        "tasks": ("made_choice", "made_texts", "made_answers", "made_sampled"),
        "device": "cpu",
        "token_budget": 170,
    }


def plan_of(mixed: dict[str, Any], output: Path, **changes: Any) -> Any:
    options = mixed | {"output": output} | changes
    return plan_run(options.pop("model"), options, silent)


def killed_after(count: int, plan: Any, holder: ModelHolder) -> None:
    """Begin, or go on with, a run whose process ends right after the next batches are on the disk."""
    append = Journal.append
    written: list[Entry] = []

    def stops(own: Journal, entry: Entry, *rows: Any) -> Any:
        stored = append(own, entry, *rows)
        written.append(entry)
        if len(written) == count:
            raise KeyboardInterrupt
        return stored

    with pytest.MonkeyPatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Journal, "append", stops)
        run_plan(plan, Lines(), holder)


def journal_rows(run: Run) -> list[Any]:
    """Task, batch and rows of each entry, without times."""
    return [(entry.task, entry.batch, without_time(rows)) for entry, rows in entries_of(run)]


def test_a_run_of_scores_and_texts_is_killed_after_every_batch(mixed: dict[str, Any], tmp_path: Path) -> None:
    """Each time it goes on with the next batch, to the same bits."""
    holder = ModelHolder()
    whole = run_plan(plan_of(mixed, tmp_path / "whole"), Lines(), holder)
    rows = journal_rows(whole)
    kinds = [type(of_batch[0]) for _, _, of_batch in rows]
    assert kinds.count(ScoredRow) > 5 and kinds.count(GeneratedRow) > 2
    [empty] = [row for _, batch, of_batch in rows for row in of_batch if batch == NO_BATCH]
    assert (empty.document, empty.parts, empty.segments, empty.greedy) == ("0", 0, [], True)
    windows = [row for task, _, of_batch in rows for row in of_batch if "rolling" in task and row.document == "1"]
    assert len(windows) > 1 and {row.parts for row in windows} == {len(windows)}
    plan = plan_of(mixed, tmp_path / "killed")
    for number in range(len(rows)):
        killed_after(1, plan, holder)
        assert (plan.folder / JOURNAL).read_bytes().count(b"\n") == number + 1
        assert not (plan.folder / RESULTS).exists()
    again = run_plan(plan, Lines(), holder)
    assert journal_rows(again) == rows
    same(again, whole)
    assert [task | {"seconds": 0} for task in again.stored["tasks"]] == [
        task | {"seconds": 0} for task in whole.stored["tasks"]
    ]
    for name in ("token_budget", "kept_tokens"):
        assert again.manifest[name] == whole.manifest[name] == 170


def test_a_torn_batch_of_either_kind_is_computed_again(mixed: dict[str, Any], tmp_path: Path) -> None:
    holder = ModelHolder()
    plan = plan_of(mixed, tmp_path)
    whole = journal_rows(run_plan(plan, Lines(), holder))
    path = plan.folder / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    for row in (ScoredRow, GeneratedRow):
        places = [place for place, (_, batch, rows) in enumerate(whole) if type(rows[0]) is row and batch != NO_BATCH]
        torn = places[1]
        for kept in ([*lines[:torn], lines[torn][:-20]], [*lines[:torn], *lines[torn + 1 :]]):
            path.write_bytes(b"".join(kept))
            (plan.folder / RESULTS).unlink()
            again = journal_rows(run_plan(plan, Lines(), holder))
            assert sorted(again, key=repr) == sorted(whole, key=repr)


def test_a_run_keeps_the_budgets_that_it_was_started_with(
    mixed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of scored tokens and that of keys and values, also if there is less memory."""
    holder = ModelHolder()
    plan = plan_of(mixed, tmp_path, token_budget=None)
    killed_after(2, plan, holder)
    begun = json.loads((plan.folder / MANIFEST).read_text(encoding="utf-8"))
    assert begun["token_budget"] != begun["kept_tokens"]
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**24, available=2**23))
    run = run_plan(plan, Lines(), holder)
    for name in ("token_budget", "kept_tokens", "facts"):
        assert run.manifest[name] == begun[name]


@pytest.mark.parametrize("kind", ["multiple_choice", "prompt_variants", "lm_eval", "perplexity", "needle", "longbench"])
def test_the_candidates_of_a_run_are_a_few_documents(kind: str, files: Path, tmp_path: Path) -> None:
    """They are sent to other processes, without the documents that are not checked."""
    plan = plan_of_kind(kind, files, tmp_path)
    content = pickle.dumps(REQUESTS.candidates(plan))
    assert len(content) < len(pickle.dumps(plan.requests.tasks))
    tokenizer = tokenizer_alone(plan.checkpoint, silent)
    asking = Encoder(tokenizer, replace(FACTS, window=1024))
    for task, restored in zip(plan.requests.tasks, pickle.loads(content), strict=True):
        assert (restored.task, restored.journal, restored.generates) == (task.task, task.journal, task.generates)
        assert restored.about(tokenizer) == task.about(tokenizer)
        if task.generates:
            assert len(restored.generated(asking)) <= 1
            continue
        every = {document.document for document in task.scored(asking)}
        few = {document.document for document in restored.scored(asking)}
        assert few < every and len(few) in (1, 2)
