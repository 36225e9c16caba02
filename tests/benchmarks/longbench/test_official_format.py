"""Predictions in the official format, and `evalkit longbench score`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.longbench.official_format import read_predictions, write_predictions
from evalkit.benchmarks.longbench.protocol import TASKS, suite_tasks
from evalkit.cli import main
from evalkit.errors import DataError, RunError, UnknownNameError
from tests.benchmarks.longbench.made import generations, prediction, write
from tests.fixtures import official_scores


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main(["longbench", *map(str, arguments)])
    return int(done.value.code or 0)


def test_the_command_reproduces_official_scores(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", "--e", golden, "--format", "csv") == 0
    printed = capsys.readouterr()
    rows = [row for row in csv.DictReader(io.StringIO(printed.out)) if row["kind"] == "task"]
    found = {
        row["name"]: {name: float(score) for name in ("0-4k", "4-8k", "8k+") if (score := row[f"score_{name}"])}
        for row in rows
    }
    assert found == official_scores()
    assert "qasper.jsonl 672 for 224 (each 3 times)" in printed.err
    assert "multifieldqa_en.jsonl 300 for 150" in printed.err
    assert printed.err.count(".jsonl ") == 2


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "json", "csv"])
def test_every_form_has_the_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    lines = [prediction("cat", ["cat"]), prediction("dog", ["cat"], 5000), prediction("x", ["y"], 30)]
    file = write(tmp_path / "hotpotqa.jsonl", lines)
    assert command("score", "--e", file, "--format", form) == 0
    out = capsys.readouterr().out
    assert "33.33" in out
    assert "NaN" not in out
    assert "nan" not in out
    if form in ("terminal", "markdown"):
        cells = next(line for line in out.splitlines() if "HotpotQA" in line).replace("|", " ").split()
        assert cells == ["HotpotQA", "F1", "3", "33.33", "0.00", "to", "100.00", "50.00", "0.00", "–"]
        assert "Mean of groups (1 of 13 tasks)" in out
    if form == "json":
        found = json.loads(out)
        assert found["tasks"][0]["buckets"][2] == {"n": 0, "score": None, "low": None, "high": None}


def test_irregularities_are_reported_under_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = [prediction("a", [f"answer {number}"], number) for number in range(3)]
    write(tmp_path / "lcc.jsonl", once + once[::-1])  # several processes write in arbitrary order
    write(tmp_path / "qasper.jsonl", once)
    write(tmp_path / "multifieldqa_en.jsonl", [prediction("a", [str(number)], number) for number in range(151)])
    write(tmp_path / "vcsum.jsonl", once)
    assert command("score", tmp_path) == 0
    out = capsys.readouterr().out
    [note] = [line for line in out.splitlines() if line.startswith("more or fewer rows than documents: ")]
    assert "lcc.jsonl 6 for 3 (each 2 times)" in note
    assert "qasper.jsonl 3 for 200" in note
    assert "multifieldqa_en.jsonl 151 for 150" in note
    assert "skipped, since only the English tasks are scored: vcsum.jsonl" in out


def test_files_of_e_may_bear_its_suffix(tmp_path: Path) -> None:
    file = write(tmp_path / "lcc_e.jsonl", [prediction("x", ["x"])])
    assert read_predictions([file], "longbench-e").generations["task"].tolist() == ["lcc"]
    with pytest.raises(DataError, match="both of lcc"):
        read_predictions([file, write(tmp_path / "lcc.jsonl", [prediction("x", ["x"])])])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"pred": "x", "answers": ["x"], "length": 9}, "field 'all_classes'"),
        (prediction("x", []), "field 'answers'"),
        (prediction("x", "x"), "field 'answers'"),  # type: ignore[arg-type]
        (prediction(None, ["x"]), "field 'pred': expected a string, found None"),  # type: ignore[arg-type]
        (prediction("x", ["x"], "9", ["x"]), "field 'length'"),  # type: ignore[arg-type]
        (prediction("x", ["x"], 10**30, ["x"]), "field 'length': expected a number of words, found 1000"),
        (b'{"pred": "\\ud800", "answers": ["x"], "all_classes": ["x"], "length": 3}', "holds half of a surrogate pair"),
        (prediction("x", ["x"], all_classes=[1]), "field 'all_classes'"),  # type: ignore[list-item]
        (prediction("x", ["x"]), "field 'all_classes': expected the labels of trec"),
        ([], "expected a JSON object, found list"),
        (b"{", "one JSON object a line"),
        (b"\xff", "expected UTF-8, found the byte 0xff"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: Any, message: str) -> None:
    file = write(tmp_path / "trec.jsonl", [prediction("x", ["x"], all_classes=["x"]), bad])
    with pytest.raises(DataError, match=rf"trec\.jsonl, line 2 \(trec\): .*{message}"):
        read_predictions([file])
    assert command("score", file) == 1
    assert capsys.readouterr().err.startswith("evalkit: ")


def test_the_length_is_required_for_e_and_plots_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Same scores as the official scorer."""
    file = write(tmp_path / "hotpotqa.jsonl", [{"pred": "x", "answers": ["x"], "all_classes": None}])
    assert command("score", file) == 0
    assert "100.00" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"hotpotqa\.jsonl, line 1 .*field 'length'"):
        read_predictions([file], "longbench-e")
    assert command("score", file, "--plot", tmp_path / "lengths.png") == 1
    assert "some predictions have no field 'length'; leave out --plot" in capsys.readouterr().err


def test_files_of_e_without_the_flag_are_reported(golden: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score", golden / "hotpotqa.jsonl") == 0
    assert "hotpotqa.jsonl 300 for 200; score LongBench-E's files with --e" in capsys.readouterr().out


def test_irregular_files_are_one_note(tmp_path: Path) -> None:
    names = [task.name for task in suite_tasks("longbench-e")]
    labels = {"trec": "Person", "passage_retrieval_en": "Paragraph 1"}
    rows = {
        name: [prediction("x", [labels.get(name, "x")], n, ["Person"]) for n in range(TASKS[name].documents + 1)]
        for name in names
    }
    [note] = read_predictions([write(tmp_path / f"{name}.jsonl", lines) for name, lines in rows.items()]).notes
    assert note.count(".jsonl ") == len(names) == 13
    assert note.count("files with --e") == 1
    files = [write(tmp_path / f"{task}.jsonl", [prediction("x", ["x"])]) for task in ("musique", "qmsum", "lcc")]
    [note] = read_predictions(files, "longbench-e").notes
    assert note == f"skipped, since LongBench-E has no such task: {files[0]}, {files[1]}"


def test_what_stands_beside_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A byte-order mark, the official scores, a run of evalkit's own."""
    file = write(tmp_path / "hotpotqa.jsonl", [prediction("x", ["x"])])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    scores = write(tmp_path / "result.json", [{"hotpotqa": 1.0}])
    assert command("score", file, scores) == 0
    assert "result.json is skipped: it contains scores" in capsys.readouterr().out
    write(tmp_path / "manifest.json", [{}])
    with pytest.raises(DataError, match="is a run of evalkit; use evalkit longbench rescore"):
        read_predictions([tmp_path])


def test_files_that_are_no_predictions_are_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a folder with <task>.jsonl files, found none$"):
        read_predictions([tmp_path])
    inner = write(tmp_path / "pred" / "my-model" / "lcc.jsonl", [prediction("x", ["x"])]).parent
    with pytest.raises(DataError, match=rf"found none \(did you mean {inner}\?\)$"):
        read_predictions([tmp_path])
    with pytest.raises(DataError, match=r"lcc\.jsonl: no such file or folder"):
        read_predictions([tmp_path / "lcc.jsonl"])
    with pytest.raises(DataError, match="expected predictions, found none"):
        read_predictions([write(tmp_path / "lcc.jsonl", [b""])])
    with pytest.raises(UnknownNameError, match="did you mean 'hotpotqa'"):
        read_predictions([write(tmp_path / "hotpot.jsonl", [])])
    with pytest.raises(DataError, match=r"LongBench-E has no such task: .*musique\.jsonl"):
        read_predictions([write(tmp_path / "musique.jsonl", [])], "longbench-e")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    table = generations("lcc", ("x = '\u2028'\n", "é"), ("y", "z"), lengths=[3, 4])
    [file] = write_predictions(table, tmp_path / "pred")
    assert json.loads(file.read_bytes().split(b"\n")[0]) == prediction("x = '\u2028'\n", ["é"], 3)
    read = read_predictions([tmp_path / "pred"]).generations
    columns = ["task", "length", "prediction", "answers", "all_classes"]
    assert read[columns].to_dict("list") == table[columns].to_dict("list")
    with pytest.raises(RunError, match="cannot be written"):
        write_predictions(table, file)


def test_the_group_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("score") == 2
    assert command("scor") == 2
    assert "did you mean 'score'" in capsys.readouterr().err
