"""An lm-eval model that answers from the journal, and scores what the journal does not hold.

In: lm-eval's requests, as its `evaluate` hands them over. Out: their answers, in order. What is scored is in the
journal, batch by batch, before the next batch begins, and the batches are the same whatever the journal holds already:
after any number of kills the answers are those of an undisturbed run, bit for bit on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lm_eval.api.model import LM

from evalkit.benchmarks.lm_eval.preparation import SEEDS
from evalkit.progress import Progress
from evalkit.runs.journal import Entry
from evalkit.runs.place import place_of
from evalkit.runs.writing import RunWriter

if TYPE_CHECKING:
    from evalkit.benchmarks.lm_eval.harness import Harness
    from evalkit.benchmarks.lm_eval.scoring import Wanted

_NOTHING = -1
"""Number of the batch of a task's empty texts, which have no token to score."""

_PER_TEXT = 2000
"""Work of generating one text, in characters that are scored."""


class Place(NamedTuple):
    """Which request of a run, or which part of one."""

    kind: str
    """lm-eval's name of it: "loglikelihood", "loglikelihood_rolling" or "generate_until"."""
    task: str
    doc_id: int
    number: int
    """Which of the document's requests."""
    part: int
    """Which window of a text, or which of several samples of the same request."""


class Answer(NamedTuple):
    """What the journal holds of a place."""

    digest: str
    """Of the request's text, so that an answer to another question is never taken."""
    parts: int
    """How many windows the text has; 1 where the request is not taken apart."""
    likelihood: float | None = None
    greedy: bool | None = None
    context_tokens: int = 0
    continuation_tokens: int = 0
    cut: int = 0
    """Context tokens cut on the left to fit the window."""
    text: str | None = None
    """What was generated."""


class Row(NamedTuple):
    """A row of the journal: where in its task the request is, then the fields of its `Answer`."""

    doc_id: int
    number: int
    part: int
    digest: str
    parts: int
    likelihood: float | None
    greedy: bool | None
    context_tokens: int
    continuation_tokens: int
    cut: int
    text: str | None


Asked = tuple[Place, Any]
"""A request of lm-eval and its place."""


class Answers(LM):  # type: ignore[misc]
    """The model that lm-eval's `evaluate` is given.

    Args:
        writer: of the run, whose journal holds the answers.
        load: loads the model, when there is something to score.
        requests: gives all requests of the run, when lm-eval asks for the first.
        progress: told how far it is.
    """

    def __init__(
        self,
        writer: RunWriter,
        load: Callable[[], Harness],
        requests: Callable[[], Sequence[Any]],
        progress: Progress,
    ) -> None:
        super().__init__()
        self._writer = writer
        self._load = load
        self._requests = requests
        self._progress = progress
        self._loaded: Harness | None = None
        self._found: dict[Place, Answer] = {}
        self._work: dict[Place, float] = {}
        self.seconds: dict[str, float] = {}
        """Spent on each task, in all sessions."""
        for entry in writer.entries(Row):
            self._keep(entry)

    def __bool__(self) -> bool:
        """Whether it holds any answer."""
        return bool(self._found)

    def _begin(self) -> None:
        """Show progress, if any of the run's requests is still to be answered."""
        asked = _asked([request for request in self._requests() for _ in range(request.repeats or 1)])
        self._work = {place: _work_of(request) for place, request in asked}
        left = {place for place, request in asked if not self._is_done(place, request)}
        if left:
            total = sum(self._work.values())
            self._progress.start(total, total - sum(self._work[place] for place in left))

    def of(self, request: Any) -> Answer:
        """The journal's answer to a scored request."""
        return self._found[Place(request.request_type, request.task_name, request.doc_id, request.idx, 0)]

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """(log-likelihood, greedy?) of each request."""
        return [(_likelihood(found), bool(found.greedy)) for [found] in self._answered(requests, self._score)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Log-likelihood of each text: the sum over its windows."""
        return [sum(map(_likelihood, found)) for found in self._answered(requests, self._score)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """What the model says after each text."""
        return [str(found.text) for [found] in self._answered(requests, self._generate)]

    def _answered(self, requests: Sequence[Any], work: Callable[[str, list[Asked]], None]) -> list[list[Answer]]:
        if not self._work:
            self._begin()
        asked = _asked(requests)
        by_task: dict[str, dict[Place, Any]] = {}
        for place, request in asked:
            by_task.setdefault(place.task, {})[place] = request
        for task, members in by_task.items():
            self.seconds.setdefault(task, 0.0)
            if not all(self._is_done(place, request) for place, request in members.items()):
                self._progress.task(task)
                work(task, list(members.items()))
        return [self._parts(place) for place, _ in asked]

    def _parts(self, place: Place) -> list[Answer]:
        """Its answers; those that are taken apart have one for each window."""
        if place.kind != "loglikelihood_rolling":
            return [self._found[place]]
        count = self._found[place].parts
        return [self._found[place._replace(part=part)] for part in range(max(count, 1))]

    def _is_done(self, place: Place, request: Any) -> bool:
        found = self._found.get(place)
        if found is None or found.digest != _digest(request):
            return False
        return all(place._replace(part=part) in self._found for part in range(1, found.parts))

    @property
    def _harness(self) -> Harness:
        if self._loaded is None:
            self._loaded = self._load()
            # All before anything is scored, not when their turn comes
            self._loaded.check_generation([r for r in self._requests() if r.request_type == "generate_until"])
        return self._loaded

    def _score(self, task: str, members: list[Asked]) -> None:
        """Score what is missing of a task, and with it what shares its batches."""
        from evalkit.benchmarks.lm_eval.scoring import score_batches

        harness = self._harness
        wanted, places, answers = self._wanted(members)
        empty = {place for place, _ in members} - {_whole(place) for place in places}
        if rows := [(place, Answer(_digest(request), 0, 0.0)) for place, request in members if place in empty]:
            self._write(task, _NOTHING, 0.0, rows)
        done = {i for i, place in enumerate(places) if self._holds(place, answers[i].digest)}
        started = time.perf_counter()
        for number, scored in score_batches(harness.engine, wanted, done, harness.asked_budget):
            rows = [(places[i], answers[i]._replace(likelihood=value, greedy=greedy)) for i, value, greedy in scored]
            self._write(task, number, time.perf_counter() - started, rows)
            started = time.perf_counter()

    def _wanted(self, members: list[Asked]) -> tuple[list[Wanted], list[Place], list[Answer]]:
        """What the engine is asked, the place of each, and its answer but for the score."""
        from evalkit.benchmarks.lm_eval.harness import label_of, owner_of
        from evalkit.benchmarks.lm_eval.scoring import Wanted

        harness = self._harness
        wanted: list[Wanted] = []
        places: list[Place] = []
        answers: list[Answer] = []
        if members[0][0].kind == "loglikelihood":
            for (place, request), pair in zip(members, harness.encode([r for _, r in members]), strict=True):
                owner = owner_of(request)
                wanted.append(Wanted(pair.context, pair.continuation, label_of(request), owner, place.task))
                places.append(place)
                sizes = (len(pair.context), len(pair.continuation), pair.cut)
                answers.append(Answer(_digest(request), 1, None, None, *sizes))
            return wanted, places, answers
        for place, request in members:
            windows = harness.windows(request)
            for part, (context, continuation) in enumerate(windows):
                own = place._replace(part=part)
                wanted.append(Wanted(context, continuation, f"{label_of(request)}, window {part}", own))
                places.append(own)
                answers.append(Answer(_digest(request), len(windows), None, None, len(context), len(continuation)))
        return wanted, places, answers

    def _generate(self, task: str, members: list[Asked]) -> None:
        """Generate the texts that are missing, in lm-eval's own batches: of the same settings, the longest first."""
        import torch

        harness = self._harness
        lengths = {place: len(harness.tok_encode(request.args[0])) for place, request in members}
        by_settings: dict[str, list[Asked]] = {}
        for place, request in members:
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(
                (place, request)
            )
        number = 0
        for group in by_settings.values():
            group.sort(key=lambda one: (-lengths[one[0]], one[1].args[0]))
            for start in range(0, len(group), harness.batch_size):
                batch = group[start : start + harness.batch_size]
                if not all(self._is_done(place, request) for place, request in batch):
                    # Anew for each batch, so that a resumed run samples the same texts
                    torch.manual_seed(SEEDS["torch"] + number)
                    started = time.perf_counter()
                    texts = harness.generate_until([request for _, request in batch])
                    rows = [
                        (place, Answer(_digest(request), 1, text=text))
                        for (place, request), text in zip(batch, texts, strict=True)
                    ]
                    self._write(task, number, time.perf_counter() - started, rows)
                number += 1

    def _holds(self, place: Place, digest: str) -> bool:
        found = self._found.get(place)
        return found is not None and found.digest == digest

    def _write(self, task: str, number: int, seconds: float, rows: list[tuple[Place, Answer]]) -> None:
        """Put a finished batch into the journal, and take it in."""
        kind = rows[0][0].kind
        content = [[place.doc_id, place.number, place.part, *answer] for place, answer in rows]
        computed = place_of(self._harness.loaded.device, self._harness.kernel(kind))
        entry = Entry(f"{kind} {task}", number, round(seconds, 4), content, computed)
        self._writer.append(entry)
        fresh = [(place, answer) for place, answer in rows if place not in self._found]
        self._keep(entry)
        work = sum(self._work.get(_whole(place), 0.0) / max(answer.parts, 1) for place, answer in fresh)
        self._progress.advance(work, len({place.doc_id for place, _ in fresh}))

    def _keep(self, entry: Entry) -> None:
        """Take a batch in; an answer that an earlier one gave to the same request stays."""
        kind, _, task = entry.task.partition(" ")
        self.seconds[task] = self.seconds.get(task, 0.0) + entry.seconds
        for doc_id, number, part, *answer in entry.rows:
            place, given = Place(kind, task, doc_id, number, part), Answer(*answer)
            if not self._holds(place, given.digest):
                self._found[place] = given


def _whole(place: Place) -> Place:
    """The request that a window belongs to."""
    return place._replace(part=0) if place.kind == "loglikelihood_rolling" else place


def _work_of(request: Any) -> float:
    """Characters, or what generating takes as long as: near enough to a request's share of the time."""
    return _PER_TEXT if request.request_type == "generate_until" else sum(map(len, request.args))


def _likelihood(answer: Answer) -> float:
    return float(answer.likelihood or 0.0)


def _asked(requests: Sequence[Any]) -> list[Asked]:
    """Requests with their places; a request that is repeated is a sample of its own only where text is generated."""
    seen: dict[Place, int] = {}
    asked = []
    for request in requests:
        place = Place(request.request_type, request.task_name, request.doc_id, request.idx, 0)
        if place.kind == "generate_until":
            sample = seen.get(place, 0)
            seen[place] = sample + 1
            place = place._replace(part=sample)
        asked.append((place, request))
    return asked


def _digest(request: Any) -> str:
    text = json.dumps(list(request.args), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
