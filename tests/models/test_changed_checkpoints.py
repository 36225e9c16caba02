"""A checkpoint whose files change during its evaluation: the numbers are the original's, or the run fails."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.longbench.results import load_generations
from evalkit.benchmarks.needle.benchmark import Needle, NeedleRequest
from evalkit.benchmarks.request import request_of
from evalkit.benchmarks.run import evaluate
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.errors import CheckpointError
from evalkit.models.loading import gguf as gguf_reading
from evalkit.models.loading import load as loading
from evalkit.models.loading import locate as locating
from evalkit.models.loading import snapshot as reading
from evalkit.models.loading.fingerprint import file_sha256
from evalkit.runs.folder import Run
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.longbench.made import evaluate_longbench, record, write
from tests.benchmarks.longbench.made import request as longbench_request
from tests.marks import fast
from tests.models.test_gguf import write_gguf
from tests.tiny import TRAINING_TEXT, tiny_checkpoint, tiny_tokenizer

SETTLED = 10.0
"""Seconds: files are made to look this old, as those of a checkpoint that was written before the command was given."""

Numbers = Any
Command = Callable[[Path, Path], Numbers]


class Silent(Progress):
    """Progress that shows nothing."""

    def say(self, line: str) -> None:
        pass


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVALKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("original") / "tiny", window=512, max_shard_size="100KB")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trainer's next checkpoint: the same shapes, other weights."""
    return tiny_checkpoint(tmp_path_factory.mktemp("other") / "tiny", seed=1, window=512, max_shard_size="100KB")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    talk = "\n".join(TRAINING_TEXT)
    write(folder / "longbench" / "lcc.jsonl", [record("lcc", number, context=talk[number:]) for number in range(2)])
    return {"run": documents, "lm-eval": made_tasks(folder / "tasks", 2), "longbench": folder / "longbench"}


@pytest.fixture(scope="module")
def commands(inputs: dict[str, Path]) -> dict[str, Command]:
    def suite(model: Path, runs: Path) -> Numbers:
        options = {"data_dir": inputs["run"], "tasks": "boolq", "limit": 2, "allow_unofficial_data": True}
        run = evaluate(str(model), output=runs, progress=Silent(live=False), **options)
        return run.scores.fillna(0.0).to_dict("list")

    def lm_eval(model: Path, runs: Path) -> Numbers:
        options = {"include_path": inputs["lm-eval"], "tasks": "made_last_word,made_answers", "token_budget": 300}
        run = evaluate(str(model), output=runs, progress=Silent(live=False), log_samples=True, **options)
        return [_samples(run, name) for name in ("made_last_word", "made_answers")]

    def longbench(model: Path, runs: Path) -> Numbers:
        asked = longbench_request(model, inputs["longbench"], runs, "lcc", max_prompt_tokens=300)
        return load_generations(evaluate_longbench(asked, Silent(live=False)))["prediction"].tolist()

    def needle(model: Path, runs: Path) -> Numbers:
        cells = {"lengths": (200,), "depths": (50,), "repeats": 1}
        asked = request_of(NeedleRequest, model, {"output": runs} | cells)
        run = run_plan(Needle().plan(asked, lambda _: None), Silent(live=False))
        return Needle().answers(run)["answer"].tolist()

    return {"run": suite, "lm-eval": lm_eval, "longbench": longbench, "needle": needle}


@pytest.fixture(scope="module")
def expected(
    original: Path, commands: dict[str, Command], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Numbers]:
    """Of each command on the checkpoint as it is."""
    place = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("EVALKIT_CACHE", str(place / "cache"))
        patched.setenv("DISABLE_MULTIPROC", "1")
        return {name: command(original, place / "runs") for name, command in commands.items()}


def _samples(run: Run, task: str) -> Any:
    [path] = run.folder.glob(f"**/samples_{task}_*.jsonl")
    return [json.loads(line)["filtered_resps"] for line in path.read_text(encoding="utf-8").splitlines()]


def overwritten(path: Path, source: Path) -> None:
    """Overwrite in place, like `cp` and `torch.save`: visible in a mapped file."""
    with path.open("r+b") as file:
        file.write(source.read_bytes())


def replaced(path: Path, source: Path) -> None:
    """Replace the file, like rsync."""
    shutil.copy(source, path.with_name("next"))
    path.with_name("next").replace(path)


def truncated(path: Path, source: Path) -> None:
    """Truncate, like a file being rewritten: a process that has mapped it is killed."""
    os.truncate(path, path.stat().st_size // 2)


WAYS = (overwritten, replaced, truncated)
MOMENTS = ("before it is read", "while it is read", "before it is built", "while it scores")
BUT_READING = (MOMENTS[0], *MOMENTS[2:])


def at(moment: str, change: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Trigger a change at one moment of the next run."""
    if moment == MOMENTS[0]:
        _before(monkeypatch, loading, "load", change)
    elif moment == MOMENTS[1]:
        _before(monkeypatch, reading, "content_sha256", change)  # of the first shard: the others are still to come
    elif moment == MOMENTS[2]:
        from transformers import AutoConfig

        _before(monkeypatch, AutoConfig, "from_pretrained", change)
    else:
        _before(monkeypatch, loading.LoadedModel, "describe", change)


def _before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[[], None]) -> None:
    function, happened = getattr(owner, name), []

    def changing(*given: Any, **options: Any) -> Any:
        if not happened:
            happened.append(True)
            change()
        return function(*given, **options)

    monkeypatch.setattr(owner, name, changing)


def aged(model: Path) -> Path:
    """A copy with older file times."""
    for path in [model, *model.rglob("*")]:
        status = path.stat()
        os.utime(path, (status.st_atime - SETTLED, status.st_mtime - SETTLED))
    return model


def outcome(command: Command, model: Path, runs: Path, expected: Numbers) -> str:
    """Return whether a command failed without numbers, or gave the original's; anything else is a test failure."""
    try:
        found = command(model, runs)
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert not list(runs.glob("*/results.json"))
        return "refused"
    assert found == expected
    return "the original's"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", fast(["run", "lm-eval", "longbench"], ["run", "lm-eval", "longbench", "needle"]))
def test_weights_that_change(
    name: str,
    moment: str,
    way: Callable[[Path, Path], None],
    original: Path,
    other: Path,
    commands: dict[str, Command],
    expected: dict[str, Numbers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = aged(Path(shutil.copytree(original, tmp_path / "tiny")))

    def change() -> None:
        for shard in sorted(model.glob("*.safetensors")):
            way(shard, other / shard.name)

    at(moment, change, monkeypatch)
    ended = outcome(commands[name], model, tmp_path / "runs", expected[name])
    assert ended == ("the original's" if moment in MOMENTS[2:] else "refused")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", BUT_READING)
def test_a_gguf_file_that_changes(
    moment: str,
    way: Callable[[Path, Path], None],
    gguf_files: tuple[Path, Path],
    commands: dict[str, Command],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dequantised copy is read; a changed file has another copy."""
    model = Path(shutil.copy(gguf_files[0], tmp_path / "tiny.gguf"))
    before = commands["run"](aged(model), tmp_path / "before")
    at(moment, lambda: way(model, gguf_files[1]), monkeypatch)
    runs = tmp_path / "runs"
    assert outcome(commands["run"], model, runs, before) == ("refused" if moment == MOMENTS[0] else "the original's")


@pytest.mark.parametrize("way", fast([overwritten], WAYS))
@pytest.mark.parametrize("moment", BUT_READING)
def test_the_copy_of_a_gguf_file_that_changes(
    moment: str,
    way: Callable[[Path, Path], None],
    gguf_files: tuple[Path, Path],
    commands: dict[str, Command],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A modified copy is created again."""
    model = aged(Path(shutil.copy(gguf_files[0], tmp_path / "tiny.gguf")))
    expected = commands["run"](model, tmp_path / "before")
    commands["run"](Path(shutil.copy(gguf_files[1], tmp_path / "other.gguf")), tmp_path / "before")
    mine, others = sorted(
        (tmp_path / "cache" / "gguf").glob("*/model.safetensors"),
        key=lambda path: not path.parent.name.startswith(file_sha256(model)),
    )
    at(moment, lambda: way(mine, others), monkeypatch)
    assert outcome(commands["run"], model, tmp_path / "runs", expected) == "the original's"


def test_a_gguf_file_that_changes_while_it_is_dequantised(
    gguf_files: tuple[Path, Path], commands: dict[str, Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = aged(Path(shutil.copy(gguf_files[0], tmp_path / "tiny.gguf")))
    expected = commands["run"](gguf_files[0], tmp_path / "before")
    shutil.rmtree(tmp_path / "cache" / "gguf")
    _before(monkeypatch, gguf_reading, "_read", lambda: overwritten(model, gguf_files[1]))
    assert outcome(commands["run"], model, tmp_path / "runs", expected) == "the original's"


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two of the same shapes, and other weights."""
    place = tmp_path_factory.mktemp("gguf")
    sources = [tiny_checkpoint(place / str(seed), seed=seed, window=192) for seed in (0, 1)]
    first, second = (write_gguf(source, place / f"{source.name}.gguf") for source in sources)
    return first, second


def test_a_hub_snapshot_whose_links_change(
    original: Path, other: Path, commands: dict[str, Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache holds links to files that are named by content."""
    model = tmp_path / "snapshots" / "main"
    model.mkdir(parents=True)
    for path in original.iterdir():
        (model / path.name).symlink_to(path)
    expected = commands["run"](model, tmp_path / "before")

    def change() -> None:
        for link in model.glob("*.safetensors"):
            link.unlink()
            link.symlink_to(other / link.name)

    with monkeypatch.context() as once:
        at(MOMENTS[0], change, once)
        assert outcome(commands["run"], model, tmp_path / "runs", expected) == "refused"
    assert commands["run"](model, tmp_path / "runs") != expected


SMALL = {
    "config.json": ("run", "longbench"),
    "tokenizer.json": ("run", "needle"),
    "tokenizer/tokenizer.json": ("run",),
    "generation_config.json": ("lm-eval", "longbench", "needle"),
}
"""Small files, and commands whose numbers depend on them."""


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in SMALL.items() for name in names])
def test_small_files_that_change(
    file: str,
    name: str,
    moment: str,
    original: Path,
    commands: dict[str, Command],
    expected: dict[str, Numbers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = aged(Path(shutil.copytree(original, tmp_path / "tiny")))
    if file.startswith("tokenizer/"):
        tiny_tokenizer(model / "tokenizer")
        locate = locating.locate
        monkeypatch.setattr(
            "evalkit.models.loading.spec.locate",
            lambda given, **options: locate(given, **options | {"tokenizer": str(model / "tokenizer")}),
        )
    at(moment, lambda: _edit(model / file), monkeypatch)
    ended = outcome(commands[name], model, tmp_path / "runs", expected[name])
    assert ended == ("the original's" if moment in MOMENTS[2:] else "refused")


def _edit(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if path.name == "tokenizer.json":
        # Swap two words
        words = content["model"]["vocab"]
        words["e"], words["t"] = words["t"], words["e"]
    content |= {"config.json": {"rms_norm_eps": 0.5}, "generation_config.json": {"eos_token_id": [1, 40]}}.get(
        path.name, {}
    )
    path.write_text(json.dumps(content), encoding="utf-8")


def test_weights_that_are_rewritten_as_they_are_give_the_same_numbers(
    original: Path, commands: dict[str, Command], expected: dict[str, Numbers], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = aged(Path(shutil.copytree(original, tmp_path / "tiny")))
    at(MOMENTS[0], lambda: [overwritten(path, path) for path in model.glob("*.safetensors")] and None, monkeypatch)
    assert outcome(commands["run"], model, tmp_path / "runs", expected["run"]) == "the original's"


def test_after_a_refusal_the_same_command_scores_the_new_weights(
    original: Path, other: Path, commands: dict[str, Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = aged(Path(shutil.copytree(original, tmp_path / "tiny")))
    new = commands["run"](other, tmp_path / "new")
    with monkeypatch.context() as once:
        at(MOMENTS[0], lambda: _replace_all(model, other), once)
        with pytest.raises(
            CheckpointError, match=r"changed since this run was started \(weights\).*run the command again"
        ):
            commands["run"](model, tmp_path / "runs")
    assert commands["run"](model, tmp_path / "runs") == new


def _replace_all(model: Path, other: Path) -> None:
    for shard in sorted(model.glob("*.safetensors")):
        replaced(shard, other / shard.name)
