"""Documents of a suite as requests, which several of these scripts score: questions, sequences, batches, rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from evalkit.benchmarks.session import prefetched
from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.requests.encoded import EncodedDocuments, scored_rows
from evalkit.requests.requests import Encoder, Facts, ScoreDocument
from evalkit.requests.rows import ScoredRow
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import Sequences, TreeBatch, batches_of
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.question_loading import load_questions
from evalkit.suites.suites import choose_tasks, load_suite, with_fewshot
from evalkit.suites.templates import load_template


def choice_requests(
    template: str, tasks: Sequence[str], limit: int, data_dir: Path | None = None, shots: int = 0
) -> dict[str, ChoiceRequests]:
    """Return the requests of the first documents of each task of zeroshot8; no `tasks`: of all.

    A folder may hold any documents: their speed is measured, not a score.
    """
    suite = with_fewshot(choose_tasks(load_suite("zeroshot8"), tuple(tasks)), shots)
    library = Library(data_dir, allow_unofficial=data_dir is not None)
    questions = load_questions(suite, library, FirstDocuments(limit))
    loaded = load_template(template)
    return {task: ChoiceRequests(task, loaded, members, "", ()) for task, members in questions.items()}


def encoded(requests: ChoiceRequests, tokenizer: Any, window: int) -> list[ScoreDocument]:
    """Return the sequences of each document, in order."""
    return list(requests.scored(Encoder(tokenizer, Facts(window))))


def sequences_of(documents: Iterable[ScoreDocument]) -> Sequences:
    """Return the sequences of documents as the engine takes them."""
    return EncodedDocuments.of(documents).sequences


def score(engine: Engine, documents: Sequence[ScoreDocument]) -> tuple[list[list[ScoredRow]], list[TreeBatch]]:
    """Score documents, the next batch prepared meanwhile as in a run; return the rows of each, and the batches."""
    flat = EncodedDocuments.of(documents)
    batches = batches_of(flat.sequences, engine.budget)
    rows: dict[int, list[ScoredRow]] = {}
    for batch in prefetched(iter(batches), _build_tree):
        for item, scores in engine.score(batch):
            rows[item] = scored_rows(flat.head(item), scores)
    return [rows[item] for item in range(len(documents))], batches


def _build_tree(batch: TreeBatch) -> None:
    _ = batch.tree
