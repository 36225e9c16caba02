"""Selection of documents. In: the outcomes of a task in one or two runs, and criteria. Out: documents, in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from evalkit.benchmarks.alike import document_difference
from evalkit.benchmarks.document_views import ChoiceText, ChoiceView, Piece, common_prefix
from evalkit.errors import UsageError
from evalkit.inspection.outcomes import DocumentName, TaskOutcomes, check_scores
from evalkit.runs.folder import Run

_PARAGRAPH = "\n\n"


def full_text(found: TaskOutcomes, place: int) -> str:
    """Return all texts of a document, joined by line ends; empty if it has none."""
    if isinstance(found.view, ChoiceView):
        text = choice_text_of(found, place)
        if text is None:
            return ""
        return "\n".join([_joined(text.common), *map(_joined, text.choices), *text.options])
    document = found.view.documents[place]
    return "\n".join([_joined(document.prompt), document.answer, *document.references])


def choice_text_of(found: TaskOutcomes, place: int) -> ChoiceText | None:
    """Return the texts of a document with choices; None if there are none."""
    if not isinstance(found.view, ChoiceView):
        return None
    subtask, identity = found.keys[place]
    return found.view.texts.get((subtask, int(identity)))


def option_text(found: TaskOutcomes, place: int, choice: int, most: int) -> str:
    """Return the number of a choice, with at most `most` characters of its option where texts are known."""
    text = choice_text_of(found, place)
    return str(choice) if text is None else f"{choice} {shortened(text.options[choice], most)}"


def beginnings(found: TaskOutcomes, places: Iterable[int], most: int) -> dict[int, str]:
    """Return index → the beginning of a document's context, on one line.

    The paragraphs with which all contexts of its subtask begin are left out: MMLU's heading, solved examples.

    Args:
        found: the task.
        places: indices of documents.
        most: maximum number of characters.
    """
    chosen = list(places)
    subtasks = {found.keys[place][0] for place in chosen}
    contexts: dict[str, list[str]] = defaultdict(list)
    for place, (subtask, _) in enumerate(found.keys):
        if subtask in subtasks:
            contexts[subtask].append(_context(found, place))
    shared = {subtask: _shared_paragraphs(texts) for subtask, texts in contexts.items()}
    return {place: shortened(_context(found, place)[shared[found.keys[place][0]] :], most) for place in chosen}


def shortened(text: str, most: int) -> str:
    """Return the beginning of a text on one line, with … where it is cut."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def _context(found: TaskOutcomes, place: int) -> str:
    """Return the context of a document, of its first choice if the choices have different ones."""
    if isinstance(found.view, ChoiceView):
        text = choice_text_of(found, place)
        pieces = () if text is None else (*text.common, *text.choices[0])
    else:
        pieces = found.view.documents[place].prompt
    return "".join(piece.text for piece in pieces if piece.segment == "context")


def _shared_paragraphs(texts: list[str]) -> int:
    """Return the number of characters of the paragraphs that all texts begin with; 0 for a single text."""
    if len(texts) < 2:
        return 0
    return common_prefix(texts).rfind(_PARAGRAPH) + 1


def _joined(pieces: Iterable[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@dataclass(frozen=True)
class Criteria:
    """What a document must be; all of them."""

    wrong: bool = False
    right: bool = False
    tie: bool = False
    truncated: bool = False
    won: bool = False
    """Right in the second run and wrong in the first."""
    lost: bool = False
    """Wrong in the second run and right in the first."""
    words: tuple[str, ...] = ()
    """Words that its text contains, in any case."""
    subtask: str | None = None

    @property
    def judges(self) -> bool:
        """Whether a criterion needs right and wrong."""
        return self.wrong or self.right or self.won or self.lost


class SelectedDocument(NamedTuple):
    """A document in each run."""

    outcomes: tuple[TaskOutcomes, ...]
    """Its task, in each run."""
    places: tuple[int, ...]
    """Its index, in each run."""

    @property
    def value(self) -> float:
        """Its margin or score in the only run; the second run's less the first's."""
        first, *second = (float(one.value[place]) for one, place in zip(self.outcomes, self.places, strict=True))
        if not second:
            return first
        return 0.0 if second[0] == first else second[0] - first

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.outcomes[0].name(self.places[0])

    @property
    def key(self) -> DocumentName:
        """Its subtask and id."""
        return self.outcomes[0].keys[self.places[0]]


def select(tasks: Sequence[tuple[TaskOutcomes, ...]], criteria: Criteria) -> list[SelectedDocument]:
    """Return the documents that meet all criteria, the lowest value first, of right or won ones the highest.

    Args:
        tasks: each task's outcomes, in one run or in two.
        criteria: what a document must be.

    Raises:
        UsageError: a criterion does not apply to a task.
    """
    found = [one for outcomes in tasks for one in _of_task(outcomes, criteria)]
    descending = criteria.right or criteria.won
    # Documents without a value come last; the sort keeps the order of equal ones
    return sorted(found, key=lambda one: (np.isnan(one.value), -one.value if descending else one.value))


def check_same_documents(a: Run, b: Run, task: str) -> None:
    """Raise a `UsageError` if the documents of a task differ between two runs."""
    if found := document_difference(a, b, task):
        what, mine, theirs = found
        raise UsageError(
            f"task {task}: the {what} of run {b.folder.name} ({theirs[:12]}) is not that of run {a.folder.name} "
            f"({mine[:12]}), so these are other documents; show each run alone"
        )


def _of_task(outcomes: tuple[TaskOutcomes, ...], criteria: Criteria) -> Iterator[SelectedDocument]:
    _check_texts(outcomes, criteria)
    first, last = outcomes[0], outcomes[-1]
    for place, key in enumerate(first.keys):
        places = [one.places.get(key) for one in outcomes]
        if None in places:
            continue
        found = SelectedDocument(outcomes, tuple(place for place in places if place is not None))
        right, wrong = first.right[place], first.wrong[place]
        wins, fails = last.right[found.places[-1]], last.wrong[found.places[-1]]
        checks = (
            (criteria.wrong, wrong),
            (criteria.right, right),
            (criteria.tie, first.tie[place]),
            (criteria.truncated, first.truncated[place]),
            (criteria.won, wrong and wins),
            (criteria.lost, right and fails),
            (criteria.subtask is not None, key[0] == criteria.subtask),
        )
        if all(holds for is_asked, holds in checks if is_asked) and _has_words(found, criteria.words):
            yield found


def _has_words(found: SelectedDocument, words: Sequence[str]) -> bool:
    if not words:
        return True
    text = full_text(found.outcomes[0], found.places[0]).casefold()
    return all(word.casefold() in text for word in words)


def check_criteria(criteria: Criteria, runs: int) -> None:
    """Raise a `UsageError` if a criterion does not apply to the number of runs."""
    if runs == 1 and (criteria.won or criteria.lost):
        raise UsageError("--won and --lost compare two runs; name both: evalkit show RUN_A RUN_B --won")
    if runs > 1 and (criteria.wrong or criteria.right or criteria.tie or criteria.truncated):
        raise UsageError("--wrong, --right, --tie and --truncated are for one run; of two runs, give --won or --lost")


def _check_texts(outcomes: Sequence[TaskOutcomes], criteria: Criteria) -> None:
    view = outcomes[0].view
    if criteria.words and isinstance(view, ChoiceView) and not view.texts:
        raise UsageError(f"--text searches texts, which task {view.task} does not have: {view.problem}")
    if criteria.judges:
        for one in outcomes:
            check_scores(one)
