"""One evaluation, from a request to a finished run folder.

Scores what the journal does not hold yet, task by task, and writes the results when everything is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias

from evalkit.benchmarks.multiple_choice.templates import SEGMENTS
from evalkit.benchmarks.request import Prepared, Request, asks_lm_eval, context_extension, prepare, request_of
from evalkit.errors import RunError
from evalkit.progress import Progress
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.journal import Entry
from evalkit.runs.place import Place, place_of
from evalkit.runs.writing import RunWriter, finished_run
from evalkit.scores.results import summarise_all

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestion, Prompter
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.models.load import LoadedModel
    from evalkit.models.locate import Checkpoint
    from evalkit.scores.table import ScoreRow
    from evalkit.scoring.engine import Engine
    from evalkit.scoring.pack import Batch

_CANDIDATES = 2
"""Questions of each task that the start-up check may choose from."""

Document = tuple[str, int]
"""A document's subtask and index."""
_Planned: TypeAlias = "tuple[list[EncodedQuestion], list[Batch]]"


def evaluate(model: str, *, progress: Progress | None = None, **options: Any) -> Run:
    """Evaluate a checkpoint; resume, or just open the run, if it was begun or finished before.

    Args:
        model: a checkpoint folder, a hub name, a GGUF file, or "demo".
        progress: where news and progress go; standard error by default.
        **options: the other fields of `Request`.

    Returns:
        The finished run.

    Raises:
        EvalkitError: whatever is wrong, in one line.
    """
    request = request_of(model, options)
    with progress or Progress() as shown:
        if asks_lm_eval(request, shown.say):
            from evalkit.benchmarks.lm_eval.session import evaluate_tasks

            return evaluate_tasks(request, shown)
        return run_prepared(prepare(request, shown.say), shown)


def run_prepared(prepared: Prepared, progress: Progress) -> Run:
    """Score what is missing of a prepared run, write its results and open it."""
    return finished_run(
        prepared.folder,
        prepared.manifest,
        lambda run: run.serves(prepared.request.log_samples),
        lambda writer: _Session(prepared, writer, progress).complete(),
        progress.say,
        prepared.request.device,
    )


def load_model(
    checkpoint: Checkpoint, request: Request, specification: Mapping[str, Any], progress: Progress
) -> LoadedModel:
    """Load the checkpoint of a request and say what was loaded.

    Args:
        checkpoint: of the request.
        request: says how it is loaded.
        specification: of the run, whose id was made of the checkpoint's files as they were then.
        progress: shows what is being done.

    Raises:
        CheckpointError: it cannot be loaded, or its files have changed since.
    """
    from evalkit.models.identity import check_identity
    from evalkit.models.load import load

    loaded = load(
        checkpoint,
        device=request.device,
        dtype=request.dtype,
        attention=request.attention,
        extension=context_extension(request, checkpoint),
        say=progress.say,
    )
    check_identity(checkpoint.given, specification, loaded)
    for line in loaded.describe().split("\n"):
        progress.say(line)
    return loaded


class _Session:
    """The part of a run that one process does."""

    def __init__(self, prepared: Prepared, writer: RunWriter, progress: Progress) -> None:
        from evalkit.benchmarks.multiple_choice.tasks import load_questions
        from evalkit.scores.table import ScoreRow

        self._prepared = prepared
        self._writer = writer
        self._progress = progress
        self._seconds = dict.fromkeys(prepared.suite.tasks, 0.0)
        self._rows: dict[Document, list[ScoreRow]] = {}
        for entry in writer.entries(ScoreRow):
            self._keep(entry.task, entry.seconds, [ScoreRow(*row) for row in entry.rows])
        self._questions = load_questions(prepared.suite, prepared.library, prepared.request.limit)

    def complete(self) -> None:
        """Score the documents that are missing and write every result file."""
        missing = [task for task, questions in self._questions.items() if not all(map(self._is_done, questions))]
        if missing:
            self._score(missing)
        self._write_results()

    def _is_done(self, question: Question) -> bool:
        return (question.subtask, question.doc_id) in self._rows

    def _keep(self, task: str, seconds: float, rows: list[ScoreRow]) -> None:
        """Take a finished batch in; a document that an earlier one holds already keeps its scores."""
        self._seconds[task] = self._seconds.get(task, 0.0) + seconds
        known = {document for row in rows if (document := (row.subtask, row.doc_id)) in self._rows}
        for row in rows:
            if (row.subtask, row.doc_id) not in known:
                self._rows.setdefault((row.subtask, row.doc_id), []).append(row)

    def _score(self, tasks: list[str]) -> None:
        from evalkit.benchmarks.multiple_choice.prompts import Prompter
        from evalkit.scores.table import question_item

        prepared, progress = self._prepared, self._progress
        loaded = load_model(prepared.checkpoint, prepared.request, prepared.manifest["specification"], progress)
        prompter = Prompter(prepared.template, loaded.tokenizer, loaded.window, progress.say)
        first = [question for members in self._questions.values() for question in members[:_CANDIDATES]]
        engine, scored = self._engine(loaded), frozenset(map(SEGMENTS.index, prepared.template.score))
        engine.check(
            [question_item(i, one, scored) for i, one in enumerate(prompter.encode(first, prepared.unconditional))]
        )
        place = place_of(loaded.device, engine.kernel if engine.shares else "alone")
        self._writer.compute_on(place)
        self._record(loaded, engine)
        progress.start(*self._work())
        stop = Event()
        with _Ahead(lambda task: self._plan(task, prompter, scored, engine, stop), tasks, stop) as ahead:
            for task in tasks:
                progress.task(task)
                self._score_task(task, engine, place, scored, ahead)

    def _plan(self, task: str, prompter: Prompter, scored: frozenset[int], engine: Engine, stop: Event) -> _Planned:
        """A task's questions as token sequences, and the batches that they are scored in; cut short once stopped."""
        from evalkit.scores.table import question_item
        from evalkit.scoring.pack import plan, refuse_small_budget

        found = prompter.encode(self._questions[task], self._prepared.unconditional)
        encoded = list(takewhile(lambda _: not stop.is_set(), found))
        items = [question_item(i, one, scored) for i, one in enumerate(encoded)]
        if engine.shares and self._prepared.request.token_budget == engine.budget:
            refuse_small_budget(items, engine.budget)
        return encoded, plan(items, engine.budget)

    def _engine(self, loaded: LoadedModel) -> Engine:
        from evalkit.scoring.budget import auto_budget, resumed_budget
        from evalkit.scoring.engine import Engine

        asked, say = self._prepared.request.token_budget, self._progress.say
        budget = resumed_budget(self._writer.manifest, bool(self._rows), asked, say)
        return Engine(loaded.model, budget or auto_budget(loaded.model), say, remembers=True)

    def _record(self, loaded: LoadedModel, engine: Engine) -> None:
        """Add to the manifest what only the loaded model tells."""
        self._writer.save_manifest(
            token_budget=engine.budget,
            sharing=engine.describe(),
            loaded=loaded.facts() | {"markers": _markers(self._prepared, loaded.tokenizer)},
        )

    def _score_task(self, task: str, engine: Engine, place: Place, scored: frozenset[int], ahead: _Ahead) -> None:
        from evalkit.scores.table import question_rows
        from evalkit.scoring.ahead import in_turn

        encoded, batches = ahead.take(task)

        def done(batch: Batch) -> bool:
            return all(self._is_done(encoded[item.index].question) for item in batch.items)

        for index, batch in in_turn(batches, done):
            started = time.perf_counter()
            members = [(encoded[item.index], scores) for item, scores in engine.score(batch)]
            rows = [row for one, scores in members for row in question_rows(one, scores, scored)]
            seconds = round(time.perf_counter() - started, 4)
            self._writer.append(Entry(task, index, seconds, [list(row) for row in rows], place))
            self._keep(task, seconds, rows)
            self._progress.advance(sum(_work_of(one.question) for one, _ in members), len(members))
            ahead.raise_trouble()

    def _work(self) -> tuple[float, float]:
        """(all, done) work of the run."""
        questions = [question for members in self._questions.values() for question in members]
        return sum(map(_work_of, questions)), sum(map(_work_of, filter(self._is_done, questions)))

    def _write_results(self) -> None:
        from evalkit.export.lm_eval import write_lm_eval

        scores = self._table()
        self._writer.save_table(SCORES, scores)
        seconds, manifest = self._seconds, self._writer.manifest
        found = summarise_all(scores, manifest)
        write_lm_eval(self._writer, scores, found, self._questions, seconds, self._prepared.request.log_samples)
        content = found[manifest["rule"]].to_json()
        for task in content["tasks"]:
            task["seconds"] = round(seconds[task["task"]], 3)
        content["rules"] = {rule: results.to_json() for rule, results in found.items()}
        content["samples"] = self._prepared.request.log_samples
        self._writer.save_results(content)

    def _table(self) -> pd.DataFrame:
        """The journal's rows as the score table, in the order of the questions."""
        from evalkit.scores.table import score_table

        documents = [(q.subtask, q.doc_id, len(q.contexts)) for members in self._questions.values() for q in members]
        rows = [row for subtask, doc_id, _ in documents for row in self._rows.get((subtask, doc_id), [])]
        expected = [(subtask, doc_id, choice) for subtask, doc_id, size in documents for choice in range(size)]
        if [(row.subtask, row.doc_id, row.choice) for row in rows] != expected:
            # Cannot happen unless somebody has removed lines of the journal while it was read
            raise RunError(
                f"the journal of {self._writer.folder} does not hold the choices of every document; "
                "delete the folder and run the command again"
            )
        clusters = {(q.subtask, q.doc_id): q.cluster for members in self._questions.values() for q in members}
        return score_table(rows, clusters)


class _Ahead:
    """Tokenises and plans all tasks, in their order, while the first ones are scored.

    Args:
        plan: encodes and plans one task.
        tasks: in the order in which they will be taken.
        stop: set when nobody wants them any more.
    """

    def __init__(self, plan: Callable[[str], _Planned], tasks: list[str], stop: Event) -> None:
        self._stop = stop
        self._encoder = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._encoder.submit(plan, task) for task in tasks}

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._encoder.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> _Planned:
        """The task's questions and batches, as soon as they are there."""
        return self._planned.pop(task).result()

    def raise_trouble(self) -> None:
        """Raise what is wrong with a later task as soon as it is known, not when its turn comes."""
        for planned in self._planned.values():
            if planned.done() and (trouble := planned.exception()):
                raise trouble


def _work_of(question: Question) -> int:
    """Characters that a question adds to the tree: near enough to its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(prepared: Prepared, tokenizer: Any) -> dict[str, str]:
    """Whether each literal marker of the template, such as [INST], is one special token of this tokenizer or text."""
    special = set(tokenizer.all_special_tokens)
    literals = [part.text.strip() for part in prepared.template.parts if part.segment == "special"]
    return {literal: "special token" if literal in special else "text" for literal in literals}
