"""`evalkit attention` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalkit.cli import main


def ended(capsys: Any, *given: object) -> tuple[int, str, str]:
    """Return a command's exit code and output."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*map(str, given)])
    return int(left.value.code or 0), *capsys.readouterr()


@pytest.fixture
def command(checkpoint: Path, documents: Path, tmp_path: Path) -> list[object]:
    """An analysis of a few documents."""
    own = ["--data-dir", documents, "--allow-unofficial-data", "--device", "cpu", "--output", tmp_path / "runs"]
    return ["attention", checkpoint, "--tasks", "piqa", "--sample", 3, "--measures", "bos,entropy", *own]


def test_it_prints_a_line_for_each_layer_and_opens_a_finished_run(
    command: list[object], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = ended(capsys, *command)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["layer", "bos_abs", "entropy", "entropy_shifted"]
    assert [line.split()[0] for line in lines[2:6] if not line.startswith("-")] == ["0", "1", "all"]
    assert "left out, equal without negative weights: bos\n" in out
    assert "3 documents of 1 task, seed 0, gold continuation" in out
    monkeypatch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
    code, again, _ = ended(capsys, *command)
    assert (code, again) == (0, out)
    code, text, _ = ended(capsys, *command, "--format", "json")
    measures = json.loads(text)["measures"]
    assert set(measures) == {"bos", "bos_abs", "entropy", "entropy_shifted"}
    code, text, _ = ended(capsys, *command, "--format", "csv")
    assert text.splitlines()[0] == "layer,measure,n,value,stderr"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--measures", "bos,rnak"], "unknown measure 'rnak': did you mean 'rank'"),
        (["--layers", "-1,x"], "--layers -1,x: expected numbers of layers"),
        (["--layers", "7"], "--layers: the model has no attention layer 7; its layers are 0 to 1, or -1 to -2"),
        (["--text", "nowhere.txt"], "--tasks: is for the documents of tasks; leave it out, or --text"),
        (["--sample", "0"], "sample"),
        (["--continuation", "best"], "best"),
    ],
)
def test_mistakes_are_one_line(command: list[object], given: list[str], said: str, capsys: Any) -> None:
    options = {str(name): at for at, name in enumerate(command)}
    if given[0] in options:
        del command[options[given[0]] : options[given[0]] + 2]
    code, out, err = ended(capsys, *command, *given)
    assert code in (1, 2)
    assert not out
    assert said in err.splitlines()[-1]


def test_words_need_spacy(command: list[object], capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is loaded."""
    from importlib.metadata import PackageNotFoundError

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("evalkit.benchmarks.attention.categories.metadata.version", absent)
    place = command.index("bos,entropy")
    command[place] = "mass"
    code, _, err = ended(capsys, *command)
    assert code == 2
    assert "pip install 'evalkit-checkpoints[attention]'" in err
