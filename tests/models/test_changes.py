"""A checkpoint whose files change during its evaluation: the numbers are the original's, or the run fails."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import evalkit
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.loading import build
from evalkit.models.loading import fingerprint as hashing
from evalkit.models.loading import load as loading
from evalkit.models.loading.build import read_weights
from evalkit.models.loading.fingerprint import file_sha256, fingerprint
from evalkit.models.loading.locate import Checkpoint, locate
from evalkit.models.zoo.convert import convert, export
from tests.models.test_gguf import write_gguf
from tests.models.variants.building import DIFFERENTIAL, model_of
from tests.tiny import VOCABULARY, tiny_checkpoint, tiny_tokenizer

SETTLED = 10.0
"""Seconds: files are made to look this old, as those of a checkpoint that was written before the command was given."""

Command = Callable[[Path, Path], Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original") / "tiny", window=512, max_shard_size="100KB")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's next checkpoint: the same shapes, other weights."""
    return tiny_checkpoint(tmp_path_factory.mktemp("other") / "tiny", seed=1, window=512, max_shard_size="100KB")


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of the same shapes, and other weights."""
    folder = tmp_path_factory.mktemp("gguf")
    sources = [tiny_checkpoint(folder / str(seed), seed=seed, window=192) for seed in (0, 1)]
    return [write_gguf(source, folder / f"{source.name}.gguf") for source in sources]


@pytest.fixture(scope="module")
def command(documents: Path) -> Command:
    def run(model: Path, runs: Path) -> Any:
        options = {"data_dir": documents, "tasks": "boolq", "limit": 2, "allow_unofficial_data": True}
        scores = evalkit.evaluate(str(model), output=runs, progress=Progress(live=False), **options).scores
        return scores.fillna(0.0).to_dict("list")

    return run


def overwritten(path: Path, source: Path) -> None:
    """Overwrite in place, like `cp` and `torch.save`: visible in a mapped file."""
    with path.open("r+b") as file:
        file.write(source.read_bytes())


def replaced(path: Path, source: Path) -> None:
    """Replace the file, like rsync."""
    shutil.copy(source, path.with_name("next"))
    path.with_name("next").replace(path)


MOMENTS = ("before it is read", "before it is built", "while it scores")


def at(moment: str, change: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trigger a change at one moment of the next run."""
    from transformers import AutoConfig

    owner, name = {
        MOMENTS[0]: (loading, "load"),
        MOMENTS[1]: (AutoConfig, "from_pretrained"),
        MOMENTS[2]: (loading.LoadedModel, "describe"),
    }[moment]
    function, happened = getattr(owner, name), []

    def changing(*given: Any, **options: Any) -> Any:
        if not happened:
            happened.append(True)
            change()
        return function(*given, **options)

    monkeypatch.setattr(owner, name, changing)


def aged(model: Path) -> Path:
    """Set older file times."""
    for path in [model, *model.rglob("*")]:
        status = path.stat()
        os.utime(path, (status.st_atime - SETTLED, status.st_mtime - SETTLED))
    return model


def outcome(command: Command, model: Path, runs: Path, expected: Any) -> str:
    """Return whether a command failed without numbers, or gave the original's; anything else is a test failure."""
    try:
        numbers = command(model, runs)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert not list(runs.glob("*"))
        return "refused"
    assert numbers == expected
    return "the original's"


def test_a_gguf_file_or_its_dequantised_copy_that_changes(
    gguf_files: list[Path], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """A changed file has another copy; a modified copy is created again."""
    model = aged(Path(shutil.copy(gguf_files[0], tmp_path / "tiny.gguf")))
    before = command(model, tmp_path / "before")
    command(Path(shutil.copy(gguf_files[1], tmp_path / "other.gguf")), tmp_path / "before")
    copies = sorted(
        (cache / "gguf").glob("*/model.safetensors"),
        key=lambda path: not path.parent.name.startswith(file_sha256(model)),
    )
    for moment in MOMENTS:
        with monkeypatch.context() as once:
            at(moment, lambda: overwritten(*copies), once)
            assert outcome(command, model, tmp_path / f"copy {moment}", before) == "the original's"
    for moment, expected in ((MOMENTS[1], "the original's"), (MOMENTS[0], "refused")):
        replaced(model, gguf_files[0])
        aged(model)
        with monkeypatch.context() as once:
            at(moment, lambda: replaced(model, gguf_files[1]), once)
            assert outcome(command, model, tmp_path / f"runs {moment}", before) == expected


def test_after_a_refusal_the_same_command_scores_the_new_weights(
    original: Path, other: Path, command: Command, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Here links of the hub's cache change. Weights that are rewritten as they are give the same numbers."""
    model = tmp_path / "build" / "main"
    model.mkdir(parents=True)
    for path in original.iterdir():
        (model / path.name).symlink_to(path)

    def relink(source: Path) -> None:
        for link in model.glob("*.safetensors"):
            link.unlink()
            link.symlink_to(source / link.name)

    with monkeypatch.context() as once:
        at(MOMENTS[0], lambda: relink(other), once)
        assert outcome(command, model, tmp_path / "runs", None) == "refused"
    expected, new = command(original, tmp_path / "expected"), command(other, tmp_path / "new")
    assert command(model, tmp_path / "runs") == new != expected
    same = Path(shutil.copytree(original, tmp_path / "same"))
    at(MOMENTS[0], lambda: [overwritten(path, path) for path in same.glob("*.safetensors")], monkeypatch)
    assert outcome(command, same, tmp_path / "again", expected) == "the original's"


SWAPPED = """
import os, shutil, signal, sys
from pathlib import Path
import evalkit
from evalkit.display import Progress
from evalkit.models.loading import load

model, other, documents, runs = map(Path, sys.argv[1:])

class Killed(Progress):
    def advance(self, work, documents):
        os.kill(os.getpid(), signal.SIGKILL)

def swap_before(owner, name):
    real = getattr(owner, name)

    def swapped(*given, **options):
        setattr(owner, name, real)
        for shard in model.glob("*.safetensors"):
            shard.rename(shard.with_suffix(".kept"))
            shutil.copy(other / shard.name, shard)
        return real(*given, **options)

    setattr(owner, name, swapped)

def evaluate():
    evalkit.evaluate(str(model), output=runs, progress=Killed(live=False), data_dir=documents, tasks="boolq",
                     token_budget=256, allow_unofficial_data=True)

swap_before(load, "load")
try:
    evaluate()
except evalkit.CheckpointError as error:
    print(error, list(runs.glob("*")))
for kept in model.glob("*.kept"):
    kept.replace(kept.with_suffix(".safetensors"))
sys.stdout.flush()
swap_before(load.LoadedModel, "describe")
evaluate()
"""


@pytest.mark.slow
def test_swaps_then_a_kill_then_the_restored_checkpoint_resumes(
    original: Path, other: Path, documents: Path, tmp_path: Path
) -> None:
    """Swapped while it is loaded, nothing is written; swapped while it scores, the rows are the original's."""
    options = {"data_dir": documents, "tasks": "boolq", "allow_unofficial_data": True, "token_budget": 256,
               "progress": Progress(live=False)}  # fmt: skip
    expected = evalkit.evaluate(str(original), output=tmp_path / "expected", **options).scores
    model, runs = aged(Path(shutil.copytree(original, tmp_path / "tiny"))), tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", SWAPPED, str(model), str(other), str(documents), str(runs)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "changed since this run was started" in done.stdout and "[]" in done.stdout
    [begun] = evalkit.list_runs(runs)
    assert not begun.complete
    for kept in model.glob("*.kept"):
        kept.replace(kept.with_suffix(".safetensors"))
    run = evalkit.evaluate(str(model), output=runs, **options)
    assert run.folder == begun.folder and run.scores.equals(expected)


# The files that loading opens are those in the fingerprint

LEFT_OUT = {"generation_config.json", "model.safetensors.index.json"}
"""What bears on generated texts alone, which runs that generate name themselves; and names of files that are hashed."""
BESIDE = ("additional_chat_templates/tools.jinja", "chat_template.jinja", "chat_template.json", "modeling_own.py",
          "custom_generate/generate.py", "special_tokens_map.json", "added_tokens.json", "processor_config.json",
          "README.md", "trainer_state.json", "optimizer.pt", "pytorch_model.bin", "tokenizer.model.v3")  # fmt: skip

_watched: list[tuple[str, set[str]]] = []


def _note(event: str, details: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(details[0], (str, os.PathLike)):
        for folder, names in _watched:
            path = os.path.realpath(os.fspath(details[0]))
            if path.startswith(folder + os.sep):
                names.add(os.path.relpath(path, folder))


sys.addaudithook(_note)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    folder = tiny_checkpoint(tmp_path / "full", max_shard_size="100KB")
    for name in BESIDE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}" if name.endswith("json") else "raise SystemExit")
    return folder


def opened_in(folder: Path, checkpoint: Checkpoint) -> set[str]:
    """Files of a folder that loading opens."""
    _watched.append((os.path.realpath(folder), set()))
    try:
        assert loading.load(checkpoint, device="cpu").fingerprint == fingerprint(checkpoint)
    finally:
        _, names = _watched.pop()
    return names


def counted(checkpoint: Checkpoint, folder: Path) -> set[str]:
    """Files of a folder without which, or with another end of which, the fingerprint is another one."""
    before, names = fingerprint(checkpoint), set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        path.write_bytes(content + b" x")
        try:
            same = fingerprint(checkpoint) == before
        except CheckpointError:
            same = False  # no JSON any more
        path.write_bytes(content)
        names |= set() if same else {path.relative_to(folder).as_posix()}
    return names


def test_every_file_that_loading_opens_counts(full: Path, tmp_path: Path) -> None:
    opened = opened_in(full, locate(str(full)))
    assert opened - LEFT_OUT == counted(locate(str(full)), full) - LEFT_OUT
    assert opened >= {"config.json", "tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert len([name for name in opened if name.endswith(".safetensors")]) == 6
    other = tiny_tokenizer(tmp_path / "other")
    shutil.copy(full / "config.json", other)
    checkpoint = locate(str(full), tokenizer=str(other))
    assert opened_in(other, checkpoint) == counted(checkpoint, other)
    assert not opened_in(full, checkpoint) & {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_neither_export_nor_convert_writes_parts_of_two_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    own, foreign = tiny_tokenizer(tmp_path / "own"), tiny_tokenizer(tmp_path / "foreign")
    model_of("llama", DIFFERENTIAL, vocab_size=VOCABULARY).save_pretrained(own)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = DiffLlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes)
    DiffLlamaForCausalLM(config).save_pretrained(foreign)

    def edited(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-1] + b" ")

    copying, reading = shutil.copyfile, read_weights
    with monkeypatch.context() as once:
        change = {"tokenizer.json": lambda: edited(own / "model.safetensors")}
        once.setattr(shutil, "copyfile", lambda *paths: change.pop(paths[0].name, int)() or copying(*paths))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            export(locate(str(own)), tmp_path / "out")
    monkeypatch.setattr(build, "read_weights", lambda *given: edited(foreign / "tokenizer.json") or reading(*given))
    with pytest.raises(CheckpointError, match="changed while it was read"):
        convert(locate(str(foreign)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Weights as read

Tensors = dict[str, torch.Tensor]
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e8m0fnu,
)  # fmt: skip


def same(tensors: Tensors, others: Tensors) -> bool:
    return tensors.keys() == others.keys() and all(
        tensors[name].dtype == tensor.dtype
        and tensors[name].shape == tensor.shape
        and torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in others.items()
    )


def random(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, except booleans, which have two values."""
    count = torch.Size(shape).numel() * dtype.itemsize
    draw = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=draw).to(torch.uint8)
    return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


@settings(max_examples=40)
@given(
    parts=st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=6)
)
def test_the_numbers_are_those_of_safetensors(
    tmp_path_factory: Any, parts: list[tuple[list[int], torch.dtype]]
) -> None:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    written = {f"t{number}": random(shape, dtype, number) for number, (shape, dtype) in enumerate(parts)}
    save_file(written, path, metadata={"format": "pt"})
    weights = read_weights([path])
    assert same(weights.tensors, written)
    assert weights.digests == [(path.name, hashlib.sha256(path.read_bytes()).hexdigest())]


def test_several_files_and_pickles(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for number, path in enumerate(paths):
        save_file({"both": torch.full((2,), float(number)), f"own{number}": torch.ones(number)}, path)
    assert same(read_weights(paths).tensors, load_file(paths[0]) | load_file(paths[1]))
    written = {"one": torch.randn(3, 4), "two": torch.ones(2, dtype=torch.bfloat16)}
    path = tmp_path / "pytorch_model.bin"
    for zipped in (True, False):  # torch's form of today, a ZIP archive, and that of before 1.6
        torch.save(written, path, _use_new_zipfile_serialization=zipped)
        weights = read_weights([path])
        assert same(weights.tensors, written)
        assert weights.digests[0][1] == hashlib.sha256(path.read_bytes()).hexdigest()
    for wrong in (b"no pickle", b""):
        path.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
            read_weights([path])


def test_what_happens_to_the_file_afterwards_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"ones": torch.ones(100_000)}, path)
    tensor = read_weights([path]).tensors["ones"]
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert tensor.eq(1).all()
    path.write_bytes(b"")  # the next access of a process that maps it would crash
    assert tensor.eq(1).all()


def test_a_file_that_becomes_shorter_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100_000), "two": torch.ones(100_000)}, path)
    opened = build.safe_open

    def shortened(*given: Any, **options: Any) -> Any:
        shard = opened(*given, **options)
        path.write_bytes(b"")
        return shard

    monkeypatch.setattr(build, "safe_open", shortened)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*damaged"):
        read_weights([path])


def test_a_remembered_digest_of_other_content_is_corrected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system shows no change, the next load does, and the next fingerprint is right."""
    path = tmp_path / "model.safetensors"
    save_file({"one": torch.ones(100)}, path)
    monkeypatch.setattr(hashing, "state_of", lambda _: [1, 0, 0, 1])
    old = file_sha256(path)
    assert read_weights([path]).digests == [(path.name, old)]
    save_file({"one": torch.full((100,), 2.0)}, path)
    assert file_sha256(path) == old
    [(_, new)] = read_weights([path]).digests
    assert new == hashlib.sha256(path.read_bytes()).hexdigest() != old
    assert file_sha256(path) == new
