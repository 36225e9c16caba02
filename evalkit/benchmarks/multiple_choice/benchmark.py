"""Suites of multiple-choice tasks: every choice of a document is scored, and a rule chooses among them.

scores.parquet   the score table, from which every rule decides
results.json     accuracies under every rule
lm_eval/         the same in lm-eval's form
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, takewhile
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias

from evalkit.benchmarks.base import Batch, Batches, Benchmark, Budget, Planned, Say
from evalkit.benchmarks.multiple_choice.outcomes import Choices, stored_metrics
from evalkit.benchmarks.multiple_choice.suites import label_of, pinned_tasks, shipped_suites
from evalkit.benchmarks.outcomes import Label, Metric
from evalkit.errors import RunError
from evalkit.inputs.form import Each
from evalkit.runs.folder import SCORES, Run
from evalkit.runs.forms import AVERAGES, NUMBER, RESULTS_FORM
from evalkit.runs.place import Place, place_of
from evalkit.scores.table import CLUSTER, SEGMENTS, ScoreRow

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalkit.benchmarks.lm_eval.plan import TaskPlan
    from evalkit.benchmarks.multiple_choice.plan import ChoicePlan
    from evalkit.benchmarks.multiple_choice.prompts import EncodedQuestion
    from evalkit.benchmarks.multiple_choice.tasks import Question
    from evalkit.benchmarks.suite_request import SuiteRequest
    from evalkit.data import HubSplit
    from evalkit.models.load import LoadedModel
    from evalkit.runs.held import Held, Key
    from evalkit.runs.writing import RunWriter
    from evalkit.scoring import pack

_SCORED = {"task": str, "n": int, "accuracy": float, "stderr": NUMBER, "chance": float}
"""A task's accuracy in results.json."""
_CANDIDATES = 2
"""Questions of each task that the start-up check may choose from."""

_Encoded: TypeAlias = "tuple[list[EncodedQuestion], list[pack.Batch]]"
"""A task's documents as token sequences, and the batches that they are scored in."""


@dataclass(frozen=True)
class ScoringFacts:
    """What planning needs to know of a model that scores."""

    window: int
    """Most tokens of a sequence."""
    token_budget: int
    """Most tokens of a batch."""
    shares: bool
    """Whether sequences share their prefixes."""


class MultipleChoice(Benchmark):
    """See the module."""

    kind = "multiple_choice"
    row = ScoreRow
    key = ("subtask", "doc_id")
    results_form = RESULTS_FORM | {
        "tasks": [_SCORED | {"seconds": float}],
        "rules": Each({"tasks": [_SCORED], "averages": AVERAGES}),
        "samples": bool,
    }

    def request(self) -> type[SuiteRequest]:
        """See `Benchmark`."""
        from evalkit.benchmarks.suite_request import SuiteRequest

        return SuiteRequest

    def plan(self, request: SuiteRequest, say: Say) -> ChoicePlan | TaskPlan:
        """See `Benchmark`: of lm-eval's tasks where no suite has them (`asked_suite`)."""
        from evalkit.benchmarks.lm_eval.plan import plan_tasks
        from evalkit.benchmarks.multiple_choice.plan import asked_suite, plan_suite

        suite = asked_suite(request, say)
        return plan_tasks(request, say) if suite is None else plan_suite(request, suite, say)

    def is_missing(self, plan: ChoicePlan, held: Held) -> bool:
        """Whether a document has no scores."""
        return any(_key(question) not in held for question in chain(*plan.questions.values()))

    def computer(self, plan: ChoicePlan, loaded: LoadedModel, budget: Budget, say: Say) -> _Scoring:
        """See `Benchmark`."""
        return _Scoring(plan, loaded, budget.scored, say)

    def batches(self, plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, held: Held, say: Say) -> Planned:
        """See `Benchmark`."""
        work = {_key(question): _work_of(question) for question in chain(*plan.questions.values())}
        return Planned(
            _batches(plan, facts, tokenizer, held, say),
            sum(work.values()),
            sum(size for key, size in work.items() if key in held),
        )

    def finish(self, plan: ChoicePlan, held: Held, writer: RunWriter) -> None:
        """See `Benchmark`."""
        from evalkit.benchmarks.multiple_choice.lm_eval_form import evaluated
        from evalkit.export.lm_eval import write_lm_eval
        from evalkit.scores.results import summarise_all

        scores = _table(plan, held, writer)
        writer.save_table(SCORES, scores)
        manifest = writer.manifest
        seconds = dict.fromkeys(plan.suite.tasks, 0.0) | held.seconds
        found = summarise_all(scores, manifest)
        total, samples = sum(seconds.values()), plan.request.log_samples
        write_lm_eval(writer, evaluated(scores, found, plan.questions, manifest, total, samples))
        content = found[manifest["rule"]].to_json()
        for task in content["tasks"]:
            task["seconds"] = round(seconds[task["task"]], 3)
        content["rules"] = {rule: results.to_json() for rule, results in found.items()}
        content["samples"] = samples
        writer.save_results(content)

    def serves(self, plan: ChoicePlan, run: Run) -> bool:
        """Whether a finished run has the sample files, if they are asked for."""
        return run.serves(plan.request.log_samples)

    def metrics(self, run: Run, rule: str | None = None) -> list[Metric]:
        """See `Benchmark`."""
        return stored_metrics(run, rule)

    def comparable(self, run: Run) -> Choices:
        """See `Benchmark`."""
        return Choices(run)

    def show(self, run: Run, form: str, rule: str | None = None, detail: bool = False) -> str:
        """See `Benchmark`: the table, beneath it what every rule makes of the same scores."""
        from evalkit.benchmarks.multiple_choice.view import choices_json, choices_text

        results = run.results(rule or run.manifest["rule"])
        return choices_json(run, results) if form == "json" else choices_text(run, results, detail)

    def prompts(self, plan: ChoicePlan, count: int, say: Say) -> Iterator[str]:
        """See `Benchmark`: each question with its segments in colour."""
        from evalkit.benchmarks.loading import load_model
        from evalkit.benchmarks.multiple_choice.prompts import Prompter
        from evalkit.benchmarks.multiple_choice.tasks import load_questions
        from evalkit.benchmarks.multiple_choice.view import prompt_text

        loaded = load_model(plan, say)
        prompter = Prompter(plan.template, loaded.tokenizer, loaded.window, say)
        for questions in load_questions(plan.suite, plan.library, count, plan.others).values():
            for encoded in prompter.encode(questions, plan.unconditional):
                yield prompt_text(encoded, loaded.tokenizer)

    def suites(self) -> dict[str, str]:
        """See `Benchmark`: those that evalkit ships."""
        return {suite.name: suite.description for suite in shipped_suites().values()}

    def averages(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """See `Benchmark`."""
        suites = shipped_suites().values()
        return {suite.name: {**suite.groups, "Average": suite.tasks} for suite in suites}

    def fills(self, run: Run) -> tuple[str, dict[str, str]]:
        """See `Benchmark`."""
        suite = shipped_suites().get(run.suite)
        return (suite.fills, suite.stands_for) if suite and suite.fills else (run.suite, {})

    def label(self, run: Run, task: str) -> Label:
        """As the run's own suite has it, or evalkit's suites."""
        return label_of(task, run.manifest.get("labels"), run.manifest.get("short"))

    def dataset(self, run: Run, task: str) -> HubSplit | None:
        """See `Benchmark`."""
        from evalkit.data import TASKS

        documents = pinned_tasks().get(task)
        return None if documents is None else TASKS[documents].hub


class _Scoring:
    """A model that scores documents."""

    def __init__(self, plan: ChoicePlan, loaded: LoadedModel, budget: int | None, say: Say) -> None:
        from evalkit.benchmarks.multiple_choice.prompts import Prompter
        from evalkit.benchmarks.multiple_choice.rows import question_item
        from evalkit.models.locate import silent
        from evalkit.scoring.budget import auto_budget
        from evalkit.scoring.engine import Engine

        self._scored = _scored(plan)
        self._engine = engine = Engine(loaded.model, budget or auto_budget(loaded.model), say, remembers=True)
        prompter = Prompter(plan.template, loaded.tokenizer, loaded.window, silent)
        first = [question for members in plan.questions.values() for question in members[:_CANDIDATES]]
        encoded = prompter.encode(first, plan.unconditional)
        engine.check([question_item(number, one, self._scored) for number, one in enumerate(encoded)])
        self.facts = ScoringFacts(loaded.window, engine.budget, engine.shares)
        self.about = {
            "token_budget": engine.budget,
            "sharing": engine.describe(),
            "loaded": loaded.facts() | {"markers": _markers(plan, loaded.tokenizer)},
        }
        self._place = place_of(loaded.device, engine.kernel if engine.shares else "alone")

    def place(self, batch: Batch | None = None) -> Place:
        """See `Computer`."""
        return self._place

    def compute(self, batch: Batch) -> list[ScoreRow]:
        """See `Computer`."""
        from evalkit.benchmarks.multiple_choice.rows import question_rows

        packed, questions = batch.content
        return [
            row
            for item, scores in self._engine.score(packed)
            for row in question_rows(questions[item.index], scores, self._scored)
        ]


def _batches(plan: ChoicePlan, facts: ScoringFacts, tokenizer: Any, held: Held, say: Say) -> Batches:
    from evalkit.benchmarks.multiple_choice.prompts import Prompter
    from evalkit.benchmarks.multiple_choice.rows import question_item
    from evalkit.scoring.ahead import in_turn
    from evalkit.scoring.pack import plan as pack_items
    from evalkit.scoring.pack import refuse_small_budget

    prompter, scored, stop = Prompter(plan.template, tokenizer, facts.window, say), _scored(plan), Event()

    def encode(task: str) -> _Encoded:
        """Cut short once stopped."""
        found = prompter.encode(plan.questions[task], plan.unconditional)
        encoded = list(takewhile(lambda _: not stop.is_set(), found))
        items = [question_item(number, one, scored) for number, one in enumerate(encoded)]
        if facts.shares and plan.request.token_budget == facts.token_budget:
            refuse_small_budget(items, facts.token_budget)
        return encoded, pack_items(items, facts.token_budget)

    tasks = [task for task, members in plan.questions.items() if any(_key(one) not in held for one in members)]
    with _Ahead(encode, tasks, stop) as ahead:
        for task in tasks:
            encoded, packed = ahead.take(task)

            def done(batch: pack.Batch, encoded: list[EncodedQuestion] = encoded) -> bool:
                return all(_key(encoded[item.index].question) in held for item in batch.items)

            for number, batch in in_turn(packed, done):
                members = {item.index: encoded[item.index] for item in batch.items}
                work = sum(_work_of(one.question) for one in members.values())
                yield Batch(task, number, (batch, members), work, len(members))
                ahead.raise_trouble()


class _Ahead:
    """Tokenises and plans all tasks, in their order, while the first ones are scored.

    Args:
        plan: encodes and plans one task.
        tasks: in the order in which they will be taken.
        stop: set when nobody wants them any more.
    """

    def __init__(self, plan: Callable[[str], _Encoded], tasks: list[str], stop: Event) -> None:
        self._stop = stop
        self._encoder = ThreadPoolExecutor(1, "evalkit-encode")
        self._planned = {task: self._encoder.submit(plan, task) for task in tasks}

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._encoder.shutdown(wait=True, cancel_futures=True)

    def take(self, task: str) -> _Encoded:
        """The task's documents and batches, as soon as they are there."""
        return self._planned.pop(task).result()

    def raise_trouble(self) -> None:
        """Raise what is wrong with a later task as soon as it is known, not when its turn comes."""
        for planned in self._planned.values():
            if planned.done() and (trouble := planned.exception()):
                raise trouble


def _table(plan: ChoicePlan, held: Held, writer: RunWriter) -> pd.DataFrame:
    """The journal's rows as the score table, in the order of the documents."""
    import pandas as pd

    parts = [_task_table(members, held.table(task), writer) for task, members in plan.questions.items()]
    return pd.concat(parts, ignore_index=True)


def _task_table(questions: Sequence[Question], rows: pa.Table, writer: RunWriter) -> pd.DataFrame:
    """The same of one task."""
    order = {(question.subtask, question.doc_id): place for place, question in enumerate(questions)}
    documents = zip(rows["subtask"].to_pylist(), rows["doc_id"].to_pylist(), strict=True)
    # Rows of a document stay in their order
    places = sorted((order[one], number) for number, one in enumerate(documents) if one in order)
    table = rows.take([number for _, number in places])
    found = list(zip((place for place, _ in places), table["choice"].to_pylist(), strict=True))
    if found != [(place, choice) for place, one in enumerate(questions) for choice in range(len(one.contexts))]:
        # Cannot happen unless somebody has removed lines of the journal while it was read
        raise RunError(
            f"the journal of {writer.folder} does not hold the choices of every document; "
            "delete the folder and run the command again"
        )
    scores: pd.DataFrame = table.to_pandas()
    return scores.assign(**{CLUSTER: [questions[place].cluster for place, _ in places]})


def _key(question: Question) -> Key:
    return question.task, question.subtask, question.doc_id


def _scored(plan: ChoicePlan) -> frozenset[int]:
    """Indices of the segments that the template scores."""
    return frozenset(map(SEGMENTS.index, plan.template.score))


def _work_of(question: Question) -> int:
    """Characters that a question adds to the tree: near enough to its share of the time."""
    return len(question.contexts[0]) + sum(map(len, question.continuations))


def _markers(plan: ChoicePlan, tokenizer: Any) -> Mapping[str, str]:
    """Whether each literal marker of the template, such as [INST], is one special token of this tokenizer or text."""
    special = set(tokenizer.all_special_tokens)
    literals = [part.text.strip() for part in plan.template.parts if part.segment == "special"]
    return {literal: "special token" if literal in special else "text" for literal in literals}
