"""Which checks a model has passed, and what a failure of its code means.

In: a loaded model, and the lengths that are scored. Out: an error if scores depend on later tokens or are no numbers;
the reason why evalkit's output head cannot replace the model's own, or why prefixes cannot be shared. Passed checks are
kept in evalkit's cache: those of sharing for an architecture, those of weights for the files of the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

from evalkit.cache import read_cached, source_digest, write_cached
from evalkit.compatibility.transformers import attention_of
from evalkit.errors import CheckpointError, EvalkitError, ScoringError, first_line
from evalkit.models.memory import is_out_of_memory, refuse_to_split
from evalkit.models.parts import computing_devices
from evalkit.runs.traits import hardware_of
from evalkit.scoring.architecture import rotary_limit, window_of
from evalkit.scoring.row_checks import RowCheck
from evalkit.scoring.sharing import NOT_NUMBERS, BatchLengths, SharingCheck

_KIND = "sharing"
_REMOTE = "transformers_modules"
"""Package of classes from a checkpoint's own code, which their names do not identify."""
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")
"""Keys of a config that do not affect the forward pass."""
DAMAGED = "its weights may be damaged, or its dtype too narrow: try --dtype float32"
_TRIED = 64
"""Fewest tokens of the sequences on which a model is checked, over the whole vocabulary."""


class TooManyTokens(Exception):
    """Memory ran out on several items, which can still be split."""


@contextmanager
def runs(tokens: int) -> Iterator[None]:
    """Convert any exception of the model's code on some tokens into a one-line error."""
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ScoringError(f"out of memory on {tokens} tokens; free some memory, or use a smaller dtype") from error
        raise CheckpointError(f"the model does not run ({type(error).__name__}: {first_line(error)[:200]})") from error


@contextmanager
def memory_for(label: str, tokens: int, at_most: bool = True) -> Iterator[None]:
    """Convert out-of-memory errors: name the document, or raise `TooManyTokens` if a batch can be split."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if not at_most:
            raise TooManyTokens from None
        refuse_to_split(f"{label}, {tokens} tokens")
        raise ScoringError(f"{label}: out of memory on {tokens} tokens; free some, or use a smaller dtype") from error


def rounded_up(length: int, steps: int) -> int:
    """Round up to the next of so many steps between powers of two."""
    step = max(1, (1 << (length - 1).bit_length()) // (2 * steps))
    return -(-length // step) * step


class ModelChecks:
    """Checks of one model.

    `remembers`: whether passed checks are kept for models of the same class and config. `files`: digest of the files
    that the weights were loaded from; None: checks of the weights are not kept.
    """

    def __init__(self, model: Any, remembers: bool, files: str | None, say: Callable[[str], None]) -> None:
        self.head_failure = ""
        """Why evalkit's output head cannot replace the model's own, or empty."""
        self.stored = True
        """Whether an earlier run's checks of the same weights were used."""
        self._model = model
        self._remembers, self._files, self._say = remembers, files, say
        self._key = _key_of(model) if remembers and not type(model).__module__.startswith(_REMOTE) else None
        self._passed = self._read()
        self._rotary = rotary_limit(model.config)
        self._covered = 0
        self._covered_rows = {False: 0, True: 0}
        self._failures: dict[tuple[bool, int], str] = {}
        """Why rows of so many tokens cannot be computed together, or behind states; empty if they can."""

    def check_weights(self, longest: int) -> None:
        """Check the output head, then causality in sequences of up to a length; see `cover`."""
        length = self._covering(0)
        try:
            self.head_failure = self._of_weights("head", partial(SharingCheck(self._model).head, length))
        except TooManyTokens:
            self.head_failure = "out of memory in the check of its output head"
        self.cover(length)
        self.cover(longest)

    def cover(self, longest: int) -> None:
        """Raise an error if a score depends on later tokens in sequences of up to a length, which no check has covered.

        A window, or a selection of tokens, has no effect on sequences that are shorter than it.
        """
        if longest <= self._covered:
            return
        compared = "log-probabilities" if self.head_failure else "states"
        # Memory may hold the exact length only, or a window take effect between the two
        for length in dict.fromkeys((self._covering(longest), longest)):
            try:
                self._of_weights(f"lookahead of {compared} to {length}", partial(self._check_causal, length))
            except (CheckpointError, ScoringError):
                if length == longest:
                    raise
            else:
                self._covered = length
                return

    def sharing(self, kernel: str, lengths: BatchLengths, is_first: bool) -> str:
        """Return why a kernel cannot share prefixes, or ""; the first comparison that is remembered is announced."""
        name = f"{kernel} row {lengths.row} longest {lengths.longest}"
        if is_first and self._remembers and name not in self._passed:
            self._say("comparing shared prefixes with the model's own forward pass, once for this architecture")
        return self._once(name, partial(SharingCheck(self._model).sharing, kernel, lengths, is_first), self._remembers)

    def rows(self, longest: int, with_states: bool, tokens: int = 0) -> str:
        """Return why rows of up to a length cannot be computed together, or behind states; empty if they can.

        `tokens` are those of the largest passes.
        """
        if longest <= self._covered_rows[with_states]:
            return ""
        # Rounded up, so that a few checks cover all lengths; memory may hold the smaller one only
        most = self._rotary or max(longest, window_of(self._model.config))
        for steps in (1, 4):
            length = min(self._covering(longest, steps), most)
            if (with_states, length) not in self._failures:
                self._failures[with_states, length] = self._of_rows(length, with_states, tokens)
            if not self._failures[with_states, length]:
                self._covered_rows[with_states] = length
                return ""
        return self._failures[with_states, length]

    def _of_rows(self, length: int, with_states: bool, tokens: int) -> str:
        has_own_head = bool(self.head_failure)
        name = f"rows of {length}{', with states' if with_states else ''}{', own head' if has_own_head else ''}"
        # Passes as large as in scoring are needed once, at any length
        tokens = 0 if with_states or self._covered_rows[False] else tokens
        check = RowCheck(self._model, has_own_head)
        while True:
            try:
                run = partial(check.rows, length, with_states, tokens)
                return self._once(f"{name}, in passes of {tokens}", run, self._remembers)
            except TooManyTokens:
                if not tokens:
                    return f"out of memory in the check of rows of {length} tokens"
                refuse_to_split(f"the check of passes of {tokens} tokens")
                tokens = tokens // 2 if tokens > length else 0

    def _covering(self, longest: int, steps: int = 1) -> int:
        # Rounded up, so that a few checks cover all lengths
        return max(2, longest, min(window_of(self._model.config), max(_TRIED, rounded_up(longest, steps))))

    def _of_weights(self, name: str, run: Callable[[], str]) -> str:
        name = f"{name}, of weights {self._files}"
        self.stored &= name in self._passed
        return self._once(name, run, self._remembers and self._files is not None)

    def _once(self, name: str, run: Callable[[], str], is_kept: bool) -> str:
        """Return a check's failure, also of the model's code; empty if it passes, or has passed before and was kept.

        Raises `TooManyTokens` where memory runs out.
        """
        if name in self._passed:
            return ""
        try:
            failure = run()
        except EvalkitError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise TooManyTokens from None
            return f"it fails ({type(error).__name__}: {first_line(error)[:120]})"
        # A failure may come from one checkpoint's weights, so it is not kept for others
        if not failure and is_kept:
            # Another process may have added checks in the meantime
            self._passed |= self._read() | {name}
            if self._key is not None:
                write_cached(_KIND, self._key, sorted(self._passed))
        return failure

    def _read(self) -> set[str]:
        return set() if self._key is None else set(read_cached(_KIND, self._key) or ())

    def _check_causal(self, length: int) -> str:
        """Raise a `CheckpointError` if scores in sequences of this length change with later tokens, or are NaN."""
        at_equal_length = self._rotary is not None and length > self._rotary
        with runs(length):
            check = SharingCheck(self._model)
            lookahead = check.lookahead(length, not self.head_failure, at_equal_length, is_first=not self._covered)
        if lookahead == NOT_NUMBERS:
            raise CheckpointError(f"on random tokens the model gives no numbers: {lookahead}; {DAMAGED}")
        if lookahead:
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow ({lookahead}, in sequences of {length} "
                "tokens): it is not a causal language model"
            )
        return ""


def _key_of(model: Any) -> str:
    # Masks follow the devices of a model that is spread over several
    places = getattr(model, "hf_device_map", {})
    layout = [f"{name} {device}" for name, device in places.items()] if len(set(places.values())) > 1 else []
    identity = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE},
        "attention": attention_of(model.config.get_text_config()),
        "rounds": hasattr(model, "rounds_activations"),
        "dtype": str(model.dtype),
        "device": [model.device.type, hardware_of("+".join(map(str, computing_devices(model)))), layout],
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "code": source_digest("compatibility", "models", "scoring"),
    }
    return json.dumps(identity, sort_keys=True, default=str)
