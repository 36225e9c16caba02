"""What the start-up check has found to be right of an architecture, kept in evalkit's cache folder.

In: a loaded model. Out: answers to the check's questions; one that was passed is not asked again for the same class,
config, libraries, device and code of evalkit. Best effort: a cache that cannot be read or written only costs time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalkit.compatibility.transformers import attention_of
from evalkit.resources import cache_dir, read_cached, write_cached
from evalkit.runs.batch_devices import hardware_of

_REMOTE = "transformers_modules"
"""Package of classes that came with a checkpoint, whose name does not tell which code it was."""
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")
"""Keys of a config that bear on no forward pass."""
_SOURCES = ("compatibility", "models", "scoring")
"""evalkit's own folders that a forward pass goes through."""


class Verdicts:
    """Answers about one architecture.

    Args:
        model: the loaded model.
    """

    def __init__(self, model: Any) -> None:
        self._file = None if type(model).__module__.startswith(_REMOTE) else _file_of(model)
        self._passed: frozenset[str] = _read(self._file) if self._file else frozenset()

    def knows(self, question: str) -> bool:
        """Whether nothing is left to find out."""
        return question in self._passed

    def ask(self, question: str, answer: Callable[[], str]) -> str:
        """Return what is wrong, known or found now; nothing where all is well.

        Args:
            question: names what is compared, and at which lengths.
            answer: finds it out.
        """
        if question in self._passed:
            return ""
        found = answer()
        # Trouble may lie in one checkpoint's weights, which says nothing of the next
        if not found:
            self._passed |= {question}
            self._save()
        return found

    def _save(self) -> None:
        if self._file is None:
            return
        # Another process may have found out more meanwhile
        self._passed |= _read(self._file)
        write_cached(self._file, sorted(self._passed))


def _read(file: Path) -> frozenset[str]:
    content = read_cached(file)
    return frozenset(part for part in content if isinstance(part, str)) if isinstance(content, list) else frozenset()


def _file_of(model: Any) -> Path:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    identity = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": config,
        "attention": attention_of(model.config.get_text_config()),
        "dtype": str(model.dtype),
        "device": [model.device.type, hardware_of(str(model.device))],
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "code": _code_digest(),
    }
    text = json.dumps(identity, sort_keys=True, default=str)
    return cache_dir() / "sharing" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def _code_digest() -> str:
    """Of evalkit's own code, so that what an earlier version found says nothing of a later one."""
    package = Path(__file__).resolve().parents[1]
    files = sorted(path for folder in _SOURCES for path in (package / folder).rglob("*.py"))
    found = hashlib.sha256()
    for path in files:
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
