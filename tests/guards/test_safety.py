"""Guards of safety: no code of others unasked, no path out of its folder, no text that acts on its reader."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import json
import os
import pickle
import platform
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.lm_eval.made import CHOICE, write_task
from tests.guards.bench import Bench, Guard, Guards, Outcome, edit, lines, write

GUARDS = Guards()
SPRUNG = Path("sprung")
"""Made by any code that runs and should not."""


@pytest.mark.parametrize("guard", GUARDS)
def test_safety(guard: Guard, bench: Bench) -> None:
    guard.check(bench)
    assert not SPRUNG.exists()


# Code of a checkpoint


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(SPRUNG.resolve()),)


def _pickled(bench: Bench, name: str = "pytorch_model.bin") -> Path:
    folder = bench.copy()
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap()))
    return folder


GUARDS.add("pickle", "Pickled weights are not opened unless that is asked for.",
    lambda bench: bench.score(_pickled(bench)), "--allow-pickle")  # fmt: skip
GUARDS.add("pickle-allowed", "Nor do they run code if it is.",
    lambda bench: bench.score(_pickled(bench), "--allow-pickle"), "pytorch_model.bin: cannot be read")  # fmt: skip


@GUARDS("pickle-beside", "Pickles beside safetensors are not opened.", code=0)
def _(bench: Bench) -> Outcome:
    folder = bench.copy()
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "rng_state.pth"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    return bench.score(folder, "--allow-pickle")


def _indexed(shard: str) -> Callable[[Bench], Outcome]:
    def act(bench: Bench) -> Outcome:
        from safetensors.torch import load_file

        folder = _pickled(bench, "weights.bin")
        index = {"weight_map": dict.fromkeys(load_file(bench.shared.model / "model.safetensors"), shard)}
        write(folder / "model.safetensors.index.json", json.dumps(index))
        shutil.copy(bench.shared.model / "model.safetensors", "model.safetensors")
        return bench.score(folder)

    return act


GUARDS.add("index-pickle", "An index of safetensors does not name a pickle.", _indexed("weights.bin"), "weights.bin",
    "as a shard")  # fmt: skip
GUARDS.add("index-outside", "Nor a file outside of the folder.", _indexed("../model.safetensors"),
    "../model.safetensors", "as a shard")  # fmt: skip

OWN_CODE = """
from pathlib import Path
Path({!r}).mkdir()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "of_a_guard"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def _own_code(bench: Bench, model_type: str, where: str = "") -> Path:
    """A checkpoint with code of its own."""
    bench.patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(bench.place / "modules"))
    bench.patch.setattr(sys, "path", [*sys.path])
    code = {"AutoConfig": f"{where}own.OwnConfig", "AutoModelForCausalLM": f"{where}own.OwnModel"}
    folder = bench.config(model_type=model_type, auto_map=code, architectures=["OwnModel"])
    write(folder / "own.py", OWN_CODE.format(str(SPRUNG.resolve())))
    return folder


GUARDS.add("remote-code", "Code of a checkpoint is not run unless it is trusted.",
    lambda bench: bench.score(_own_code(bench, "of_a_guard")), "--trust-remote-code")  # fmt: skip
GUARDS.add("remote-code-elsewhere", "Code of another repository is not run though the checkpoint is trusted.",
    lambda bench: bench.score(_own_code(bench, "of_a_guard", "o/n--"), "--trust-remote-code"),
    "another repository")  # fmt: skip
GUARDS.add("remote-code-known", "Code of a checkpoint of a known type is not run.",
    lambda bench: bench.score(_own_code(bench, "llama"), "--trust-remote-code"), code=0)  # fmt: skip


@GUARDS("remote-code-tokenizer", "Code of a tokenizer is not run unless it is trusted.", "--trust-remote-code")
def _(bench: Bench) -> Outcome:
    folder = _own_code(bench, "llama")
    code = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}}
    edit(folder / "tokenizer_config.json", lambda content: content.update(code))
    return bench.score(folder)


@GUARDS("hub", "Of a model of the hub neither pickles nor code are downloaded.", "the download failed")
def _(bench: Bench) -> Outcome:
    from types import SimpleNamespace

    import huggingface_hub

    names = ["config.json", "model.safetensors", "tokenizer.json", "own.py", "pytorch_model.bin"]
    listing = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names], sha="0" * 40)
    asked: list[str] = []

    def download(_: str, **options: Any) -> str:
        asked.extend(options["allow_patterns"])
        raise huggingface_hub.errors.LocalEntryNotFoundError("played")

    bench.patch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: listing)
    bench.patch.setattr(huggingface_hub, "snapshot_download", download)
    outcome = bench.score("org/name")
    assert "model.safetensors" in asked and not {"own.py", "pytorch_model.bin"} & set(asked)
    return outcome


def _chat(template: str) -> Callable[[Bench], Outcome]:
    def act(bench: Bench) -> Outcome:
        path = edit(bench.copy() / "tokenizer_config.json", lambda content: content.update(chat_template=template))
        return bench.score(path.parent, "--template", "chat")

    return act


GUARDS.add("chat-code", "A chat template reaches nothing outside of itself: transformers' sandbox.",
    _chat("{{ cycler.__init__.__globals__.os.mkdir('sprung') }}{{ messages }}"), "chat template")  # fmt: skip


# Code of tasks, templates and files


def _task(code: str = "raise SystemExit", **config: Any) -> Callable[[Bench], Outcome]:
    def act(bench: Bench) -> Outcome:
        path = write_task(Path("tasks"), CHOICE | config, [{"question": "Why?", "choices": ["a", "b"], "gold": 1}])
        write("tasks/code.py", f"import os\nos.mkdir({str(SPRUNG.resolve())!r})\ndef text(doc): return ''\n")
        text = path.read_text(encoding="utf-8")
        write(path, re.sub("doc_to_text: .*\n.*\n", "doc_to_text: !function code.text\n", text, count=1))
        return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", "made_choice")

    return act


GUARDS.add("unsafe-code", "A task that runs generated code is refused, before any code of it runs.",
    _task(unsafe_code=True), "runs generated code", code=2)  # fmt: skip

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
for _name, (_content, _noun) in {
    "object": (f"a: !!python/object/apply:os.mkdir [{SPRUNG}]", "could not determine a constructor"),
    "bomb": (BOMB, "aliases expand to more than"),
    "cycle": ("a: &a [*a]", "a node that contains it"),
    "deep": ("[" * 5000, "nested more than 100 levels"),  # two limits, and Python's own
    "large": (f"system: {'x ' * 200_000}", "is too large"),
    "function": ("a: !function code.text", "could not determine a constructor"),
}.items():
    GUARDS.add(f"yaml-{_name}", f"A YAML file does not act on its reader: {_name}.",
        lambda bench, content=_content: bench.score(None, "--template", write("own.yaml", content)), "own.yaml",
        _noun)  # fmt: skip


@GUARDS("json-deep", "A JSON file does not exhaust the stack of its reader.", "config.json",
        "nested more than 100 levels")  # fmt: skip
def _(bench: Bench) -> Outcome:
    folder = bench.copy()
    write(folder / "config.json", "[" * 50_000)
    return bench.score(folder)


@GUARDS("endless", "A file without end, such as a device behind a link, is not read.", "piqa.jsonl",
        "is not a regular file")  # fmt: skip
def _(bench: Bench) -> Outcome:
    Path("documents").mkdir()
    Path("documents/piqa.jsonl").symlink_to("/dev/zero")
    return bench.score(None, "--data-dir", "documents")


@GUARDS("endless-config", "Nor one of a checkpoint.", "has no config.json")
def _(bench: Bench) -> Outcome:
    path = bench.copy() / "config.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    return bench.score(path.parent)


# Paths


@GUARDS("name-outside", "The folder of a run is inside of the output, whatever the model's name is.")
def _(bench: Bench) -> None:
    outcome = bench.evaluate(**bench.module() | {"name": "../../../outside/x"}, output="a/b/runs")
    assert bench.folder_of(outcome).resolve().parent == Path("a/b/runs").resolve()


@GUARDS("sample-outside", "The name of a task is no path out of the run's folder.", "a path out of", code=2)
def _(bench: Bench) -> Outcome:
    name = "../../../outside"
    write_task(Path("tasks"), CHOICE, [{"question": "Why?", "choices": ["a", "b"], "gold": 1}])
    path = Path("tasks/made_choice.yaml")
    write(path, path.read_text(encoding="utf-8").replace("task: made_choice", f"task: {name}"))
    return bench("run", bench.shared.model, "--include-path", "tasks", "--tasks", name, "--log-samples")


@GUARDS("published", "A run to publish names no path, no machine and no token.")
def _(bench: Bench) -> None:
    bench.patch.setenv("HF_TOKEN", "hf_secretsecret")
    bench.patch.setattr(sys, "argv", ["/opt/x/evalkit", "run", "--model", str(bench.shared.model)])
    folder = bench.folder_of(bench.score(bench.copy(), "--log-samples"))
    assert bench("export", folder, "--to", "run", "--output", "public").code == 0
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in Path("public").rglob("*") if path.is_file()]
    for private in (str(bench.place), str(bench.shared.model.parent), platform.node(), platform.release(), "hf_secret"):
        assert texts and not any(private in text for text in texts), private
    assert not list(Path("public").rglob("journal*"))


# Texts


HOSTILE = "</script><img src=x onerror=alert(1)>"


def _documents(bench: Bench, **changes: Any) -> Path:
    folder = Path(shutil.copytree(bench.shared.documents, "documents"))
    lines(folder / "piqa.jsonl", lambda records: records[0].update(changes))
    return folder


def _is_clean(text: str) -> bool:
    return not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text if c != "\n")


@GUARDS("html-page", "Neither a document nor a name puts an element or a script on a page.")
def _(bench: Bench) -> None:
    run = bench.folder_of(bench.score(None, "--data-dir", _documents(bench, goal=HOSTILE, sol1=HOSTILE)))
    assert bench("report", run, bench.shared.other_run, "--names", f"{HOSTILE},b", "-o", "page.html").code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<img" not in page and "&lt;img" in page
    assert page.lower().count("</script") == page.lower().count("<script")


@GUARDS("html-policy", "A page permits its own script only, and no request.")
def _(bench: Bench) -> None:
    assert bench("report", bench.shared.run, "-o", "page.html").code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert re.search(r"default-src 'none'; script-src 'sha256-[A-Za-z0-9+/=]{44}';", page.replace("&#39;", "'"))


def _named(name: str, form: str) -> Callable[[Bench], str]:
    """The output of a comparison whose first side has a name."""
    return lambda bench: (
        bench("compare", bench.shared.other_run, "--group", f"{name}={bench.shared.run}", "--format", form).out
    )


@GUARDS("html-table", "Neither a name nor a row's label puts an element into a table in HTML.")
def _(bench: Bench) -> None:
    columns = [{"items": {"piqa": "PIQA"}}]
    layout = {"suite": "zeroshot8", "rows": [{"items": {"one": "<img src>"}}], "columns": columns}
    rows = write("runs.yaml", {"rows": {"one": str(bench.shared.run)}})
    printed = bench("table", write("own.yaml", layout), "--source", "runs", "--runs", rows, "--format", "html")
    for found in (_named("<img src>", "html")(bench), printed.out):
        assert "&lt;img src&gt;" in found and "<img" not in found


@GUARDS("latex", "A name is no command in LaTeX.")
def _(bench: Bench) -> None:
    printed = _named(r"a\input{b}%$&_", "latex")(bench)
    found = "\n".join(line for line in printed.splitlines() if not line.startswith("%"))
    assert r"\textbackslash{}input\{b\}\%\$\&\_" in found and r"\input" not in found


@GUARDS("markdown", "A name is no markup in Markdown.")
def _(bench: Bench) -> None:
    found = _named("a|<b>`c", "markdown")(bench)
    assert r"a\|\<b\>\`c" in found


@GUARDS("csv", "A name is no formula in a spreadsheet.")
def _(bench: Bench) -> None:
    cells = [cell for row in csv.reader(io.StringIO(_named("@SUM(A1)", "csv")(bench))) for cell in row]
    assert any("@SUM(A1)" in cell for cell in cells) and not any(cell.startswith("@") for cell in cells)


@GUARDS("terminal-name", "A name does not order the terminal (two guards: its message, what prints it).")
def _(bench: Bench) -> None:
    model = bench.copy(name="a\x1b[2J\u202eb")
    outcome = bench.score(model)
    assert outcome.code == 0 and _is_clean(outcome.out + outcome.err)
    assert "a\\x1b[2J\\u202eb" in outcome.err


@GUARDS("terminal-document", "Nor does a document.")
def _(bench: Bench) -> None:
    outcome = bench.score(None, "--data-dir", _documents(bench, goal="a\x1b[2J\u202eb"), "--show-prompts", 1)
    assert outcome.code == 0 and _is_clean(outcome.out) and "a\\x1b[2J\\u202eb" in outcome.out


@GUARDS("terminal-error", "Nor does an error, which is one line (two guards: its text, what prints it).",
        "a\\x1b[2J\\nb", code=2)  # fmt: skip
def _(bench: Bench) -> Outcome:
    outcome = bench.score("./a\x1b[2J\nb")
    assert _is_clean(outcome.err) and outcome.err.count("\n") == 1
    return outcome


@GUARDS("page-direction", "A page shows changes of direction by their codes, also in what its script reads.")
def _(bench: Bench) -> None:
    run = bench.folder_of(bench.score(None, "--data-dir", _documents(bench, goal="a\u202eb")))
    assert bench("report", run, "-o", "page.html").code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    blocks = re.findall(r'<script[^>]*id="block-\d+"[^>]*>(.*?)</script>', page, re.DOTALL)
    texts = [gzip.decompress(base64.b64decode(block)).decode(errors="replace") for block in blocks]
    assert any(r"a\\u202eb" in text for text in texts)
    assert not any("\u202e" in text for text in (page, *texts))
