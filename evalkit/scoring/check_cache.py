"""Cache of start-up checks that an architecture has passed, in evalkit's cache folder.

In: a loaded model. Out: results of named checks; a check that was passed is not repeated for the same class, config,
libraries, device and code of evalkit. Best effort: a cache that cannot be read or written only costs time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from evalkit.compatibility.transformers import attention_of
from evalkit.models.placement import computing_devices
from evalkit.resources import read_cached, source_digest, write_cached
from evalkit.runs.batch_devices import hardware_of

_KIND = "sharing"
_REMOTE = "transformers_modules"
"""Package of classes from a checkpoint's own code, which their names do not identify."""
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")
"""Keys of a config that do not affect the forward pass."""
_SOURCES = ("compatibility", "models", "scoring")
"""Packages of evalkit that a forward pass uses."""


class CheckCache:
    """Passed checks of one architecture.

    Args:
        model: the loaded model.
    """

    def __init__(self, model: Any) -> None:
        self._key = None if type(model).__module__.startswith(_REMOTE) else _key_of(model)
        self._passed: frozenset[str] = _read(self._key) if self._key else frozenset()

    def has_passed(self, name: str) -> bool:
        """Return whether a check has been passed before."""
        return name in self._passed

    def check(self, name: str, run: Callable[[], str]) -> str:
        """Return a check's failure, or an empty string where it passes or has passed before.

        Args:
            name: names what is compared, and at which lengths.
            run: runs the check and returns its failure.
        """
        if name in self._passed:
            return ""
        failure = run()
        # A failure may come from one checkpoint's weights, so it is not cached for others
        if not failure:
            self._passed |= {name}
            self._save()
        return failure

    def _save(self) -> None:
        if self._key is None:
            return
        # Another process may have added checks in the meantime
        self._passed |= _read(self._key)
        write_cached(_KIND, self._key, sorted(self._passed))


def _read(key: str) -> frozenset[str]:
    content = read_cached(_KIND, key)
    return frozenset(part for part in content if isinstance(part, str)) if isinstance(content, list) else frozenset()


def _key_of(model: Any) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    identity = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": config,
        "attention": attention_of(model.config.get_text_config()),
        "dtype": str(model.dtype),
        "device": [model.device.type, hardware_of("+".join(map(str, computing_devices(model)))), _layout(model)],
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "code": source_digest(*_SOURCES),
    }
    return json.dumps(identity, sort_keys=True, default=str)


def _layout(model: Any) -> list[str]:
    """Return the device of each part of a model that is spread over devices, which its masks must follow; else none."""
    places = getattr(model, "hf_device_map", {})
    return [f"{name} {device}" for name, device in places.items()] if len(set(places.values())) > 1 else []
