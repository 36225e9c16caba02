"""Records of documents: from task files on disk, and from the Hugging Face hub and its local cache of datasets.

A task file is `<task>.jsonl`, `.json` (one list) or `.parquet`; each of its records has a position ("line 3") for
messages, and a file that cannot be read raises a `DataError` that names it. Whether the hub is reachable is checked
once, within seconds, and reported once. Its cache is read as files, so that no read waits for the network.
"""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from evalkit.display import Say
from evalkit.errors import DataError, first_line, reading_as
from evalkit.inputs.reading import MOST_DOCUMENT_BYTES, parse_json, read_bytes

if TYPE_CHECKING:
    from evalkit.data.schema import HubSplit

Record = dict[str, Any]
Placed = Iterator[tuple[str, object]]
Result = TypeVar("Result")

_REACH_SECONDS = 3.0


def find(folder: Path, task: str) -> Path | None:
    """Return the file of a task in a folder, also one that cannot be read, so that no other source is used silently."""
    candidates = (folder / f"{task}{suffix}" for suffix in (".jsonl", ".json", ".parquet"))
    return next((path for path in candidates if os.path.lexists(path)), None)


def read(path: Path, task: str) -> Placed:
    """Yield the records of a task file with their positions; `task` is for messages."""
    with reading_as(f"{path} ({task})", "documents", DataError):
        if path.suffix == ".jsonl":
            yield from json_lines(read_bytes(path, MOST_DOCUMENT_BYTES), path, task)
            return
        if path.suffix == ".json":
            records = parse_json(read_bytes(path, MOST_DOCUMENT_BYTES))
            if not isinstance(records, list):
                raise ValueError(f"expected a list, found {type(records).__name__}")
        else:
            from pyarrow import parquet

            # Opened here since pyarrow's message for a missing permission gives no reason
            with path.open("rb") as file:
                records = parquet.read_table(file).to_pylist()
        for number, record in enumerate(records, start=1):
            yield f"record {number}", record


def json_lines(content: bytes, source: str | Path, task: str) -> Placed:
    """Yield the records of JSON lines with their positions; blank lines are skipped."""
    # Editors on Windows write a byte-order mark
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if stripped := line.strip():
            with reading_as(f"{source}, line {number} ({task})", "JSON", DataError):
                record = parse_json(stripped)
            yield f"line {number}", record


class Hub:
    """Connection state of the hub; shared within a process, so that it is checked once."""

    def __init__(self) -> None:
        self._is_checked = False
        self.failure: str | None = None
        """Why the hub is not used (any more); None as long as no request has failed."""

    def records(self, source: HubSplit, say: Say) -> list[Record] | None:
        """Load a split from the hub; None if the hub is unreachable or the download fails, which is said once."""

        def load() -> list[Record]:
            import datasets

            rows: list[Record] = datasets.load_dataset(source.path, source.config, split=source.split).to_list()
            return rows

        return self._tried(source.path, load, say)

    def file(self, repository: str, name: str, say: Say) -> Path | None:
        """Return a file of a dataset's repository from the hub's cache, downloaded if needed; None if that fails."""
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
                # The library's messages run to paragraphs
                self.failure = f"{repository}: {type(error).__name__}, {first_line(error)[:120]}"
        say(f"the Hugging Face hub cannot be used ({self.failure}); continuing without it")
        return None


def cached_split(source: HubSplit) -> list[Path]:
    """Return the Arrow files of a split's newest copy in the cache of the `datasets` library, by its own rules."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets").expanduser()
    owner, _, name = source.path.partition("/")
    configuration = cache / f"{owner}___{name}" / (source.config or "default")
    copies = sorted(configuration.glob("*/*/"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for copy in copies:
        whole = copy / f"{name}-{source.split}.arrow"
        shards = [whole] if whole.is_file() else sorted(copy.glob(f"{name}-{source.split}-*-of-*.arrow"))
        if shards:
            return shards
    return []


def cached_records(source: HubSplit) -> list[Record] | None:
    """Return the records of a split from the local cache; None if it is not cached or cannot be read."""
    import pyarrow as pa

    rows: list[Record] = []
    try:
        for path in cached_split(source):
            with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
                rows += reader.read_all().to_pylist()
    except (OSError, pa.ArrowException):
        return None
    return rows or None


def reach() -> str | None:
    """Return why the hub cannot be reached; None if it responds within seconds."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(variable, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    outcome: list[str | None] = []
    # A thread, because the system's name resolution has no timeout
    thread = threading.Thread(target=lambda: outcome.append(_ask(endpoint)), daemon=True)
    thread.start()
    thread.join(_REACH_SECONDS + 1)
    failure = outcome[0] if outcome else f"no answer within {_REACH_SECONDS:.0f} s"
    return None if failure is None else f"{endpoint}: {failure}"


def _ask(endpoint: str) -> str | None:
    """Send one HEAD request as the hub's library does; return why it failed, or None."""
    from huggingface_hub import get_session

    try:
        status = get_session().head(endpoint, timeout=_REACH_SECONDS).status_code
    except Exception as error:  # of the library's client, or of an invalid endpoint
        return first_line(error)[:120]
    # Rejected by a proxy, or a server error; any other status means reachable
    return f"HTTP {status}" if status in (403, 407) or status >= 500 else None
