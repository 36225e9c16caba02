"""What every entry of the list of guards is made of: a public door, an input, and what must come out.

The doors are the command line, `evalkit.evaluate` and the other exports of `evalkit`. Nothing else of evalkit is
imported here, so that its modules may be merged and renamed. The forms of a run's files are known: manifest.json and
results.json carry the SHA-256 of their other keys as canonical JSON, and results.json those of all other files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import evalkit
from evalkit.cli import main
from tests.arguments import arguments
from tests.data.samples import sample
from tests.data.samples import write as write_documents
from tests.tiny import tiny_checkpoint

MANIFEST, JOURNAL, RESULTS, SCORES = "manifest.json", "journal.jsonl", "results.json", "scores.parquet"
TASKS = ("piqa", "boolq")
SMALL_BATCHES = ("--tasks", "piqa,boolq", "--token-budget", 64)
"""Options of several batches."""


MESSAGES: dict[str, tuple[str, str]] = {}
"""Of the guards checked in this process: id → its sentence, and the last line on standard error."""


class Outcome(NamedTuple):
    """Outcome of a command or of a call."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The error: the last line on standard error."""
        return self.err.splitlines()[-1] if self.err else ""


class Guard(NamedTuple):
    """One guard: its id, a sentence, an input through a public door, and what must come out.

    An input returns the outcome, of which the error must name some nouns; or it compares numbers itself and returns
    None.
    """

    id: str
    text: str
    act: Callable[[Any], Outcome | None]
    nouns: tuple[str, ...] = ()
    code: int = 1

    def check(self, bench: Bench) -> None:
        """Run the guard's input and compare what comes out."""
        outcome = self.act(bench)
        if outcome is None:
            return
        assert outcome.code == self.code, (self.text, outcome)
        MESSAGES[self.id] = (
            self.text,
            outcome.said.replace(f"{bench.place}/", "").replace(f"{bench.shared.model.parent}/", ""),
        )
        assert "Traceback" not in outcome.err
        assert not self.code or outcome.said.startswith("evalkit: "), outcome
        for noun in self.nouns:
            assert noun in (outcome.said if self.code else outcome.err + outcome.out), (self.text, noun, outcome)


class Guards(list[Any]):
    """The list of guards of one kind, as parameters of a test."""

    def add(self, identity: str, text: str, act: Any, *nouns: str, code: int = 1, marks: Any = ()) -> None:
        """Add a guard whose input is a function of the bench."""
        self.append(pytest.param(Guard(identity, text, act, nouns, code), id=identity, marks=marks))

    def __call__(self, identity: str, text: str, *nouns: str, code: int = 1, marks: Any = ()) -> Any:
        """Add the decorated function."""

        def register(act: Any) -> Any:
            self.add(identity, text, act, *nouns, code=code, marks=marks)
            return act

        return register


@dataclass
class Shared:
    """What all guards share. Not to be changed; `Bench` copies it."""

    model: Path
    other: Path
    """A checkpoint of the same shapes with other weights."""
    documents: Path
    run: Path
    """A finished run of the first checkpoint."""
    other_run: Path
    log: Path
    """lm-eval's log of a run of the first checkpoint."""


def shared(place: Path) -> Shared:
    """Make the checkpoints, documents and finished runs that all guards share."""
    documents = place / "documents"
    documents.mkdir()
    text = "the river rose in the night and in the morning the bridge was gone so she took the boat"
    words = text.split()
    piqa = [
        sample("piqa", goal=" ".join(words[n : n + 6]), sol1=words[n], sol2=words[-n], label=n % 2)
        for n in (1, 2, 3, 4)
    ]
    boolq = [sample("boolq", passage=" ".join(words[n:]), answer=bool(n % 2)) for n in (1, 2, 3, 4)]
    write_documents(documents, "piqa", *piqa)
    write_documents(documents, "boolq", *boolq)
    models = [tiny_checkpoint(place / f"tiny{seed}", seed=seed, window=512) for seed in (0, 1)]

    def run(model: Path, template: str = "inst") -> Path:
        progress = evalkit.Progress(live=False)
        return evalkit.evaluate(str(model), progress=progress, output=place / "runs", tasks=TASKS, template=template,
                                data_dir=documents, allow_unofficial_data=True, log_samples=True).folder  # fmt: skip

    return Shared(*models, documents, *map(run, models), run(models[0], "plain") / "lm_eval")


@dataclass
class Bench:
    """A folder of one's own, the shared things, and the doors."""

    shared: Shared
    place: Path
    capsys: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch
    said: list[str] = field(default_factory=list)

    def __call__(self, *given: object) -> Outcome:
        """Run a command in this process."""
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(one) for one in given])
        return Outcome(int(left.value.code or 0), *self.capsys.readouterr())

    def score(self, model: object = None, *more: object) -> Outcome:
        """Run `evalkit run` on the documents of one task; later options override."""
        return self("run", *self.options(model, *more))

    def options(self, model: object = None, *more: object) -> list[str]:
        """The options of `score`."""
        common = {"--model": model or self.shared.model, "--data-dir": self.shared.documents, "--tasks": "piqa",
                  "--allow-unofficial-data": None, "--output": "runs"}  # fmt: skip
        return arguments(common, more)

    def process(self, *given: object, **options: Any) -> subprocess.Popen[str]:
        """Start a command in a process of its own."""
        command = [sys.executable, "-m", "evalkit", *map(str, given)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **(streams | options))

    def evaluate(self, model: Any, **options: Any) -> Outcome:
        """Call `evalkit.evaluate`, with an error as a command would end."""
        bench = self

        class Kept(evalkit.Progress):
            def say(self, line: str) -> None:
                bench.said.append(line)

        common = {"data_dir": self.shared.documents, "allow_unofficial_data": True, "tasks": "piqa", "output": "runs",
                  "progress": Kept(live=False)}  # fmt: skip
        try:
            run = evalkit.evaluate(model, **(common | options))
        except evalkit.EvalkitError as error:
            return Outcome(error.exit_code, "", f"evalkit: {error}")
        return Outcome(0, str(run.folder), "\n".join(self.said))

    def module(self, **options: Any) -> dict[str, Any]:
        """The shared checkpoint as a module in memory with its tokenizer, as arguments of `evaluate`."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.shared.model, **options).eval()
        return {"model": model, "tokenizer": AutoTokenizer.from_pretrained(self.shared.model), "name": "hooked"}

    def folder_of(self, outcome: Outcome) -> Path:
        """The run folder that a command or a call has returned."""
        assert outcome.code == 0, outcome
        return Path(outcome.out.splitlines()[-1])

    def scores_of(self, outcome: Outcome) -> Any:
        """The score table of a run."""
        return evalkit.load_run(self.folder_of(outcome)).scores

    # Checkpoints

    def copy(self, source: Path | None = None, name: str = "changed") -> Path:
        """A copy of a folder, by default of the checkpoint."""
        return Path(shutil.copytree(source or self.shared.model, self.place / name))

    def config(self, *without: str, folder: Path | None = None, **changes: Any) -> Path:
        """A copy of the checkpoint with another config.json."""
        folder = folder or self.copy()
        edit(folder / "config.json", lambda content: [content.update(changes), *map(content.pop, without)])
        return folder

    def weights(self, change: Callable[[dict[str, Any]], Any], folder: Path | None = None) -> Path:
        """A copy of the checkpoint with other weights."""
        from safetensors.torch import load_file, save_file

        folder = folder or self.copy()
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
        return folder

    # Runs

    def run(self, source: Path | None = None, name: str | None = None) -> Path:
        """A copy of a finished run, by default the shared one."""
        source = source or self.shared.run
        return Path(shutil.copytree(source, self.place / "runs" / (name or source.name)))

    def batched(self, *more: object) -> Path:
        """A new finished run of several batches."""
        return self.folder_of(self.score(None, *SMALL_BATCHES, *more))

    def altered(self, name: str, change: Callable[[dict[str, Any]], Any] = dict, **specification: Any) -> Path:
        """A run of another specification under another name, whose files fit one another."""
        folder = self.run(name=name)
        weights = {"weights": name}
        edit(folder / MANIFEST, lambda content: [
            content["specification"].update({"checkpoint": weights} | specification), change(content)])  # fmt: skip
        reseal(folder)
        return folder

    def scores(self, change: Callable[[Any], Any], name: str = "altered") -> Path:
        """An altered run with another score table, to which it is bound."""
        import pandas as pd

        folder = self.altered(name)
        table = pd.read_parquet(folder / SCORES)
        change(table)
        table.to_parquet(folder / SCORES, index=False)
        reseal(folder)
        return folder


def edit(path: Path, change: Callable[[Any], Any]) -> Path:
    """Change a JSON file's content in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def write(path: str | Path, content: str | bytes | Mapping[str, Any]) -> Path:
    """Write a file: text, bytes, or a mapping as YAML."""
    import yaml

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(content), sort_keys=False) if isinstance(content, Mapping) else content
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def lines(path: Path, change: Callable[[list[Any]], Any]) -> Path:
    """Change the objects of a JSON lines file in place."""
    content = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    change(content)
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in content), encoding="utf-8")
    return path


def longbench(changes: dict[str, Any], count: int = 2) -> Path:
    """Write rows of LongBench's trec, with changes to the last one; return their folder."""
    rows = [
        {"input": "Question: Who ?\nType:", "context": f"Document {number} of trec.", "answers": ["Person"],
         "length": 5, "dataset": "trec", "language": "en", "all_classes": ["Person", "Place"], "_id": f"trec-{number}"}
        for number in range(count)
    ]  # fmt: skip
    rows[-1] |= changes
    return write("rows/trec.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)).parent


def seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a run's JSON file with its digest."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return plain | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def reseal(folder: Path, identity: str | None = None) -> None:
    """Bind the files of a run to each other, whatever was written into them by hand."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    text = json.dumps(manifest["specification"], sort_keys=True, ensure_ascii=False)
    manifest = seal(manifest | {"id": identity or hashlib.sha256(text.encode()).hexdigest()[:12]})
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in results["files"]}
    results = seal(results | {"run": manifest["id"], "files": files | {MANIFEST: manifest["sha256"]}})
    (folder / RESULTS).write_text(json.dumps(results), encoding="utf-8")


def journal_line(payload: bytes) -> bytes:
    """A line of a journal whose checksum is right."""
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


_hooks: list[Callable[[str, tuple[Any, ...]], None]] = []


@contextmanager
def audited(hook: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call a function at every event of Python's audit hooks (PEP 578): files opened, folders made, code run."""
    if not _hooks:
        sys.addaudithook(lambda event, given: [hook(event, given) for hook in _hooks[1:]] and None)
        _hooks.append(lambda *_: None)
    _hooks.append(hook)
    try:
        yield
    finally:
        _hooks.remove(hook)


def once(condition: Callable[[str, tuple[Any, ...]], bool], act: Callable[[], Any]) -> Any:
    """A hook that acts at the first event that satisfies a condition."""
    done: list[bool] = []

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if not done and condition(event, given):
            done.append(True)
            act()

    return audited(hook)


def run_is_opened(event: str, given: tuple[Any, ...]) -> bool:
    """Whether a run's folder is made: all inputs have been hashed, and the model is not loaded yet."""
    return event == "os.mkdir" and Path(str(given[0])).parent.name == "runs"
