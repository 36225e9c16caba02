"""Hugging Face hub and its local cache of datasets.

In: the split of a dataset. Out: its records, or None. Whether the hub is reachable is checked once, within seconds, and
reported once. The cache is read as files, so that no read waits for the network.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from evalkit.data.files import Record, read_arrow
from evalkit.data.schema import HubSplit
from evalkit.display import Say
from evalkit.errors import first_line

_REACH_SECONDS = 3.0
_SHOWN = 120  # the library's messages run to paragraphs
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = {"1", "ON", "YES", "TRUE"}

Result = TypeVar("Result")


class Hub:
    """Connection state of the hub; shared within a process, so that it is checked once."""

    def __init__(self) -> None:
        self._is_checked = False
        self.failure: str | None = None
        """Why the hub is not used (any more); None as long as no request has failed."""

    def records(self, source: HubSplit, say: Say) -> list[Record] | None:
        """Load a split from the hub; None where the hub is unreachable or the download fails, which is said once."""

        def load() -> list[Record]:
            import datasets

            rows: list[Record] = datasets.load_dataset(source.path, source.config, split=source.split).to_list()
            return rows

        return self._tried(source.path, load, say)

    def file(self, repository: str, name: str, say: Say) -> Path | None:
        """Return a file of a dataset's repository from the hub's cache, downloaded if needed; None where that fails."""
        import huggingface_hub

        cached = huggingface_hub.try_to_load_from_cache(repository, name, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)

        def download() -> Path:
            say(f"fetching {name} of {repository} from the Hugging Face hub")
            return Path(huggingface_hub.hf_hub_download(repository, name, repo_type="dataset"))

        return self._tried(repository, download, say)

    def _tried(self, repository: str, load: Callable[[], Result], say: Say) -> Result | None:
        # Not used after the first failure: another dataset would wait for the same one
        if self.failure is not None:
            return None
        if not self._is_checked:
            self._is_checked, self.failure = True, reach()
        if self.failure is None:
            try:
                return load()
            except Exception as error:  # any error of the library or the network; the caller has other sources
                self.failure = f"{repository}: {type(error).__name__}, {first_line(error)[:_SHOWN]}"
        say(f"the Hugging Face hub cannot be used ({self.failure}); continuing without it")
        return None


def cached_split(source: HubSplit) -> list[Path]:
    """Return the Arrow files of a split's newest copy in the cache of the `datasets` library, if any."""
    owner, _, name = source.path.partition("/")
    configuration = _datasets_cache() / f"{owner}___{name}" / (source.config or "default")
    copies = sorted(configuration.glob("*/*/"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for copy in copies:
        whole = copy / f"{name}-{source.split}.arrow"
        shards = [whole] if whole.is_file() else sorted(copy.glob(f"{name}-{source.split}-*-of-*.arrow"))
        if shards:
            return shards
    return []


def cached_records(source: HubSplit) -> list[Record] | None:
    """Return the records of a split from the local cache; None where it is not cached or cannot be read."""
    import pyarrow as pa

    try:
        return read_arrow(cached_split(source)) or None
    except (OSError, pa.ArrowException):
        return None


def reach() -> str | None:
    """Return why the hub cannot be reached; None if it responds within seconds."""
    for variable in _OFFLINE_VARIABLES:
        if os.environ.get(variable, "").upper() in _TRUE:
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    outcome: list[str | None] = []
    # A thread, because the system's name resolution has no timeout
    thread = threading.Thread(target=lambda: outcome.append(_ask(endpoint)), daemon=True)
    thread.start()
    thread.join(_REACH_SECONDS + 1)
    host = urlsplit(endpoint).hostname or endpoint
    failure = outcome[0] if outcome else f"no answer within {_REACH_SECONDS:.0f} s"
    return None if failure is None else f"{host}: {failure}"


def _ask(endpoint: str) -> str | None:
    """Send one HEAD request, through the proxies of the environment; return why it failed, or None."""
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(endpoint, method="HEAD"), timeout=_REACH_SECONDS):
            return None
    except HTTPError as error:
        with error:  # rejected by a proxy, or a server error; any other status means reachable
            return f"HTTP {error.code} {error.reason}" if error.code in (403, 407) or error.code >= 500 else None
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            return None  # the server is reachable; the hub's library has its own certificates
        return first_line(error.reason) if isinstance(error.reason, BaseException) else str(error.reason)
    except (OSError, ValueError) as error:
        return f"no answer within {_REACH_SECONDS:.0f} s" if isinstance(error, TimeoutError) else first_line(error)


def _datasets_cache() -> Path:
    """Return the cache folder of the `datasets` library, by its own rules, without importing it."""
    if own := os.environ.get("HF_DATASETS_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{base}/huggingface"
    return Path(home).expanduser() / "datasets"
