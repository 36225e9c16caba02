"""One evaluation, from a request to a finished run folder.

Scores what the journal does not hold yet, task by task, and writes the results when everything is there.
"""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

from evalkit.errors import RunError
from evalkit.journal import Entry
from evalkit.progress import Progress
from evalkit.request import Prepared, prepare, request_of
from evalkit.results import available_rules, summarise
from evalkit.runs import MANIFEST, RESULTS, SCORES, Run, RunWriter, load_run, open_run
from evalkit.templates import SEGMENTS

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.models.load import LoadedModel
    from evalkit.prompts import EncodedQuestion
    from evalkit.scoring.engine import Engine
    from evalkit.tasks import Question

_CHECKED = 2
"""Questions on which sharing is checked before anything is scored."""


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
    with progress or Progress() as shown:
        return run_prepared(prepare(request_of(model, options), shown.say), shown)


def run_prepared(prepared: Prepared, progress: Progress) -> Run:
    """Score what is missing of a prepared run, write its results and open it."""
    if (prepared.folder / RESULTS).is_file():
        run = load_run(prepared.folder)
        if run.complete and (run.has_samples or not prepared.request.log_samples):
            return run
    with open_run(prepared.request.output, prepared.folder.name, prepared.manifest, progress.say) as writer:
        _Session(prepared, writer, progress).complete()
    return load_run(prepared.folder)


def load_model(prepared: Prepared, progress: Progress) -> LoadedModel:
    """Load the checkpoint of a prepared run and say what was loaded."""
    from evalkit.models.load import load

    request = prepared.request
    loaded = load(
        prepared.checkpoint,
        device=request.device,
        dtype=request.dtype,
        attention=request.attention,
        say=progress.say,
    )
    progress.say(loaded.describe())
    return loaded


class _Session:
    """The part of a run that one process does."""

    def __init__(self, prepared: Prepared, writer: RunWriter, progress: Progress) -> None:
        from evalkit.tasks import load_questions

        self._prepared = prepared
        self._writer = writer
        self._progress = progress
        self._entries = writer.journal.read()
        self._done = {(entry.task, entry.batch) for entry in self._entries}
        self._questions = load_questions(prepared.suite, prepared.library, prepared.request.limit)

    def complete(self) -> None:
        """Score the batches that are missing and write every result file."""
        missing = [task for task in self._questions if not self._is_done(task)]
        if missing:
            self._score(missing)
        self._write_results()

    def _is_done(self, task: str) -> bool:
        return self._documents_done(task) == len(self._questions[task])

    def _documents_done(self, task: str) -> int:
        return len({(row[1], row[2]) for entry in self._entries if entry.task == task for row in entry.rows})

    def _score(self, tasks: list[str]) -> None:
        from evalkit.prompts import Prompter

        prepared, progress = self._prepared, self._progress
        loaded = load_model(prepared, progress)
        prompter = Prompter(prepared.template, loaded.tokenizer, loaded.window, progress.say)
        engine = self._engine(loaded)
        self._record(loaded, engine)
        first = self._questions[tasks[0]][:_CHECKED]
        engine.check(list(prompter.encode(first, prepared.unconditional)))
        progress.start(*self._work())
        for task in tasks:
            progress.task(task)
            self._score_task(task, engine, list(prompter.encode(self._questions[task], prepared.unconditional)))

    def _engine(self, loaded: LoadedModel) -> Engine:
        from evalkit.scoring.budget import auto_budget
        from evalkit.scoring.engine import Engine

        asked = self._prepared.request.token_budget
        # A resumed run keeps the budget that it was begun with, so that its batches are the same
        stored = self._writer.manifest.get("token_budget") if self._entries else None
        if stored and asked not in (None, stored):
            self._progress.say(f"resuming with the token budget that the run was begun with, {stored}")
        budget = stored or asked or auto_budget(loaded.model)
        scored = frozenset(SEGMENTS.index(segment) for segment in self._prepared.template.score)
        return Engine(loaded.model, scored, budget, self._progress.say)

    def _record(self, loaded: LoadedModel, engine: Engine) -> None:
        """Add to the manifest what only the loaded model tells."""
        self._writer.manifest |= {
            "token_budget": engine.budget,
            "loaded": {
                "architecture": loaded.architecture,
                "parameters": loaded.parameters,
                "dtype": loaded.dtype,
                "device": loaded.device,
                "window": loaded.window,
                "bos_id": loaded.bos_id,
                "eos_id": loaded.eos_id,
                "attention": loaded.attention,
                "markers": _markers(self._prepared, loaded.tokenizer),
            },
        }
        self._writer.save_json(MANIFEST, self._writer.manifest)

    def _score_task(self, task: str, engine: Engine, encoded: list[EncodedQuestion]) -> None:
        from evalkit.scoring.pack import plan

        batches = plan(encoded, engine.scored, self._writer.manifest["token_budget"])
        for index, batch in enumerate(batches):
            if (task, index) in self._done:
                continue
            started = time.perf_counter()
            rows = [list(row) for row in engine.score(batch)]
            entry = Entry(task, index, round(time.perf_counter() - started, 4), rows)
            self._writer.journal.append(entry)
            self._entries.append(entry)
            questions = [question.question for packed in batch.rows for question in packed.questions]
            self._progress.advance(sum(map(_work_of, questions)), len(questions))

    def _work(self) -> tuple[float, float]:
        """(all, done) work of the run."""
        total = done = 0
        for task, questions in self._questions.items():
            scored = {(row[1], row[2]) for entry in self._entries if entry.task == task for row in entry.rows}
            total += sum(map(_work_of, questions))
            done += sum(_work_of(q) for q in questions if (q.subtask, q.doc_id) in scored)
        return total, done

    def _write_results(self) -> None:
        scores = self._table()
        buffer = io.BytesIO()
        scores.to_parquet(buffer, index=False)
        self._writer.save_bytes(SCORES, buffer.getvalue())
        seconds = dict.fromkeys(self._questions, 0.0)
        for entry in self._entries:
            seconds[entry.task] += entry.seconds
        manifest = self._writer.manifest
        from evalkit.export import write_lm_eval

        write_lm_eval(self._writer, scores, self._questions, seconds, self._prepared.request.log_samples)
        content = summarise(scores, manifest, manifest["rule"]).to_json()
        for task in content["tasks"]:
            task["seconds"] = round(seconds[task["task"]], 3)
        content["rules"] = {rule: summarise(scores, manifest, rule).to_json() for rule in available_rules(scores)}
        content["samples"] = self._prepared.request.log_samples
        # Last, since its presence says that the run is complete
        self._writer.save_json(RESULTS, content)

    def _table(self) -> pd.DataFrame:
        """The journal's rows as the score table, in the order of the questions."""
        import pandas as pd

        from evalkit.scoring.table import ScoreRow

        rows = [ScoreRow(*row) for entry in self._entries for row in entry.rows]
        found = {(row.subtask, row.doc_id, row.choice): row for row in rows}
        order = [
            (question.subtask, question.doc_id, choice)
            for questions in self._questions.values()
            for question in questions
            for choice in range(len(question.contexts))
        ]
        if len(rows) != len(order) or found.keys() != set(order):
            # Cannot happen unless somebody has put in a journal or a manifest of another run
            raise RunError(
                f"the journal of {self._writer.folder} does not hold every document once ({len(rows)} rows for "
                f"{len(order)} choices); delete the folder and run the command again"
            )
        table = pd.DataFrame([found[place] for place in order], columns=list(ScoreRow._fields))
        likelihoods = [column for column in ScoreRow._fields if column.startswith("ll_")]
        return table.astype(dict.fromkeys(likelihoods, "float64"))


def _work_of(question: Question) -> int:
    """Characters that a question adds to the tree: near enough to its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(prepared: Prepared, tokenizer: Any) -> dict[str, str]:
    """Whether each literal marker of the template, such as [INST], is one special token of this tokenizer or text."""
    special = set(tokenizer.all_special_tokens)
    literals = [part.text.strip() for part in prepared.template.parts if part.segment == "special"]
    return {literal: "special token" if literal in special else "text" for literal in literals}
