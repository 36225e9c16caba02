"""`evalkit figure` through its real entry point: files, what it prints, and errors of bad input."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from evalkit.benchmarks.attention.groups import KINDS
from evalkit.studies.study import save_record
from evalkit.studies.study_file import read_study
from tests.benchmarks.attention.made import made_run
from tests.cli.test_root import Command, _no_settings, complains, evalkit
from tests.studies.made import write_study
from tests.test_api import heavy_after
from tests.tiny import tiny_checkpoint

__all__ = ["_no_settings", "evalkit"]  # fixtures


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two finished runs."""
    folder = tmp_path_factory.mktemp("figures") / "runs"
    for name in ("vanilla", "diff"):
        made_run(folder, f"models/{name}", tokens=(65, 100), documents=2)
    return folder


@pytest.fixture
def folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of these runs, which the command finds."""
    monkeypatch.setenv("EVALKIT_OUTPUT", str(root))
    return sorted((path.name for path in root.iterdir()), reverse=True)


def drawn(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))


def test_a_figure_and_its_numbers(evalkit: Command, folders: list[str]) -> None:
    outcome = evalkit("figure", "entropy", *folders, "-o", "new/entropy.png")
    assert outcome == (0, "new/entropy.png\nnew/entropy.csv\n", "")
    assert Path("new/entropy.png").read_bytes().startswith(b"\x89PNG")
    assert list(dict.fromkeys(row["run"] for row in drawn("new/entropy.csv"))) == ["vanilla", "diff"]


@pytest.mark.slow
def test_all_figures(evalkit: Command, folders: list[str]) -> None:
    outcome = evalkit("figure", "--all", *folders, "-o", "figures", "--band", "samples")
    assert outcome.err == ""
    expected = [f"figures/{name}.{ending}" for name in KINDS for ending in ("pdf", "png", "csv")]
    assert outcome.out.splitlines() == expected
    assert all(Path(path).stat().st_size > 300 for path in expected)


def test_all_leaves_out_what_cannot_be_drawn(evalkit: Command, folders: list[str], tmp_path: Path) -> None:
    less = made_run(tmp_path / "more", "models/less", groups=("negative", "rank"))
    outcome = evalkit("figure", "--all", less.folder, "-o", "figures")
    assert outcome.code == 0
    assert {path.name for path in Path("figures").iterdir()} == {
        f"{name}.{ending}" for name in ("negative", "rank") for ending in ("pdf", "png", "csv")
    }
    left = [line.split(": ")[1] for line in outcome.err.splitlines() if line.startswith("left out: ")]
    assert left == [name for name in KINDS if name not in ("negative", "rank")]
    none = made_run(tmp_path / "more", "models/none", groups=("similarity",), heads=2)
    shown = evalkit("figure", "--all", none.folder, "-o", "other", "--layers", "7")
    assert shown.code == 2
    assert shown.err.splitlines()[-1] == "evalkit: the runs have the measures of no figure; see the reasons above"


def test_names_and_help_import_no_heavy_library() -> None:
    listing = "from evalkit.cli.root import cli\nimport evalkit.cli.comparing"
    more = "cli.main(['figure', '--list'], standalone_mode=False)\nimport sys\nassert 'matplotlib' not in sys.modules"
    assert heavy_after(f"{listing}\n{more}") == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["name a figure: bos, categories", "--all"]),
        (["entropi", "x"], ["unknown figure 'entropi'", "did you mean 'entropy'"]),
        (["entropy", "x", "-o", "a.gif"], ["a.gif", ".png, .pdf or .svg"]),
        (["entropy", "x", "--layers", "a"], ["--layers a: expected numbers"]),
        (["entropy", "x", "--measure", "bos"], ["--measure does not apply to figure entropy"]),
    ],
)
def test_invalid_commands(evalkit: Command, arguments: list[str], words: list[str]) -> None:
    Path("file").touch()
    complains(evalkit("figure", *arguments), 2, *words)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study of two models, one with two seeds of which one is finished, and a third without a run."""
    benchmarks = {"zs": {"suite": "zeroshot8"}, "maps": {"suite": "attention", "sample": 2}}
    for name in ("base", "intg-1", "intg-2", "new"):
        tiny_checkpoint(tmp_path / name)
    checkpoints = {"base": "base", "intg": "intg-*", "new": "new"}
    path = write_study(tmp_path / "study.yaml", checkpoints=checkpoints, benchmarks=benchmarks)
    study = read_study(path)
    for one in study.runs:
        if one.benchmark.name == "maps" and one.checkpoint.name != "new":
            run = made_run(study.output, one.checkpoint.model, documents=2)
            save_record(study.output, one, run.folder, run.manifest["id"])
    return path


def test_a_study(evalkit: Command, study: Path) -> None:
    outcome = evalkit("figure", "entropy", "--study", study)
    assert outcome.code == 0
    assert list(dict.fromkeys(row["run"] for row in drawn("entropy.csv"))) == ["base", "intg seed 1", "intg seed 2"]
    assert "Not finished: new on maps." in outcome.err.splitlines()
    assert evalkit("figure", "entropy", "intg", "base", "--study", study, "--benchmark", "maps").code == 0
    assert list(dict.fromkeys(row["run"] for row in drawn("entropy.csv"))) == ["intg seed 1", "intg seed 2", "base"]
