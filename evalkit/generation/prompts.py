"""Planning of generation, without torch: prompts, stopping criteria, and batches of prompts that fit into memory.

In: token ids and a generator. Out: what can be pickled and sent to it, and the estimated time of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalkit.errors import CheckpointError, DataError, ScoringError, TemplateError, reading_as

if TYPE_CHECKING:
    from evalkit.generation.generator import Generator

Ints = NDArray[np.int64]

CHUNK = 512
"""Prompt tokens in one forward pass; prompts share whole chunks."""
_GPU_SHARE, _CPU_SHARE = 0.5, 0.25
"""Share of the memory beside the weights for keys and values; other programs use a CPU's memory too."""
_GPU_ROWS, _CPU_ROWS = 256, 16
_STEPS = 4


@dataclass(frozen=True)
class Stops:
    ends: frozenset[int] = frozenset()
    """Token ids that end the text."""
    barred_first: frozenset[int] = frozenset()
    """Token ids that are not allowed as the first generated token."""
    until: tuple[str, ...] = ()
    """Stop strings. Generation ends when the last tokens, special tokens included, contain one. As many tokens are
    searched as the stop string has, plus two, since a model may write it in other tokens than the tokenizer."""
    pattern: str = ""
    """A regular expression. Generation ends when it matches the text so far, without special tokens."""
    unsearched_tail: int = 0
    """Number of last tokens in which the pattern is not searched."""


@dataclass(frozen=True)
class Decoding:
    """Decoding settings as transformers' `generate` defines them."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Generation config settings, such as temperature or top_p; the model's generation config is the default."""
    seed: int = 0
    """Seed of this prompt's random numbers, which no other prompt uses."""


@dataclass(frozen=True)
class Prompt:
    index: int
    """An index that the caller chooses."""
    tokens: Ints
    """[length] token ids, at least one."""
    max_new_tokens: int
    stops: Stops = Stops()
    decoding: Decoding | None = None
    """None: the argmax of the logits, whatever the model's generation config says."""
    answers: tuple[Ints, ...] = ()
    """Texts whose log-likelihood is computed from the prompt's keys and values, whatever is generated: each the tokens
    that follow the first `shared` tokens of the prompt."""
    shared: int = 0
    """At least one; fewer than the prompt's where the tokenizer joins its end and the beginning of an answer."""
    label: str = "a prompt"
    """Its document, in messages."""

    @property
    def columns(self) -> int:
        """Largest number of tokens whose keys and values are stored."""
        return max(len(self.tokens) + self.max_new_tokens, self.shared + max(map(len, self.answers), default=0))

    def with_answers(self, sequences: Sequence[Sequence[int]], context: int) -> Prompt:
        """Return the prompt with answers whose log-likelihood is computed too.

        `sequences` are the token ids of prompt and answer. Raises `ScoringError` if an answer, or the tokens that may
        be generated, do not fit into `context` tokens.
        """
        shared = len(self.tokens)
        for sequence in sequences:
            both = min(shared, len(sequence) - 1)
            differ = np.flatnonzero(self.tokens[:both] != np.asarray(sequence[:both]))
            shared = int(differ[0]) if len(differ) else both
        longest = max(len(self.tokens) + self.max_new_tokens, *map(len, sequences))
        if shared < 1:
            raise ScoringError("the tokenizer changes the prompt's first token with the answer that follows it")
        if longest > context:
            raise ScoringError(
                f"prompt and answer have {longest:,} tokens, and the context window has {context:,}; give a longer "
                "--context, or shorter --lengths"
            )
        answers = tuple(np.asarray(sequence[shared:], np.int64) for sequence in sequences)
        return replace(self, answers=answers, shared=shared)


def shared_tokens(first: Ints, second: Ints, chunk: int) -> int:
    """Return the length of the common prefix of two prompts, in whole chunks; always less than either prompt."""
    length = min(len(first), len(second)) - 1
    differ = np.flatnonzero(first[:length] != second[:length])
    same = int(differ[0]) if len(differ) else length
    return same - same % chunk


def as_message(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text as one user message, with the generation prompt."""
    if not tokenizer.chat_template:
        raise TemplateError("the tokenizer has no chat template; leave out --chat")
    turns = [{"role": "user", "content": text}]
    with reading_as("the tokenizer's chat template", "a template of one user turn", TemplateError):
        encoding = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(encoding["input_ids"])


def prompt_tokens(tokenizer: Any, text: str, chat: bool = False) -> list[int]:
    """Return the token ids of a prompt, with special tokens; if `chat`, as one user message."""
    if chat:
        return as_message(tokenizer, text)
    ids: list[int] = tokenizer(text, verbose=False).input_ids  # no warning about long texts
    return ids


def fit_prompt(
    tokenizer: Any, text: str, max_prompt_tokens: int, most: int, *, chat: bool, label: str
) -> tuple[list[int], int | None]:
    """Return a prompt's token ids, and their number before truncation in the middle if it is too long.

    As in LongBench's official code, prompts are tokenised with special tokens. Of one longer than `max_prompt_tokens`,
    the first and the last max_prompt_tokens / 2 tokens are decoded without special tokens, and their joined texts are
    tokenised again, as one user message if `chat`. The result may have more tokens than before, and a chat template has
    tokens too; where it exceeds `most`, all that the context window allows, the text is truncated further, which the
    official code does not do.
    """
    ids = prompt_tokens(tokenizer, text)
    before, kept, limit = len(ids), text, max_prompt_tokens
    truncated = before > max_prompt_tokens
    while True:
        if truncated:
            half = limit // 2
            parts = (ids[:half], ids[len(ids) - half :])
            kept = "".join(tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        tokens = prompt_tokens(tokenizer, kept, chat) if chat or truncated else ids
        if len(tokens) <= most:
            return tokens, before if truncated else None
        truncated = True
        limit = min(limit, before) - max(2, len(tokens) - most)
        if limit < 2:
            raise DataError(f"{label}: no room for its prompt in {most} tokens; raise --context")


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end a text: those of the generation config, else the tokenizer's EOS token.

    `generate` reads the generation config too, but continues to the maximum length if it has none.
    """
    stored = getattr(model.generation_config, "eos_token_id", None)
    if stored is None:
        stored = tokenizer.eos_token_id
    ids = stored if isinstance(stored, list) else [] if stored is None else [stored]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(f"generation_config.json: eos_token_id is {stored!r:.60}; expected a token id, or a list")
    return frozenset(ids)


@dataclass(frozen=True)
class Capacity:
    tokens: int
    """Most tokens of keys and values in a batch of several prompts."""
    most_rows: int
    chunk: int
    token_bytes: int
    """Bytes of one token's keys and values, in all layers; 0 if the model keeps none."""
    row_bytes: int = 0
    """Bytes of a prompt's states, which do not grow with its tokens."""

    def batches(self, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
        """Group prompts into batches: next to each other those that share a chunk; padding counts as tokens."""
        groups: list[list[Prompt]] = []
        for prompt in sorted(prompts, key=lambda prompt: prompt.tokens.tolist()):
            if groups and shared_tokens(groups[-1][-1].tokens, prompt.tokens, self.chunk):
                groups[-1].append(prompt)
            else:
                groups.append([prompt])
        # Longest first: out of memory occurs at once, and the remaining time is not underestimated
        groups.sort(key=lambda group: -max(len(prompt.tokens) for prompt in group))
        batches: list[list[Prompt]] = []
        for prompt in chain.from_iterable(groups):
            members = [*batches[-1], prompt] if batches else [prompt]
            longest, new = (
                max(len(row.tokens) for row in members),
                max(row.columns - len(row.tokens) for row in members),
            )
            if batches and len(members) <= self.most_rows and (longest + new) * len(members) <= self.tokens:
                batches[-1] = members
            else:
                batches.append([prompt])
        return batches


def capacity_of(generator: Generator, budget: int | None, context: int, most_texts: int | None = None) -> Capacity:
    """Return the memory limits of a batch for a context window in tokens.

    The budget is the most tokens of a batch; None: as many as fit into a share of the memory, whoever else uses it.
    `most_texts` is the most texts of a batch; None: as many as fit.
    """
    is_gpu = generator.device.type == "cuda"
    share = _GPU_SHARE if is_gpu else _CPU_SHARE
    most_rows = 1 if generator.without_cache else _GPU_ROWS if is_gpu else _CPU_ROWS
    sizes = generator.sizes
    # Each layer's keys, values and states are on its device
    rooms = {device: int(generator.memory[device] * share) for device in {*sizes.token_bytes, *sizes.row_bytes}}
    for device, size in sizes.row_bytes.items():
        # The other half is for keys and values
        most_rows = max(1, min(most_rows, rooms[device] // 2 // size))
    tokens = [
        (rooms[device] - most_rows * sizes.row_bytes.get(device, 0)) // size
        for device, size in sizes.token_bytes.items()
    ]
    # Without keys and values, only the number of prompts is limited
    most_tokens = budget or (max(1, min(tokens)) if tokens else context * most_rows)
    most_rows = min(most_rows, most_texts or most_rows)
    return Capacity(most_tokens, most_rows, generator.chunk, generator.token_bytes, generator.row_bytes)


@dataclass(frozen=True)
class Speed:
    """Measured speed of generation."""

    linear: float
    """Floating-point operations per prompt token that do not depend on its position: two per weight."""
    square: float
    """Attention operations per pair of tokens: four per channel."""
    weights: float
    """Bytes of weights read in a decoding step, once for all rows; keys, values and states are added per row."""
    operations_a_second: float
    bytes_a_second: float

    def seconds(self, prompt: Prompt, capacity: Capacity) -> float:
        """Return the seconds of a prompt and of its largest number of generated tokens, in the largest batch."""
        rows = max(1, min(capacity.most_rows, capacity.tokens // prompt.columns))
        read = float(self.weights / rows + prompt.columns * capacity.token_bytes + capacity.row_bytes)
        operations = _operations(self.linear, self.square, len(prompt.tokens))
        return operations / self.operations_a_second + prompt.max_new_tokens * read / self.bytes_a_second


def estimate_line(prompts: Sequence[Prompt], capacity: Capacity, speed: Speed) -> str:
    """Return one line: the numbers of tokens, the longest time, and the memory."""
    tokens = sum(len(prompt.tokens) for prompt in prompts)
    new = sum(prompt.max_new_tokens for prompt in prompts)
    most = max(prompt.columns for prompt in prompts)
    kept = max(most, min(capacity.tokens, most * capacity.most_rows)) * capacity.token_bytes
    stored = (kept + capacity.most_rows * capacity.row_bytes) / 2**30
    seconds = sum(speed.seconds(prompt, capacity) for prompt in prompts)
    return (
        f"{tokens:,} prompt tokens and up to {new:,} generated ones: about "
        f"{max(1, round(seconds / 60))} min, and up to {stored:.1f} GiB beside the model"
    )


def measured_speed(model: Any, generator: Generator, context: int) -> Speed:
    """Measure a prompt chunk and a few decoding steps; `context`: the context window in tokens."""
    embedding = model.get_input_embeddings().weight
    config = model.config.get_text_config()
    total = sum(parameter.numel() for parameter in model.parameters())
    untied = model.get_output_embeddings().weight is not embedding
    linear = 2 * (total - embedding.numel())
    layers = generator.sizes.attention_layers if generator.sizes.row_bytes else config.num_hidden_layers
    square = 4 * layers * config.hidden_size
    weights = (total - untied * embedding.numel()) * embedding.element_size()
    length = max(1, min(CHUNK, context - 1 - _STEPS))
    prompt = Prompt(-1, np.arange(length, dtype=np.int64) % embedding.shape[0], 1 + _STEPS)
    generator.generate([prompt])  # the first run is slower
    [measured] = generator.generate([prompt])
    operations_a_second = _operations(linear, square, length) / max(measured.prompt_seconds, 1e-9)
    step = max(measured.seconds - measured.prompt_seconds, 1e-9) / _STEPS
    bytes_a_second = (weights + length * generator.token_bytes + generator.row_bytes) / step
    return Speed(linear, square, weights, operations_a_second, bytes_a_second)


def _operations(linear: float, square: float, tokens: int) -> float:
    return float(linear * tokens + square * tokens**2 / 2)
