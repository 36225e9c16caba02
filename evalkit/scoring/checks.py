"""Checks that depend on a model's weights: scores must not depend on later tokens; whose output head is used.

In: a loaded model, and the lengths that are scored. Out: an error, or the reason why evalkit's output head cannot
replace the model's own. A check that was passed is not repeated for the same files of weights;
passed checks of an architecture are kept in evalkit's cache. Any failure of a model's code becomes one line.
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
from evalkit.runs.batch_devices import hardware_of
from evalkit.scoring.architecture import rotary_lengths, window_of
from evalkit.scoring.sequences import SequenceSet
from evalkit.scoring.sharing import NOT_NUMBERS, SharingCheck

_KIND = "sharing"
_REMOTE = "transformers_modules"
"""Package of classes from a checkpoint's own code, which their names do not identify."""
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")
"""Keys of a config that do not affect the forward pass."""
_SOURCES = ("compatibility", "models", "scoring")
"""Packages of evalkit that a forward pass uses."""


class PassedChecks:
    """Passed checks of one architecture, in evalkit's cache. If it does not remember any, every check is run."""

    def __init__(self, model: Any, remembers: bool) -> None:
        self.remembers = remembers
        self._key = _key_of(model) if remembers and not type(model).__module__.startswith(_REMOTE) else None
        self._names = self._read()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def check(self, name: str, run: Callable[[], str]) -> str:
        """Return a check's failure, or an empty string where it passes or a check of that name has passed before."""
        if name in self._names:
            return ""
        failure = run()
        # A failure may come from one checkpoint's weights, so it is not kept for others
        if not failure and self.remembers:
            # Another process may have added checks in the meantime
            self._names |= self._read() | {name}
            if self._key is not None:
                write_cached(_KIND, self._key, sorted(self._names))
        return failure

    def _read(self) -> set[str]:
        content = None if self._key is None else read_cached(_KIND, self._key)
        return {part for part in content if isinstance(part, str)} if isinstance(content, list) else set()


def _key_of(model: Any) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    # Masks follow the devices of a model that is spread over several
    places = getattr(model, "hf_device_map", {})
    layout = [f"{name} {device}" for name, device in places.items()] if len(set(places.values())) > 1 else []
    identity = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": config,
        "attention": attention_of(model.config.get_text_config()),
        "dtype": str(model.dtype),
        "device": [model.device.type, hardware_of("+".join(map(str, computing_devices(model)))), layout],
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "code": source_digest(*_SOURCES),
    }
    return json.dumps(identity, sort_keys=True, default=str)


class TooManyTokens(Exception):
    """Memory ran out on several items, which can still be split."""


@contextmanager
def runs(tokens: int) -> Iterator[None]:
    """Convert any exception of the model's code on some tokens into a one-line error with its message."""
    try:
        yield
    except EvalkitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise ScoringError(f"out of memory on {tokens} tokens; free some memory, or use a smaller dtype") from error
        raise CheckpointError(f"the model does not run ({type(error).__name__}: {first_line(error)[:200]})") from error


def failure_of(check: Callable[[], str]) -> str:
    """Return a check's result, or its exception as a failure; `TooManyTokens` where memory runs out."""
    try:
        return check()
    except ScoringError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise TooManyTokens from None
        return f"it fails ({type(error).__name__}: {first_line(error)[:120]})"


@contextmanager
def memory_for(item: SequenceSet, tokens: int, at_most: bool = True) -> Iterator[None]:
    """Convert out-of-memory errors: name the document, or raise `TooManyTokens` if a batch can be split."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if not at_most:
            raise TooManyTokens from None
        refuse_to_split(f"{item.label}, {tokens} tokens")
        raise ScoringError(
            f"{item.label}: out of memory on {tokens} tokens; free some memory, or use a smaller dtype"
        ) from error


DAMAGED = "its weights may be damaged, or its dtype too narrow: try --dtype float32"
_TRIED = 64
"""Fewest tokens of the sequences on which a model is checked, over the whole vocabulary."""


class WeightChecks:
    """Checks of one model's weights, at lengths that grow with the sequences that are scored.

    They are kept under the digest of the files that the model was loaded from; None: no check is kept.
    """

    def __init__(self, model: Any, passed: PassedChecks, files: str | None) -> None:
        self._check = SharingCheck(model)
        self._passed = passed
        self._files = files
        self._window = window_of(model.config)
        self._rotary = min((length for length in rotary_lengths(model.config) if length), default=None)
        self._covered = 0
        self.stored = False
        """Whether an earlier run's checks of the same weights were used."""
        self.head_failure = ""
        """Why evalkit's output head cannot replace the model's own, or empty."""

    def run(self, longest: int) -> None:
        """Check the output head, then causality in sequences of up to a length; see `cover`."""
        length = self._covering(0)
        self._covered, self.stored = 0, True
        try:
            self.head_failure = self._unless_passed("head", lambda: failure_of(lambda: self._check.head(length)))
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
                self._unless_passed(f"lookahead of {compared} to {length}", partial(self._check_causal, length))
            except (CheckpointError, ScoringError):
                if length == longest:
                    raise
            else:
                self._covered = length
                return

    def _covering(self, longest: int) -> int:
        """Return the length of the check that covers a length; rounded up, so that a few checks cover all."""
        return max(2, longest, min(self._window, max(_TRIED, 1 << (longest - 1).bit_length())))

    def _unless_passed(self, name: str, run: Callable[[], str]) -> str:
        name = f"{name}, of weights {self._files}"
        self.stored &= name in self._passed
        return run() if self._files is None else self._passed.check(name, run)

    def _check_causal(self, length: int) -> str:
        """Raise a `CheckpointError` if scores in sequences of this length change with later tokens, or are NaN."""
        at_equal_length = self._rotary is not None and length > self._rotary
        with runs(length):
            lookahead = self._check.lookahead(length, not self.head_failure, at_equal_length)
        if lookahead == NOT_NUMBERS:
            raise CheckpointError(f"on random tokens the model gives no numbers: {lookahead}; {DAMAGED}")
        if lookahead:
            raise CheckpointError(
                f"the model's predictions change with the tokens that follow ({lookahead}, in sequences of {length} "
                "tokens): it is not a causal language model, so its log-likelihoods mean nothing"
            )
        return ""
