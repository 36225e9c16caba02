"""Speed of evalkit and of lm-eval's Hugging Face model on a suite of frozen requests, task by task in one process.

    python benchmarks/versus_lm_eval_requests.py olmes-cloze olmes-letters --limit 100 --lm-eval-every 10

Both score the same token sequences: context and continuation are tokenised separately and joined, and so are the
requests without the question where the suite's rule needs them. lm-eval scores a context once for all continuations of
one token, and nothing else twice, so its time grows with the tokens that it computes. With `--lm-eval-every N` it
scores every N-th document, and its time is scaled by these tokens to all documents. It runs at the best of its batch
sizes, found on the first task of each suite.

Times are of one thread on the processor (`--wall`: elapsed), since other processes may use it too; neither includes
tokenising. Checks of lengths, which evalkit makes once for an architecture, are timed apart. "Of
machine" is defined in versus_lm_eval.py. Writes requests.md and requests.json after every task.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch
import versus_lm_eval
from suite_documents import encoded, score, sequences_of
from versus_lm_eval import best_peer, count, machine, matrices, matrix_rate, note, timed

from evalkit.data import Library
from evalkit.data.sampling import FirstDocuments
from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.requests.requests import ScoreDocument
from evalkit.runs.rules import find_rule, of_task
from evalkit.runs.score_table import CONTINUATION, outcome_of
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import TreeBatch
from evalkit.suites.choice_requests import ChoiceRequests
from evalkit.suites.question_loading import load_questions
from evalkit.suites.request_files import load_requests
from evalkit.suites.suites import Suite, choose_tasks, load_suite
from evalkit.suites.templates import load_template


@dataclass
class RequestsRow:
    """Measurements of one task in seconds and tokens."""

    suite: str
    dtype: str
    task: str
    documents: int
    trunks: int
    """Prefixes that go through the model once before batches."""
    batches: int
    tokens: int
    """Distinct tokens that evalkit computes, including those of the trunks."""
    ours: float
    checks: float
    """Seconds of the checks of lengths that had not occurred before; not part of `ours`."""
    their_tokens: int
    theirs: float
    """Of all documents; scaled by tokens if lm-eval scored a part of them."""
    flops: float
    their_flops: float
    rate: float
    """The machine's matrix rate in this dtype, FLOP/s, measured beside the task."""
    difference: float
    """Largest relative difference of a log-likelihood."""


def main() -> None:
    """Run the comparison and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task")
    parser.add_argument("--tasks", nargs="*", default=(), help="tasks of the suites; default: all")
    parser.add_argument("--subjects", nargs="*", default=(), help="only these, such as mmlu_test_rc_5shot_anatomy")
    parser.add_argument("--lm-eval-every", type=int, default=1, help="score every N-th document by lm-eval")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 2, 4, 8), help="of lm-eval")
    parser.add_argument("--dtypes", nargs="+", default=("float32",))
    parser.add_argument("--wall", action="store_true", help="measure elapsed time; needed on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    arguments = parser.parse_args()
    if not arguments.wall:
        torch.set_num_threads(1)
        versus_lm_eval.CLOCK = process_time
    rows: list[RequestsRow] = []
    for dtype in arguments.dtypes:
        loaded = load(locate(arguments.model, say=note), dtype=dtype, device=arguments.device, say=note)
        for name in arguments.suites:
            for row in compare(loaded, dtype, name, arguments):
                rows.append(row)
                write(arguments.out, rows, {"model": loaded.name, "limit": arguments.limit, **machine(arguments)})


def compare(loaded: Any, dtype: str, name: str, arguments: argparse.Namespace) -> Iterator[RequestsRow]:
    """Measure one suite in one dtype, task by task."""
    suite = load_suite(name)
    suite = choose_tasks(suite, [task for task in arguments.tasks if task in suite.tasks])
    library = Library()
    selection = FirstDocuments(None if arguments.subjects else arguments.limit)
    questions_of = load_questions(suite, library, selection, requests=load_requests(suite, library, note))
    template = load_template("requests")
    is_single = any(len(one.contexts) == 1 for questions in questions_of.values() for one in questions)
    about = {"greedy": is_single, "remembers": loaded.stock, "files": loaded.files}
    engine = Engine(loaded.model, auto_budget(loaded.model), note, **about)
    checks = timing_checks(engine)
    peer = None
    for task, questions in questions_of.items():
        chosen = [one for one in questions if not arguments.subjects or one.subtask in arguments.subjects]
        requests = ChoiceRequests(
            task, template, chosen[: arguments.limit], "", (), unconditional=needs_unconditional(suite, task)
        )
        members = encoded(requests, loaded.tokenizer, loaded.window)
        if peer is None:
            seconds, _ = timed(lambda members=members: engine.check(sequences_of(members[:2])))
            note(f"start-up checks: {seconds:.1f} s")
            peer = best_peer(loaded, members[:4], "plain", arguments.batch_sizes)
        yield measure(RequestsRow(name, dtype, task, len(members), *[0] * 11), members, engine, checks, peer,
                      loaded.model, arguments.lm_eval_every)  # fmt: skip


def measure(
    row: RequestsRow, members: list[ScoreDocument], engine: Engine, checks: list[float],
    peer: Callable[[list[ScoreDocument]], list[float]], model: Any, every: int,
) -> RequestsRow:  # fmt: skip
    """Fill in a row: score a task by evalkit, then its every-th document by lm-eval."""
    row.rate = matrix_rate(model, engine.budget)
    checks[0] = 0.0
    seconds, (rows, batches) = timed(lambda: score(engine, members))
    row.ours, row.checks = seconds - checks[0], checks[0]
    count(row, batches, model)
    row.trunks = trunks_of(batches)
    chosen = members[::every]
    row.theirs, theirs = timed(lambda: peer(chosen))
    row.their_tokens, of_chosen = computed(members), computed(chosen)
    row.theirs *= row.their_tokens / of_chosen
    row.their_flops = 2.0 * row.their_tokens * sum(matrices(model))
    ours = [one.of(CONTINUATION)[1] or 0.0 for one in chain.from_iterable(rows[::every])]
    pairs = zip(ours, theirs, strict=True)
    row.difference = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    note(
        f"{row.suite} {row.dtype} {row.task}: {row.ours:.1f} s (checks {row.checks:.1f} s) against {row.theirs:.1f} s: "
        f"{row.theirs / row.ours:.2f}x (arithmetic {row.their_flops / row.flops:.2f}x)"
    )
    return row


def trunks_of(batches: list[TreeBatch]) -> int:
    """Return the number of prefixes that go through the model before batches; batches in a row may share one."""
    trunks = [batch.trunk.tobytes() for batch in batches]
    return sum(bool(trunk) and trunk != before for before, trunk in pairwise([b"", *trunks]))


def computed(members: list[ScoreDocument]) -> int:
    """Return the tokens that lm-eval computes, without padding: sequences that differ in the last token count once."""
    inputs = {tuple(sequence.tokens[:-1].tolist()) for member in members for sequence in member.scores}
    return sum(map(len, inputs))


def needs_unconditional(suite: Suite, task: str) -> bool:
    """Return whether a suite's rule needs a task's continuations without the question."""
    if suite.rule is None or outcome_of(suite.rule) is not None:
        return False
    return "unconditional" in of_task(find_rule(suite.rule), task).segments


def timing_checks(engine: Engine) -> list[float]:
    """Return a list of one number: the seconds that an engine has spent in checks of lengths since this call."""
    spent = [0.0]
    for name in ("cover", "sharing"):
        inner = getattr(engine._checks, name)

        def counted(*given: Any, inner: Any = inner, **named: Any) -> Any:
            started = versus_lm_eval.CLOCK()
            try:
                return inner(*given, **named)
            finally:
                spent[0] += versus_lm_eval.CLOCK() - started

        setattr(engine._checks, name, counted)
    return spent


def write(out: Path, rows: list[RequestsRow], about: dict[str, Any]) -> None:
    """Write the results so far, so that an interrupted benchmark is not lost."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "requests.json").write_text(json.dumps({"about": about, "rows": list(map(asdict, rows))}, indent=1) + "\n")
    lines = []
    for key in dict.fromkeys((row.suite, row.dtype) for row in rows):
        members = [row for row in rows if (row.suite, row.dtype) == key]
        head = (
            "task | documents | trunks | batches | evalkit s | checks s | lm-eval s | ratio | ratio of arithmetic | "
            "documents/s | tokens/s | of machine | difference"
        )
        lines += [f"### `{key[0]}`, {key[1]}", "", f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
        lines += [line(row.task, [row]) for row in members]
        lines += [line("all", members), ""]
    (out / "requests.md").write_text("\n".join(lines))


def line(task: str, rows: list[RequestsRow]) -> str:
    """Return a line of the table: the sums over rows."""

    def total(name: str) -> Any:
        return sum(getattr(row, name) for row in rows)

    ours, theirs, documents = total("ours"), total("theirs"), total("documents")
    cells = [
        task, documents, total("trunks"), total("batches"), f"{ours:.1f}", f"{total('checks'):.1f}", f"{theirs:.1f}",
        f"{theirs / ours:.2f}×", f"{total('their_flops') / total('flops'):.2f}×", f"{documents / ours:.1f}",
        f"{total('tokens') / ours:.0f}", f"{sum(row.flops / row.rate for row in rows) / ours:.0%}",
        f"{max(row.difference for row in rows):.1e}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
