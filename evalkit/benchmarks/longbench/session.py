"""A prepared LongBench run, to a finished run folder.

    generations.parquet   a row for each (task, document): prompt hash, tokens, prediction, score,
                          seconds, and which document it is of
    results.json          scores of tasks, groups and means

Each batch is in the journal before the next one starts; a resumed run generates what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evalkit.benchmarks.longbench.metrics import EditVariant
from evalkit.benchmarks.longbench.protocol import Task, find_task
from evalkit.benchmarks.longbench.request import PreparedLongBench
from evalkit.benchmarks.longbench.rows import Row
from evalkit.errors import RunError
from evalkit.progress import Progress
from evalkit.runs.folder import Run
from evalkit.runs.journal import Entry
from evalkit.runs.place import Place
from evalkit.runs.writing import RunWriter, finished_run

if TYPE_CHECKING:
    import pandas as pd

    from evalkit.benchmarks.longbench.scores import LongBenchResults
    from evalkit.benchmarks.longbench.truncation import Fitted
    from evalkit.generation.batches import Prompt
    from evalkit.generation.greedy import Generation
    from evalkit.models.load import LoadedModel

GENERATIONS = "generations.parquet"
SOURCE = "source"
"""The generations table's column that is equal for rows of one document: a hash of their context."""

_READ = ("task", "id", "prediction", "answers", "all_classes", "length", "truncated")
"""Columns of the generations table without which there is nothing to score."""


class Prediction(NamedTuple):
    """What the journal keeps of a row."""

    id: str
    prompt_sha256: str
    """Of the whole prompt's text, before it was cut."""
    tokens_before: int
    """Of the whole prompt."""
    tokens: int
    """Of the prompt that the model saw."""
    truncated: bool
    reused: int
    """Tokens of it whose keys and values were another row's."""
    prediction: str
    """Generated text, special tokens apart; ends where nothing more is read (`stops.py`)."""
    new_tokens: int
    ended: str
    """"end" token, "enough" read, or "length"."""
    seconds: float


def run_longbench(prepared: PreparedLongBench, progress: Progress) -> Run:
    """Generate what is missing of a prepared run, write its results and open it."""
    return finished_run(
        prepared.folder,
        prepared.manifest,
        lambda run: (run.folder / GENERATIONS).is_file(),
        lambda writer: _Session(prepared, writer, progress).complete(),
        progress.say,
        prepared.request.common.device,
    )


def load_generations(run: Run, columns: Collection[str] = ("task", "id")) -> pd.DataFrame:
    """The generations table of a finished LongBench run, which has these columns.

    Raises:
        RunError: it is no LongBench run, not finished, or its table is damaged.
    """
    if not run.of_longbench:
        raise RunError(f"{run.folder} is not a LongBench run")
    return run.table(GENERATIONS, columns)


def results_of(run: Run, variant: EditVariant = "difflib") -> LongBenchResults:
    """Scores of a finished LongBench run; no model is needed."""
    from evalkit.benchmarks.longbench.scores import score_generations

    official = {task: about["official"] for task, about in run.manifest["documents"].items()}
    return score_generations(load_generations(run, _READ), run.manifest["specification"]["suite"], variant, official)


def fitted_prompts(
    task: Task, rows: Sequence[Row], loaded: LoadedModel, window: int, context: int, chat: bool = False
) -> tuple[list[Fitted], list[Prompt]]:
    """A task's prompts, cut to fit, and the same as they are generated from; in the rows' order.

    Args:
        task: of the rows.
        rows: documents.
        loaded: the model, whose tokens and end tokens count.
        window: tokens above which a prompt is cut.
        context: tokens that the model takes at once, the answer's included.
        chat: whether prompts go into the chat template, where the task's do.
    """
    from evalkit.benchmarks.longbench.prompts import prompt
    from evalkit.benchmarks.longbench.stops import stops_of
    from evalkit.benchmarks.longbench.truncation import fit
    from evalkit.generation.batches import Prompt

    stops = stops_of(task, loaded.model, loaded.tokenizer)
    room, wrapped = context - task.max_new_tokens, chat and task.chat
    fitted = [
        fit(loaded.tokenizer, prompt(task, row), window, room, chat=wrapped, label=f"{task.name} row {row.id}")
        for row in rows
    ]
    return fitted, [
        Prompt(number, one.tokens, task.max_new_tokens, stops.ends, stops.barred_first, stops.enough)
        for number, one in enumerate(fitted)
    ]


class _Session:
    """The part of a run that one process does."""

    def __init__(self, prepared: PreparedLongBench, writer: RunWriter, progress: Progress) -> None:
        self._prepared = prepared
        self._writer = writer
        self._progress = progress
        self._fitted: dict[str, list[Fitted]] = {}
        self._done: dict[tuple[str, str], Prediction] = {}
        for entry in writer.entries(Prediction):
            self._keep(entry.task, [Prediction(*row) for row in entry.rows])

    def complete(self) -> None:
        """Generate what is missing and write every result file."""
        if tasks := [
            task
            for task, found in self._prepared.rows.items()
            if not all(self._is_done(task, row) for row in found.rows)
        ]:
            self._generate(tasks)
        self._write_results()

    def _is_done(self, task: Task, row: Row) -> bool:
        return (task.name, row.id) in self._done

    def _keep(self, task: str, predictions: Sequence[Prediction]) -> None:
        for prediction in predictions:
            self._done.setdefault((task, prediction.id), prediction)

    def _generate(self, tasks: Sequence[Task]) -> None:
        from evalkit.benchmarks.multiple_choice.evaluation import load_model
        from evalkit.generation.runner import Runner

        common = self._prepared.request.common
        specification = self._prepared.manifest["specification"]
        loaded = load_model(self._prepared.checkpoint, common, specification, self._progress)
        runner = Runner(loaded, self._writer, common.token_budget, bool(self._done), self._progress)
        self._progress.say(f"the prompts of {len(tasks)} task{'s' if len(tasks) > 1 else ''} are tokenised")
        prompts = {task: self._prompts(task, loaded) for task in tasks}
        runner.run(
            {task.name: runner.plan(found, self._in_journal(task)) for task, found in prompts.items()},
            lambda task, batch, found: self._finish(find_task(task), batch, found, loaded.tokenizer, runner.place),
        )

    def _in_journal(self, task: Task) -> Callable[[Prompt], bool]:
        rows = self._prepared.rows[task].rows
        return lambda prompt: self._is_done(task, rows[prompt.index])

    def _prompts(self, task: Task, loaded: LoadedModel) -> list[Prompt]:
        rows, manifest = self._prepared.rows[task].rows, self._prepared.manifest
        self._fitted[task.name], prompts = fitted_prompts(
            task, rows, loaded, manifest["specification"]["window"], manifest["context"], self._prepared.request.chat
        )
        return prompts

    def _finish(
        self, task: Task, batch: Sequence[Prompt], found: Sequence[Generation], tokenizer: Any, place: Place
    ) -> None:
        """Put a batch into the journal."""
        rows, fitted = self._prepared.rows[task].rows, self._fitted[task.name]
        predictions = [
            _prediction(rows[one.index], fitted[one.index], generation, tokenizer)
            for one, generation in zip(batch, found, strict=True)
        ]
        # A row is generated once, so its number in the file names the batch in every session
        number = rows[batch[0].index].index
        seconds = round(sum(generation.seconds for generation in found), 4)
        self._writer.append(Entry(task.name, number, seconds, [list(row) for row in predictions], place))
        self._keep(task.name, predictions)

    def _write_results(self) -> None:
        from evalkit.benchmarks.longbench.scores import score_generations

        table = self._table()
        self._writer.save_table(GENERATIONS, table)
        official = {task.name: found.official for task, found in self._prepared.rows.items()}
        results = score_generations(table, self._prepared.request.suite, "difflib", official)
        averages = [
            {"name": mean.name, "accuracy": (mean.all.score or 0.0) / 100, "stderr": None}
            for mean in (results.plain_mean, results.mean_of_groups)
        ]
        self._writer.save_results(results.to_json() | {"averages": averages})

    def _table(self) -> pd.DataFrame:
        """A row for each document, in the tasks' and the files' order."""
        import pandas as pd

        from evalkit.benchmarks.longbench.scores import score_rows

        parts = []
        for task, found in self._prepared.rows.items():
            rows = [_table_row(task, row, self._prediction_of(task, row)) for row in found.rows]
            part = pd.DataFrame(rows)
            part["score"] = score_rows(task, part)
            parts.append(part)
        return pd.concat(parts, ignore_index=True)

    def _prediction_of(self, task: Task, row: Row) -> Prediction:
        try:
            return self._done[task.name, row.id]
        except KeyError:
            # Cannot happen unless somebody has removed lines of the journal while it was read
            raise RunError(
                f"the journal of {self._writer.folder} does not hold {task.name} row {row.id}; "
                "delete the folder and run the command again"
            ) from None


def _prediction(row: Row, fitted: Fitted, generation: Generation, tokenizer: Any) -> Prediction:
    return Prediction(
        id=row.id,
        prompt_sha256=fitted.text_sha256,
        tokens_before=fitted.before,
        tokens=len(fitted.tokens),
        truncated=fitted.truncated,
        reused=generation.reused,
        prediction=tokenizer.decode(generation.tokens, skip_special_tokens=True),
        new_tokens=len(generation.tokens),
        ended=generation.ended,
        seconds=round(generation.seconds, 4),
    )


def _table_row(task: Task, row: Row, prediction: Prediction) -> dict[str, Any]:
    return {
        "task": task.name,
        "index": row.index,
        **prediction._asdict(),
        "length": row.length,
        # Rows of one document, of which several questions are asked, are no independent draws
        SOURCE: hashlib.sha256(row.context.encode()).hexdigest()[:16],
        "answers": json.dumps(row.answers, ensure_ascii=False),
        "all_classes": json.dumps(row.all_classes, ensure_ascii=False),
    }
