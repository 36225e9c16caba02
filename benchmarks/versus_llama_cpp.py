"""Speed and decisions of evalkit and of llama.cpp's llama-perplexity: the same weights, documents and threads.

    python benchmarks/versus_llama_cpp.py --llama-perplexity PATH --limit 100 --out docs/measurements/performance

Prompts are lm-eval's (`plain`). llama-perplexity reads GGUF files with the checkpoint's weights as float32, bfloat16,
float16, Q4_0 and as stored; each is measured beside evalkit in one dtype, task by task, alternately, and the shortest
of the rounds counts. The files' weights are verified to be evalkit's, except those of Q4_0, which is quantised again:
beside it evalkit scores with that file's weights, dequantised (its whole command uses the checkpoint's).
llama-perplexity runs at the best of several batch sizes, found for each file on the first task.

Scoring excludes loading and tokenising on both sides. Whole commands are `evalkit run` of all tasks with its caches
filled, and one call of llama-perplexity for each task. Memory is the peak resident memory of a whole command.

Decisions follow the highest mean log-probability per token (`acc_token`). llama-perplexity leaves out tokens with which
all choices begin ("other tokens" counts the documents in which evalkit's log-probabilities decide like it if they are
left out too); the remaining differences are of rounding.

Writes llama_cpp.md and llama_cpp.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf_files import check_weights, main_type, set_weights, write_gguf
from llama_perplexity import (
    Peer,
    Settings,
    TextQuestion,
    bit_labels,
    computed_tokens,
    decisions_from_bits,
    is_scorable,
    own_token_means,
    rounds_needed,
    run_watched,
    task_file,
    text_question,
)
from llama_tables import CommandRow, TaskRow, write
from numpy.typing import NDArray
from suite_documents import choice_requests, encoded, sequences_of
from versus_lm_eval import machine, note, timed

from evalkit.models.loading.load import load
from evalkit.models.loading.locate import locate
from evalkit.requests.requests import ScoreDocument
from evalkit.runs.score_table import CONTINUATION
from evalkit.scoring.architecture import auto_budget
from evalkit.scoring.engine import Engine
from evalkit.scoring.pack import batches_of
from evalkit.suites.prompts import Prompter
from evalkit.suites.questions import Question

TASKS = ("openbookqa", "arc_easy", "piqa", "hellaswag")
PAIRS = ("F32:float32", "BF16:bfloat16", "F16:bfloat16", "Q4_0:bfloat16", "stored:bfloat16")
SETTINGS = tuple(Settings(*sizes) for sizes in ((512, 512), (1024, 1024), (2048, 512), (2048, 2048), (4096, 2048)))
"""Sizes of llama.cpp's batches; the fastest are used."""


class Member(NamedTuple):
    """A document on both sides."""

    encoded: ScoreDocument
    text: TextQuestion


def main() -> None:
    """Run the comparison and write its tables."""
    arguments = parse()
    about: dict[str, Any] = {"limit": arguments.limit, "rounds": arguments.rounds, **machine(arguments)}
    about["versions"].pop("lm-eval")
    rows: list[TaskRow | CommandRow] = []
    exact: dict[str, NDArray[np.int64]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.files or Path(temporary)
        files = prepare(folder, arguments)
        about["files"] = {label: path.stat().st_size for label, path in files.values()}
        for pair in arguments.pairs:
            kind, dtype = pair.split(":")
            for row in compare(*files[kind], dtype, arguments, exact, about):
                rows.append(row)
                write(arguments.out, rows, about)
    note(f"written: {arguments.out}")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--llama-perplexity", type=Path, required=True, help="the program (docs/measurements/llama_cpp.md)"
    )
    parser.add_argument("--model", default="demo", help="demo, or a GGUF file of a Llama")
    parser.add_argument("--limit", type=int, default=100, help="documents of each task")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="tasks of zeroshot8, except winogrande")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="type of llama.cpp's file:dtype of evalkit")
    parser.add_argument("--rounds", type=int, default=3, help="alternations of a task's scoring")
    parser.add_argument("--commands", type=int, default=2, help="alternations of whole commands")
    parser.add_argument("--files", type=Path, help="folder that keeps the GGUF files; default: temporary")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out"))
    parser.set_defaults(device="cpu")
    return parser.parse_args()


def prepare(folder: Path, arguments: argparse.Namespace) -> dict[str, tuple[str, Path]]:
    """Return kind → (type, file) of the pairs' files, written if missing, with the weights verified."""
    checkpoint = locate(arguments.model, say=note)
    if checkpoint.gguf is None:
        raise SystemExit(f"--model {arguments.model}: expected demo or a GGUF file")
    model = load(checkpoint, dtype="float32", device="cpu", say=note).model
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for kind in dict.fromkeys(pair.split(":")[0] for pair in arguments.pairs):
        if kind == "stored":
            files[kind] = (main_type(checkpoint.gguf), checkpoint.gguf)
        else:
            files[kind] = (kind, folder / f"{checkpoint.name}-{kind}.gguf")
            if not files[kind][1].exists():
                write_gguf(checkpoint.gguf, files[kind][1], kind)
        if kind != "Q4_0":
            check_weights(files[kind][1], model)
            note(f"{files[kind][1].name}: the weights are evalkit's")
    return files


def compare(
    label: str, file: Path, dtype: str, arguments: argparse.Namespace, exact: dict[str, Any], about: dict[str, Any]
) -> Iterator[TaskRow | CommandRow]:
    """Measure one file beside one dtype: each task's scoring, then commands; `exact` collects float32 decisions."""
    loaded = load(locate(arguments.model, say=note), dtype=dtype, device="cpu", say=note)
    about["model"] = f"{loaded.name}, {loaded.parameters / 1e6:.0f} M parameters"
    if label == "Q4_0":
        set_weights(file, loaded.model)
    engine = Engine(loaded.model, auto_budget(loaded.model), note)
    members, left_out = choose_members(loaded, arguments)
    engine.check(sequences_of(one.encoded for one in next(iter(members.values()))[:2]))
    peer = best_peer(Peer(arguments.llama_perplexity, file, about["threads"], SETTINGS[0]), members)
    about[f"settings_{label}"] = peer.settings._asdict()
    for task, chosen in members.items():
        row = TaskRow(label, dtype, task, len(chosen), left_out[task])
        theirs, logprobs = measure(row, engine, peer, chosen, arguments.rounds)
        compare_decisions(row, chosen, theirs, logprobs, exact)
        note(f"{label} {dtype} {task}: {row.ours:.1f} s against {row.theirs:.1f} s, {row.theirs / row.ours:.2f}x")
        yield row
    del engine, loaded
    if arguments.commands:
        yield commands(CommandRow(label, dtype, sum(map(len, members.values()))), peer, members, arguments)


def choose_members(loaded: Any, arguments: argparse.Namespace) -> tuple[dict[str, list[Member]], dict[str, int]]:
    """Return task → its documents that both score, and → the number of the others."""
    members: dict[str, list[Member]] = {}
    left_out = {}
    for task, requests in choice_requests("plain", arguments.tasks, arguments.limit, arguments.data_dir).items():
        prompter = Prompter(requests.template, loaded.tokenizer, loaded.window)
        documents = encoded(requests, loaded.tokenizer, loaded.window)
        members[task] = [
            Member(document, _texts(prompter, question, task))
            for document, question in zip(documents, requests.questions, strict=True)
            if is_scorable([score.tokens for score in document.scores])
        ]
        left_out[task] = len(documents) - len(members[task])
    return members, left_out


def _texts(prompter: Prompter, question: Question, task: str) -> TextQuestion:
    """Return a question's texts, from the pieces that evalkit tokenises."""
    contexts, continuations = [], []
    for choice in range(len(question.contexts)):
        pieces = prompter.render(question, choice)
        contexts.append("".join(text for segment, text in pieces if segment != CONTINUATION))
        continuations.append("".join(text for segment, text in pieces if segment == CONTINUATION))
    try:
        return text_question(contexts, continuations)
    except ValueError as error:
        raise SystemExit(f"{task}: llama-perplexity's form cannot express {question.label}: {error}") from error


def best_peer(peer: Peer, members: dict[str, list[Member]]) -> Peer:
    """Return llama-perplexity with the settings that are fastest on the first task and hold every document."""
    longest = max(computed_tokens(_tokens(member)) for chosen in members.values() for member in chosen)
    tasks = tasks_of(next(iter(members.values()))[:24])
    fitting = [peer._replace(settings=one) for one in SETTINGS if one.tokens >= longest]
    times = {one: one.run(tasks)[1].scoring for one in fitting}
    best = min(times, key=lambda one: times[one])
    found = ", ".join(f"{one.settings.tokens}/{one.settings.micro_batch}: {times[one]:.1f} s" for one in fitting)
    note(f"llama-perplexity's best batch: {best.settings.tokens}/{best.settings.micro_batch} ({found})")
    return best


def tasks_of(members: list[Member], bit: int = 0) -> bytes:
    """Return documents in llama-perplexity's form, the choices labelled by a bit of their index."""
    return task_file([member.text for member in members], bit_labels(_choices(members), bit))


def _choices(members: list[Member]) -> list[int]:
    return [len(member.text.answers) for member in members]


def measure(
    row: TaskRow, engine: Engine, peer: Peer, members: list[Member], rounds: int
) -> tuple[NDArray[np.int64], list[list[NDArray[np.float32]]]]:
    """Time a task on both sides alternately; each round of llama-perplexity prints one bit of its decisions.

    Returns:
        [documents] llama-perplexity's decisions, and evalkit's log-probabilities as `score` returns them.
    """
    bits, needed = [], rounds_needed(_choices(members))
    for turn in range(max(rounds, needed)):
        seconds, logprobs = timed(lambda: score(engine, members))
        _, marked = peer.run(tasks_of(members, turn))
        row.ours, row.theirs, row.before = min(row.ours, seconds), min(row.theirs, marked.scoring), marked.before
        bits.append(marked.is_correct)
    row.has_same_tokens = marked.tokens == sum(computed_tokens(_tokens(member)) for member in members)
    return decisions_from_bits(bits[:needed]), logprobs


def compare_decisions(
    row: TaskRow,
    members: list[Member],
    theirs: NDArray[np.int64],
    logprobs: list[list[NDArray[np.float32]]],
    exact: dict[str, NDArray[np.int64]],
) -> None:
    """Count the documents by agreement, and by the reason of a difference."""
    pairs = list(zip(members, logprobs, strict=True))
    ours = np.array([np.argmax(continuation_means(*pair)) for pair in pairs])
    own = [own_token_means(_tokens(member), one) for member, one in pairs]
    by_own = np.array([np.argmax(one) for one in own])
    row.same = int((ours == theirs).sum())
    row.other_tokens = int(((ours != theirs) & (by_own == theirs)).sum())
    row.rounding = len(members) - row.same - row.other_tokens
    row.margin = float(max(one.max() - one[choice] for one, choice in zip(own, theirs, strict=True)))
    if row.dtype == "float32" and row.file != "Q4_0":
        exact[row.task] = by_own
    elif row.task in exact:
        row.as_float32 = (int((by_own == exact[row.task]).sum()), int((theirs == exact[row.task]).sum()))


def score(engine: Engine, members: list[Member]) -> list[list[NDArray[np.float32]]]:
    """Score a task by evalkit; return [documents][choices] log-probabilities [length]."""
    found: dict[int, list[NDArray[np.float32]]] = {}
    sequences = sequences_of(member.encoded for member in members)
    for batch in batches_of(sequences, engine.budget):
        for item, scores in engine.score(batch):
            found[item] = [one.logprobs for one in scores]
    return [found[index] for index in range(len(members))]


def continuation_means(member: Member, logprobs: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return [choices] the scores of `acc_token`: mean log-probability of the continuation's tokens."""
    pairs = zip(member.encoded.scores, logprobs, strict=True)
    return np.array([one[sequence.segments == CONTINUATION].astype(np.float64).mean() for sequence, one in pairs])


def _tokens(member: Member) -> list[NDArray[np.int32]]:
    return [score.tokens for score in member.encoded.scores]


def commands(
    row: CommandRow, peer: Peer, members: dict[str, list[Member]], arguments: argparse.Namespace
) -> CommandRow:
    """Measure whole commands alternately; the shortest of each side counts."""
    for _ in range(arguments.commands):
        with tempfile.TemporaryDirectory() as output:
            ours = run_watched(our_command(row.dtype, output, arguments))
        theirs = [peer.run(tasks_of(chosen))[0] for chosen in members.values()]
        row.ours, row.theirs = min(row.ours, ours.seconds), min(row.theirs, sum(one.seconds for one in theirs))
        row.our_peak, row.their_peak = max(row.our_peak, ours.peak), max(row.their_peak, *(one.peak for one in theirs))
    note(f"{row.file} {row.dtype} commands: {row.ours:.1f} s against {row.theirs:.1f} s, {row.theirs / row.ours:.2f}x")
    return row


def our_command(dtype: str, output: str, arguments: argparse.Namespace) -> list[str]:
    """Return the command of evalkit."""
    options = {
        "--model": arguments.model, "--dtype": dtype, "--template": "plain", "--rule": "acc_token", "--device": "cpu",
        "--tasks": ",".join(arguments.tasks), "--limit": arguments.limit, "--output": output,
    }  # fmt: skip
    if arguments.data_dir:
        options["--data-dir"] = arguments.data_dir
    return [sys.executable, "-m", "evalkit", "run", *(str(part) for option in options.items() for part in option)]


if __name__ == "__main__":
    main()
