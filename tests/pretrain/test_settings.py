"""Settings files: paths relative to the file, and errors that name the file and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe.packing import _identity, digest_of, documents
from recipe.settings import read_recipe, read_training_study

from evalkit.errors import UsageError
from evalkit.models.zoo.named import models
from tests.pretrain.settings_files import EXAMPLE, write_recipe

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"leraning_rate": 1}, "unknown key 'leraning_rate': did you mean 'learning_rate'?"),
    "an unknown key of a text": ({"text": [{"file": ["a"]}]}, "'text[0]': unknown key 'file'"),
    "no text": ({"text": None}, "it lacks 'text'"),
    "an empty text": ({"text": []}, "'text' is "),
    "no source": ({"text": [{}]}, "'text[0]': give either files or dataset"),
    "two sources": ({"text": [{"files": ["a"], "dataset": "b"}]}, "'text[0]': give either files or dataset"),
    "no learning rate": ({"learning_rate": None}, "it lacks 'learning_rate'"),
    "a text for a number": ({"steps": "20"}, "'steps' is "),
    "a number for a text": ({"model": 3}, "'model' is "),
    "no update": ({"steps": 0}, "'steps' is "),
    "one beta": ({"betas": [0.9]}, "it lacks 'betas[1]'"),
    "a beta of 1": ({"betas": [0.9, 1.0]}, "'betas[1]' is 1.0"),
    "another schedule": (
        {"schedule": "cosin"},
        "'schedule' is ",
    ),
    "another precision": ({"precision": "float16"}, "'precision' is "),
    "an unknown model": ({"model": "llama-125m-vanila"}, "'model': unknown model 'llama-125m-vanila'"),
    "a model's file": ({"model": "none.yaml:x"}, "'model': none.yaml"),
    "a text's file": ({"held_out": [{"files": ["none.txt"]}]}, "'held_out[0].files': {folder}/none.txt is no file"),
    "a pattern": (
        {"text": [{"dataset": "json", "data_files": "none/*.jsonl"}]},
        "'text[0].data_files': no file matches {folder}/none/*.jsonl",
    ),
    "a folder for a pattern": (
        {"text": [{"dataset": "json", "data_files": "../*"}]},
        "'text[0].data_files': no file matches {folder}/../*",
    ),
    "an evaluation": ({"evaluate": {"sample": 0}}, "'evaluate.sample' is "),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_file_and_key(shared: Path, tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    path = write_recipe(tmp_path, shared, **change)
    with pytest.raises(UsageError) as raised:
        read_recipe(path)
    assert str(raised.value).startswith(f"{path}: {message.format(folder=tmp_path)}")


def test_paths_are_relative_to_the_file(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models.yaml", "text.jsonl"):
        (tmp_path / name).write_bytes((shared / name).read_bytes())
    (tmp_path / "tokens").mkdir()
    text = [{"files": ["text.jsonl"]}, {"dataset": "json", "data_files": "text.jsonl"}, {"dataset": "HuggingFaceTB/x"}]
    path = write_recipe(tmp_path, shared, model="models.yaml:cog", tokenizer="tokens", text=text)
    monkeypatch.chdir("/")
    recipe = read_recipe(path)
    assert recipe.model == f"{tmp_path}/models.yaml:cog"
    assert recipe.tokenizer == str(tmp_path / "tokens")
    assert recipe.text[0].files == (str(tmp_path / "text.jsonl"),)
    assert recipe.text[1].data_files == str(tmp_path / "text.jsonl")
    assert (recipe.text[1].dataset, recipe.text[2].dataset) == ("json", "HuggingFaceTB/x")
    # Names that are no paths stay names
    path = write_recipe(tmp_path, shared, model="llama-125m-cog", tokenizer="mistralai/Mixtral-8x7B-v0.1")
    assert (read_recipe(path).model, read_recipe(path).tokenizer) == ("llama-125m-cog", "mistralai/Mixtral-8x7B-v0.1")


def test_patterns_are_relative_to_the_file(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose name has a pattern's characters too; not those of the hub, of URLs, and from the root."""
    folder, other = tmp_path / "texts [1]", tmp_path / "other"
    for place in (folder, other):
        place.mkdir()
        (place / "a.jsonl").write_text(json.dumps({"text": place.name}))
    monkeypatch.chdir(other)
    given = [("json", "*.jsonl"), ("json", str(other / "*.jsonl")), ("json", "https://example.org/*.jsonl"),
             ("some/name", "*.jsonl")]  # fmt: skip
    path = write_recipe(folder, shared, text=[{"dataset": name, "data_files": files} for name, files in given])
    near, absolute, remote, hub = read_recipe(path).text
    assert (remote.data_files, hub.data_files) == (given[2][1], given[3][1])
    assert list(documents(near)) == ["texts [1]"]
    assert list(documents(absolute)) == ["other"]
    assert _identity(near)["files"] == [digest_of(folder / "a.jsonl")]
    assert _identity(hub)["files"] == _identity(remote)["files"] == []


def test_a_study(shared: Path, tmp_path: Path) -> None:
    write_recipe(tmp_path, shared)
    path = tmp_path / "study.yaml"
    keys: dict[str, Any] = {"recipe": "recipe.yaml", "models": {"a": f"{shared}/models.yaml:cog"}, "seeds": [1, 2],
                            "output": "trained"}  # fmt: skip
    path.write_text(json.dumps(keys))
    study, recipe = read_training_study(path)
    assert (study.output, study.models) == (str(tmp_path / "trained"), keys["models"])
    assert recipe == read_recipe(tmp_path / "recipe.yaml")
    model = f"{shared}/models.yaml:cog"
    names = ["a-1.b_C", "-", "größe"]
    path.write_text(json.dumps(keys | {"models": dict.fromkeys(names, model), "seeds": [0, 2**32 - 1]}))
    assert list(read_training_study(path)[0].models) == names
    for change, message in [
        ({"models": {"a": "nine"}}, "'models.a': unknown model 'nine'"),
        ({"seeds": []}, "'seeds' is "),
        ({"seeds": [1, -1]}, "'seeds[1]' is "),
        ({"seeds": [2**32]}, "'seeds[0]' is "),
        *(
            ({"models": {name: f"{shared}/models.yaml:cog"}}, f"'models': the name {name!r} is no folder's")
            for name in ("../esc", "a/b", r"a\b", ".a", "..", "", "a\n", "a b", "C:")
        ),
        ({"seed": [1]}, "unknown key 'seed': did you mean 'seeds'?"),
    ]:
        path.write_text(json.dumps(keys | change))
        with pytest.raises(UsageError) as raised:
            read_training_study(path)
        assert str(raised.value).startswith(f"{path}: {message}")


def test_the_papers_settings() -> None:
    """What its appendix states: AdamW, 3e-4, 10,000 updates of warm-up, 2M tokens a batch, rows of 2,048, 28 B tokens,
    16 rows on each of 8 devices; and a model of evalkit's with Mixtral's vocabulary.
    """
    recipe = read_recipe(EXAMPLE / "paper.yaml")
    assert (recipe.learning_rate, recipe.warmup_steps, recipe.length, recipe.precision) == (
        3e-4,
        10_000,
        2048,
        "bfloat16",
    )
    assert recipe.batch * recipe.length == 2**21
    assert recipe.batch % (8 * recipe.micro_batch) == 0
    assert recipe.micro_batch == 16
    assert recipe.tokens == pytest.approx(28e9, rel=1e-3)
    [text] = recipe.text
    assert (text.dataset, text.config, text.tokens) == ("HuggingFaceTB/smollm-corpus", "cosmopedia-v2", None)
    named = {model.name: model.shape for model in models()}
    assert named[recipe.model].vocabulary == 32_000


def test_the_small_settings_are_the_replications() -> None:
    small, replication = (
        yaml.safe_load((EXAMPLE / path).read_text()) for path in ("small.yaml", "../replication/recipe.yaml")
    )
    for key in small.keys() - {"model", "text"}:
        assert small[key] == replication[key]
