"""Transcripts of commands: run each command of a transcript again and return the new text.

A transcript is a text file of blocks. A block is a command and what it did:

    $ evalkit rescore runs/choices/* --rule ac
    [stderr names "ac" acc]
    [exit 2]
    its standard output
    [wrote PATH]
    the file's content as text

In: transcripts, of which only the lines `$ evalkit …` and `[stderr names …]` are read. Out: transcripts. Commands run
in one process, in order of the transcripts' names, in a folder with tiny checkpoints, documents and a copy of
results/samples, so a later command can read an earlier one's runs. Patterns (`runs/plain/*`) are expanded as in a
shell. Standard error, whose lines report times, is read only for the words that the second line names.

What depends on the day, the machine or installed versions is masked. Ids of the runs made here become r01, r02, … in
the order of the runs, and digests d1, d2, … in the order of a block, so that equal ones remain equal.

    python -m tests.transcripts OUTPUT TRANSCRIPT…
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import html
import inspect
import io
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

import evalkit
from evalkit.cli import main  # the only import of a module of the package here
from tests.benchmarks.lm_eval.made import made_tasks
from tests.documents import made_up
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^\$ evalkit\b ?(.*)$", re.MULTILINE)
NAMES = re.compile(r"^\[stderr names (.*)\]$", re.MULTILINE)
RUN_FOLDER = re.compile(r"-([0-9a-f]{12})$")
TEXTS = {".csv", ".tex", ".md", ".json", ".jsonl", ".yaml", ".txt"}


class Block(NamedTuple):
    """A command with its expected words in standard error, and its text."""

    command: str
    names: str | None
    text: str


def blocks(transcript: str) -> list[Block]:
    """Return the blocks of a transcript."""
    starts = [match.start() for match in COMMAND.finditer(transcript)]
    texts = [transcript[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    found = [(COMMAND.match(text), NAMES.search(text), text) for text in texts]
    return [Block(command[1], names and names[1], text) for command, names, text in found if command]


def made_inputs() -> None:
    """Write checkpoints, documents, texts, layouts and studies into the working folder."""
    for name, seed in (("first", 0), ("second", 1)):
        tiny_checkpoint(Path(name), seed=seed, window=1024)
    for step in (20, 100):
        tiny_checkpoint(Path("train") / f"checkpoint-{step}", seed=step, window=1024)
    made_up(Path("documents"), count=6)
    made_tasks(Path("tasks"), count=3)
    text = "\n".join(TRAINING_TEXT)
    Path("text.txt").write_text(text, encoding="utf-8")
    _write_lines(Path("lines.jsonl"), [{"text": text[start : start + 300]} for start in range(0, 600, 100)])
    for task, answer in (("qasper", "the river"), ("trec", "Person"), ("lcc", "bridge")):
        row = {"context": text, "answers": [answer], "length": 5, "dataset": task, "language": "en"}
        row["all_classes"] = ["Person", "Place"] if task == "trec" else None
        rows = [{"input": f"Question: Who {n}?\nType:", "_id": f"{task}-{n}", **row} for n in range(3)]
        _write_lines(Path("rows") / f"{task}.jsonl", rows)
        answered = {"pred": f"{answer}, or not", "answers": [answer], "all_classes": row["all_classes"], "length": 5}
        _write_lines(Path("predictions") / f"{task}.jsonl", [answered, {**answered, "pred": "none"}])
    shutil.copytree(ROOT / "results" / "samples", Path("results") / "samples")
    shutil.copy(ROOT / "examples" / "replication" / "layout.yaml", "replication.yaml")
    column = {"items": {"piqa": None, "boolq": "Bool & Q", "Average": "Avg."}}
    layout = {"caption": "Mine", "suite": "zeroshot8", "rows": [{"items": {"a": "A_1", "b": None}}]}
    needle = {"suite": "needle", "lengths": [300], "depths": [0, 50], "repeats": 1}
    choices = {"data_dir": "documents", "allow_unofficial_data": True, "tasks": ["piqa"], "token_budget": 128}
    trained = {"A": "first", "B": ["train/checkpoint-20", "train/checkpoint-100"]}
    study = {"output": "runs/study", "checkpoints": trained, "benchmarks": {"zeroshot8": choices, "needle": needle}}
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
             "initializer_range": 0.2, "attention_variant": "integral", "variant_layers": "all",
             "num_signals": 2}  # fmt: skip
    for name, content in {
        "layout": {**layout, "columns": [column], "marks": {"bold": "highest in table"}},
        "rows": {"rows": {"a": "first", "b": "second"}},
        "elsewhere": {"rows": {"a": "first", "b": "nowhere"}},
        "published": {"rows": {"vanilla_125m": "results/samples/demo-zeroshot8-plain-bfloat16-6be4ef0291d0"}},
        "study": study,
        "settings": {"limit": 1, "tasks": ["piqa"], "format": "csv", "rule": "acc"},
        "broken": {"limt": 3},
        "small": {"base": "llama_125m", "models": {"mine": small}},
    }.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


class Session:
    """Commands in the working folder, one after another."""

    def __init__(self) -> None:
        self.files = self._state()
        self.ids: dict[str, str] = {}

    def again(self, block: Block) -> str:
        """Run a block's command; return the block's new text."""
        words = [word for part in shlex.split(block.command) for word in _expanded(part)]
        sys.argv = ["evalkit", *words]  # a run's manifest has it
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(words)
                code: Any = None
            except SystemExit as ended:
                code = ended.code
        before, self.files = self.files, self._state()
        written = [path for path, state in self.files.items() if before.get(path) != state]
        self._name([path.parent for path in written if path.name == "manifest.json"])
        parts, said = [f"$ evalkit {block.command}".rstrip() + "\n"], err.getvalue()
        if block.names is not None:
            absent = [word for word in shlex.split(block.names) if word not in said]
            parts.append(f"[stderr names {block.names}]\n")
            parts += [f"[but not {absent}]\n{said}"] if absent else []
        parts.append(f"[exit {code or 0}]\n")
        if "Traceback" in said or (block.names is None and re.search("^evalkit: ", said, re.MULTILINE)):
            parts.append(f"[stderr]\n{said}")
        parts += [_printed(out.getvalue().rstrip("\n"), words) + "\n"] if out.getvalue().strip() else []
        written.sort(key=lambda path: self._masked(str(path)))
        parts += [f"[wrote {path}]\n{content(path)}" for path in written]
        return self._masked("".join(parts)) + "\n"

    def _name(self, folders: list[Path]) -> None:
        """Name the runs of new folders in the order in which they were made."""
        for folder in sorted(folders, key=lambda folder: (folder / "manifest.json").stat().st_mtime_ns):
            if match := RUN_FOLDER.search(folder.name):
                self.ids.setdefault(match[1], f"r{len(self.ids) + 1:02d}")

    @staticmethod
    def _state() -> dict[Path, tuple[int, int]]:
        """Return the state of each file, except locks and what the home folder has."""
        found = [path for path in sorted(Path().rglob("*")) if path.is_file() and path.parts[0] != "home"]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in found if path.name[0] != "."}

    def _masked(self, text: str) -> str:
        digests: dict[str, str] = {}
        text = DIGEST.sub(lambda found: digests.setdefault(found[0], f"d{len(digests) + 1}"), text)
        for run, name in self.ids.items():
            text = text.replace(run, name.ljust(12, "x")).replace(run[:7], name.ljust(7, "x"))
        for folder, name in ((Path.cwd(), "{work}"), (ROOT, "{evalkit}")):
            text = text.replace(str(folder), name)
        for pattern, masked in MASKS:
            text = pattern.sub(masked, text)
        return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


DIGEST = re.compile(r"(?<![\w.])(?=\d*[a-f])[0-9a-f]{16,64}\b")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters at which lines could end."""
DATE = r"(?<!\d)20\d\d-\d\d-\d\d"
TIME = r"[T ]\d\d[:-]\d\d(?:[:-]\d\d)?(?:\.\d+)?(?:\+00:00|Z| UTC)?"
UNITS = "s|min|h|KiB|MiB|GiB|kB|MB|GB"
MASKS = (
    (re.compile(f"{DATE}(?:{TIME})?"), "YYYY-MM-DD"),
    (re.compile(r"\b1[5-9]\d{8}\.\d+\b"), "SECONDS"),  # since 1970
    (re.compile(r"\b\d+\.\d+\.\d+(?:\.dev\d+)?(?:\+\w+)?\b"), "X.Y.Z"),
    (re.compile(rf"(?<![\w.])[\d.,]+ (?:of [\d.,]+ )?(?:{UNITS})\b"), "#"),
    (re.compile(r"(?<![\d:])\d+:\d\d\b(?!:)"), "#:##"),
    (re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "UUID"),
    (re.compile(r"\bcpu (?:x86_64|aarch64|arm64|AMD64)\b"), "cpu #"),
)
MASKED_KEYS = {"bytes_a_second", "command", "date", "evaluation_time", "hardware", "host", "kept_tokens",
               "most_rows", "operations_a_second", "seconds", "seconds_left", "token_budget", "tokens_a_second",
               "total_evaluation_time_seconds"}  # fmt: skip
"""Of JSON: times and facts of the machine."""


def _expanded(word: str) -> list[str]:
    """Return the paths that a pattern matches, or the word if it is none."""
    return (sorted(map(str, Path().glob(word))) if "*" in word else []) or [word]


def _printed(text: str, words: list[str]) -> str:
    """Return what a command printed, without times in JSON and in a last column; of `doctor` the names alone."""
    if words[:1] == ["doctor"]:
        return re.sub(r"^(!?,[^,]*),.*", r"\1,#", text, flags=re.MULTILINE)
    with contextlib.suppress(ValueError):
        data = json.loads(text)
        return text if text != _json(data, 2) else _json(_without_times(data), 2)
    lines: list[str] = []
    width = 0  # of a table whose last column has times
    for line in text.splitlines():
        width = len(line) if line.endswith(("seconds", "seconds |")) else width if line else 0
        timed = line.startswith("seconds ") or (width and line.endswith("|")) or len(line) == width > 0
        lines.append(re.sub(r" +[\d.]+( \|)?$", r" #\1", line) if timed else line)
    return "\n".join(lines)


def _json(data: Any, indent: int) -> str:
    return json.dumps(data, indent=indent, ensure_ascii=False)


def _without_times(data: Any) -> Any:
    if isinstance(data, list):
        return [_without_times(value) for value in data]
    if isinstance(data, dict):
        # Of a cache's capacity in the machine's memory
        masked = MASKED_KEYS | {"tokens"} if "most_rows" in data else MASKED_KEYS
        return {key: "#" if key in masked else _without_times(value) for key, value in data.items()}
    return data


def content(path: Path) -> str:
    """Return a file's content as text; nothing of journals, figures and other binary files."""
    if path.name in ("journal.jsonl", "tokenizer.json"):
        text = ""
    elif path.suffix == ".parquet":
        text = pd.read_parquet(path).drop(columns="seconds", errors="ignore").to_csv(index=False, lineterminator="\n")
    elif path.suffix == ".html":
        text = "\n".join(_page(path.read_text(encoding="utf-8"))) + "\n"
    elif path.suffix == ".json":
        text = _json(_without_times(json.loads(path.read_text(encoding="utf-8"))), 1) + "\n"
    elif path.suffix in TEXTS:
        text = path.read_text(encoding="utf-8")
    else:
        text = ""
    return text


def _page(page: str) -> Iterator[str]:
    """Yield a page's texts, then its data: JSON, and blocks of documents as JSON with their arrays as lists."""
    script = re.compile(r'<script type="application/(json|gzip)" id="([^"]*)"[^>]*>(.*?)</script>', re.DOTALL)
    page = re.sub(r"<table.*?</table>", _table_without_times, page, flags=re.DOTALL)
    static = re.sub(r"<(script|style)\b.*?</\1>|<[^>]+>", "\n", page, flags=re.DOTALL)
    yield from (line.strip() for line in html.unescape(static).splitlines() if line.strip())
    for kind, name, text in script.findall(page):
        yield f"[{name}]"
        data = json.loads(text) if kind == "json" else _document_block(text)
        if name == "copied-texts":  # of the tables above, in other formats
            data = [{form: len(table[form]) for form in sorted(table)} for table in data]
        yield _json(_without_times(data), 1)


def _table_without_times(table: re.Match[str]) -> str:
    timed = ">seconds</th></tr>" in table[0]
    return re.sub(r">[\d.,]+</td>(?=\s*</tr>)", ">#</td>", table[0]) if timed else table[0]


def _document_block(text: str) -> dict[str, Any]:
    data = gzip.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(data[:4], "little")
    header: dict[str, Any] = json.loads(data[4:start])
    for name, (kind, offset, count) in header["arrays"].items():
        header["arrays"][name] = str(np.frombuffer(data[start:], f"<{kind}", count, offset).tolist())
    return header


def run(output: Path, transcripts: list[Path]) -> None:
    """Run transcripts again in the working folder; write the new ones, and the runs' true ids, into a folder."""
    made_inputs()
    session = Session()
    for path in sorted(transcripts):
        text = path.read_text(encoding="utf-8")
        heading = text[: text.find("$ evalkit")]
        (output / path.name).write_text(heading + "".join(map(session.again, blocks(text))), encoding="utf-8")
    # An imported log's id depends on the day
    computed = {path.parent.name[-12:] for path in Path().rglob("journal.jsonl")}
    ids = "".join(f"{name} {run}\n" for run, name in session.ids.items() if run in computed)
    (output / "ids.txt").write_text(ids, encoding="utf-8")
    (output / "python.txt").write_text("\n".join(exports()) + "\n", encoding="utf-8")


def exports() -> Iterator[str]:
    """Yield the public names of the package with their parameters, and of classes those of their public methods."""
    for name in sorted(evalkit.__all__):
        value = getattr(evalkit, name)
        yield f"{name}{_parameters(value)}"
        if not isinstance(value, type):
            continue
        own = [base for base in value.__mro__ if base.__module__.startswith("evalkit")]
        yield from (f"  inherits {base.__name__}" for base in own[1:] if base.__name__ in evalkit.__all__)
        members = sorted({member for base in own for member in vars(base) if member[0] != "_"})
        yield from (f"  {member}{_parameters(getattr(value, member, None))}" for member in members)


def _parameters(value: Any) -> str:
    """Return a function's parameters and defaults, without annotations, which may be spelled in several ways."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return re.sub(r"=<[^>]*>", "=…", str(inspect.Signature(bare)))


if __name__ == "__main__":
    if os.environ.get("EVALKIT_CACHE") is None:
        sys.exit("run by tests/test_snapshots.py, which sets the environment")
    run(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
