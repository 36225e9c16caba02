"""Which runs a checkpoint's name means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import evalkit
from evalkit.cli.root import cli
from evalkit.comparison.naming import find_run, find_runs
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.models.loading.fingerprint import fingerprint
from evalkit.models.loading.locate import locate
from evalkit.runs.folder import MANIFEST, RESULTS
from tests.comparison.made import answers, make_run, scores_of

TABLE = {"arc_easy": scores_of("arc_easy", answers(0, 0.5, 60))}
PROMPTS = {"templates": ["plain", "inst"], "choice_orders": 1}
NEVER: dict[str, dict[str, Any]] = {
    "control swap": {"control": "swap"},
    "mean over prompts": {"prompts": PROMPTS},
    "quantisation w4g64": {"quantise": "w4g64"},
    "imported": {"imported": True, "log": "a"},
    "look": {"limit": None, "sample": 200, "seed": 0, "earlier": []},
}
"""What distinguishes a run that no name of a checkpoint means → its entries."""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., str]:
    """Make a run of a checkpoint, created on a day; return its folder's name."""

    def run(model: str, day: int = 1, weights: str = "", template: str = "plain", **more: Any) -> str:
        about = {"created": f"2026-11-{day:02}T10:00:00+00:00", "template": {"name": template}}
        about |= {key: more.pop(key) for key in ("name", "path", "kind") if key in more}
        if more.pop("imported", False):
            about["imported"] = {"origin": "lm-eval 0.4.13", "files": ["a"]}
        specification = {"checkpoint": {"weights": weights or model}, "template": template} | more
        return make_run(tmp_path, TABLE, model=model, manifest=about, **specification).name

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Write what stands for a checkpoint with these weights."""

    def write(name: str, weights: str) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text("{}", encoding="utf-8")
        (path / "tokenizer.json").write_text("{}", encoding="utf-8")
        (path / "model.safetensors").write_text(weights, encoding="utf-8")
        return path

    return write


def state(path: Path) -> dict[str, Any]:
    """The entries of a run of a checkpoint as it is now."""
    return {"checkpoint": asdict(fingerprint(locate(str(path)))), "path": str(path)}


def chosen(root: Path, *names: str) -> list[str]:
    return [run.folder.name for run in find_runs(names, root)]


def test_the_run_that_is_measured_as_the_other_sides(
    make: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, older, part = make("org/a", 3), make("org/a", 2, dtype="float16"), make("org/a", 4, limit=20)
    other_part, other_half = make("org/b", 1, limit=20), make("org/c", 1, dtype="float16")
    assert chosen(tmp_path, "a", "b") == chosen(tmp_path, "org/a", other_part) == [part, other_part]
    err = capsys.readouterr().err
    assert f"a: {part} (" in err and "limit 20" in err and "3 runs" in err
    assert chosen(tmp_path, "c", "a") == [other_half, older]
    assert chosen(tmp_path, "a", "b", "b") == [part, other_part, other_part]
    for names in (("b", "c"), ("a", "b", "c"), ("b", other_half)):
        with pytest.raises(UsageError, match=r"measured alike.*limit|first 20 documents.*float16"):
            chosen(tmp_path, *names)
    # What is named exactly is compared, whatever it is
    assert chosen(tmp_path, other_part, other_half) == [other_part, other_half]
    assert whole in chosen(tmp_path, whole, part)


@pytest.mark.parametrize("more", NEVER.values(), ids=NEVER)
def test_no_control_varied_rounded_or_imported_run_is_meant(
    make: Callable[..., str], tmp_path: Path, more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """However new they are, and though they are measured alike."""
    plain, other = make("org/a", 1), make("org/b", 1)
    special, of_other = make("org/a", 2, **more), make("org/b", 2, **more)
    assert chosen(tmp_path, "a", "b") == [plain, other] and find_run("a", tmp_path).folder.name == plain
    assert f"a: {plain} (zeroshot8, plain, float32, all documents), of 2 runs" in capsys.readouterr().err
    assert chosen(tmp_path, special, of_other) == [special, of_other]
    only = make("org/only", 1, **more)
    with pytest.raises(UsageError, match=rf"'only' .*{only[-12:][:7]} \(\S"):
        find_run("only", tmp_path)
    if "imported" in more:  # and measured alike
        assert chosen(tmp_path, "a", of_other) == [plain, of_other]
    else:
        with pytest.raises(UsageError, match="measured alike") as listed:
            chosen(tmp_path, "a", of_other)
        assert "()" not in str(listed.value)


def test_two_prompts_are_never_paired(make: Callable[..., str], tmp_path: Path) -> None:
    """Though the runs under plain, or of all documents, are the newest."""
    make("org/demo", 3)
    inst, other = make("org/demo", 1, template="inst", limit=20), make("org/other", 2, template="inst", limit=20)
    assert chosen(tmp_path, "demo", "other") == [inst, other]
    make("org/third", 2)
    with pytest.raises(
        UsageError, match=r": \w+ \(org/other, zeroshot8, inst, .*; \w+ \(org/third, zeroshot8, plain, "
    ):
        chosen(tmp_path, "other", "third")


def test_of_several_the_defaults(make: Callable[..., str], tmp_path: Path) -> None:
    """All documents, under the suite's prompt; if none has the fewest settings, all are listed."""
    plain, part, inst = make("org/a", 2), make("org/a", 4, limit=20), make("org/a", 1, template="inst")
    assert find_run("a", tmp_path).folder.name == inst
    others = make("org/b", 2), make("org/b", 4, limit=20)
    assert chosen(tmp_path, "a", "b") == [plain, others[0]] and part
    make("org/c", 1)
    make("org/c", 2, template="inst", limit=20)
    listed = r"'c' matches 2 runs.*: \w+ \(zeroshot8, inst, float32, limit 20, 2026-11-02 .*; \w+ \(zeroshot8, plain, "
    with pytest.raises(UsageError, match=listed):
        find_run("c", tmp_path)
    make("org/d", 1, dtype="float16")
    make("org/d", 2, dtype="bfloat16")
    with pytest.raises(
        UsageError, match=r"inst|bfloat16, all documents, .*; \w+ \(zeroshot8, plain, float16, all documents, "
    ):
        find_run("d", tmp_path)
    first, _ = make("org/e", 1), make("org/e", 2, suite="olmes")
    assert find_run("e", tmp_path).folder.name == first
    assert find_run("e", tmp_path, lambda run: run.suite == "olmes").suite == "olmes"


def test_the_default_suite_comes_first(make: Callable[..., str], tmp_path: Path) -> None:
    """Before all other settings, of one name and of several; without it the only pair."""
    for name in "ab":
        make(f"org/{name}", 2, suite="olmes")
    parts = make("org/a", 1, limit=5), make("org/b", 1, limit=5)
    assert chosen(tmp_path, "a") == [parts[0]] and chosen(tmp_path, "a", "b") == [*parts]
    make("org/c", 1)
    others = make("org/c", 2, suite="olmes"), make("org/d", 1, suite="olmes")
    assert chosen(tmp_path, "c", "d") == [*others]
    make("org/d", 3, suite="longbench")
    make("org/c", 4, suite="longbench")
    with pytest.raises(UsageError, match=r"several runs that are measured alike.*longbench, .*olmes, ") as listed:
        chosen(tmp_path, "c", "d")
    assert len(listed.value.problems) == 5  # type: ignore[attr-defined]


def test_runs_that_differ_only_in_a_library_are_listed(make: Callable[..., str], tmp_path: Path) -> None:
    make("org/a", versions={"torch": "1"})
    make("org/a", 2, versions={"torch": "2"})
    with pytest.raises(UsageError, match=r"1 task, 2026-11-02.*1 task, 2026-11-01"):
        chosen(tmp_path, "a")


def test_a_page_and_a_mixed_table_show_runs_that_are_not_alike(make: Callable[..., str], tmp_path: Path) -> None:
    make("org/a")
    make("org/b", dtype="bfloat16")
    mapping = tmp_path / "runs.yaml"
    mapping.write_text("rows: {vanilla_125m: a, intg_125m: b}", encoding="utf-8")
    table = ["table", "main_res", "--source", "runs", "--runs", str(mapping), "--in", str(tmp_path)]
    page = ["report", "a", "b", "--without-documents", "-o", str(tmp_path / "page.html"), "--in", str(tmp_path)]
    for command in (page, [*table, "--allow-mixed"]):
        result = CliRunner().invoke(cli, command)
        assert result.exit_code == 0, (result.output, result.exception)
    assert "--allow-mixed" in str(CliRunner().invoke(cli, table, standalone_mode=False).exception)


def test_a_folder_means_its_present_files(
    make: Callable[..., str], folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Overwritten, written again, moved and copied."""
    monkeypatch.chdir(tmp_path)
    path = folder("last", "first")
    old = make("last", 1, **state(path))
    folder("last", "second")
    new = make("last", 2, limit=20, **state(path))
    assert chosen(tmp_path, "last") == [new]
    folder("last", "first")  # whose run is opened again, and has its old date
    assert chosen(tmp_path, "last") == chosen(tmp_path, str(path)) == [old]
    folder("last", "third")
    with pytest.raises(RunError, match=r"last.*present files"):
        chosen(tmp_path, "last")
    folder("copy", "second")
    capsys.readouterr()
    assert chosen(tmp_path, "copy") == [new] and f"copy: {new}" in capsys.readouterr().err
    for name in ("config.json", "tokenizer.json"):
        (folder("copy", "second") / name).write_text('{"other": 1}', encoding="utf-8")
        with pytest.raises(RunError, match="present files"):
            chosen(tmp_path, "copy")
        (tmp_path / "copy" / name).write_text("{}", encoding="utf-8")
    # Of a folder without weights the files are unknown
    (path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"several states.*2026-11-02.*2026-11-01"):
        chosen(tmp_path, "last")


def test_no_namesake_is_meant(
    make: Callable[..., str], folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is here, was overwritten on the hub, has the last part of a name, or begins alike."""
    make("elsewhere/checkpoint-7", path="/elsewhere/checkpoint-7")
    make("elsewhere/model.gguf", path="/elsewhere/model.gguf")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    folder("here/checkpoint-7", "weights")
    Path("model.gguf").write_bytes(b"never evaluated")
    Path("weights-gone").mkdir()
    Path("weights-gone/config.json").write_text("{}", encoding="utf-8")
    make("elsewhere/weights-gone", path="/elsewhere/weights-gone")
    for name in ("checkpoint-7", "model.gguf", "weights-gone"):
        with pytest.raises(RunError, match=name):
            chosen(tmp_path, name)
    make("org/last", 1)
    make("org/last", 2, weights="trained further")
    make("org/step", 1)
    make("their/step", 3)
    for name in ("last", "org/last", "step"):
        with pytest.raises(UsageError, match=r"several checkpoints.*2026-11-0|org/step.*their/step"):
            chosen(tmp_path, name)
    make("tuned-further", 1)
    make("their/tuned-less", 1)
    for name in ("tuned", "tuned-furth", "t", "their/tuned-l"):
        with pytest.raises(UsageError, match=rf"'{name}' is only the beginning.*tuned-(further|less)"):
            chosen(tmp_path, name)
    with pytest.raises(UnknownNameError, match="known name"):
        chosen(tmp_path, "other")


def test_own_names_ids_and_their_beginnings_are_exact(make: Callable[..., str], tmp_path: Path) -> None:
    special = make("org/a", control="swap", name="swapped")
    make("org/a")
    for name in ("swapped", special, special[:-3], special[-12:], special[-12:][:5], str(tmp_path / special)):
        assert chosen(tmp_path, name) == [special]
    usual = make("org/a", 2, name="swapped", limit=3)
    assert chosen(tmp_path, "swapped") == [usual]


@pytest.mark.slow
def test_two_checkpoints_of_the_same_files(
    make: Callable[..., str], folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Each name means its own run; a comparison says why there is none."""
    first, second = folder("best", "weights"), folder("step1000", "weights")
    runs = make("best", **state(first)), make("step1000", **state(second))
    assert chosen(tmp_path, str(first), str(second)) == [*runs]
    with pytest.raises(UsageError, match="one checkpoint under the same settings"):
        evalkit.compare(first, second, root=tmp_path)


def test_an_unfinished_or_damaged_run_is_not_passed_over(make: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / make("org/last", 2) / RESULTS).unlink()
    with pytest.raises(RunError, match="not finished"):
        chosen(tmp_path, "last")
    assert not evalkit.load_run("last", root=tmp_path).complete
    torn = tmp_path / make("step100", 4)
    (torn / RESULTS).unlink()
    (torn / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=MANIFEST):
        chosen(tmp_path, "step100")


def test_every_command_has_the_rule(make: Callable[..., str], tmp_path: Path) -> None:
    """Of two checkpoints with a control, and one run each that has other documents."""
    for name in "ab":
        make(f"org/{name}", 1)
        make(f"org/{name}", 2, control="swap", limit=30)
        make(f"org/{name}", 3, limit=20)
    mapping = tmp_path / "runs.yaml"
    mapping.write_text("rows: {vanilla_125m: a, intg_125m: b}", encoding="utf-8")
    page, root = str(tmp_path / "page.html"), ["--in", str(tmp_path)]
    commands = [
        ["compare", "a", "b", *root], ["compare", "a", "b", "--group", "c=a", *root], ["plan", "a", "b", *root],
        ["compare", "--curve", "a", "b", *root], ["show", "a", "b", *root], ["rescore", "a", *root],
        ["report", "a", "b", "--without-documents", "-o", page], ["export", "a", "--to", "hub"], ["integrity", "a"],
        ["table", "main_res", "--source", "runs", "--runs", str(mapping)],
    ]  # fmt: skip
    for command in commands:
        result = CliRunner().invoke(cli, command, env={"EVALKIT_OUTPUT": str(tmp_path)})
        said = [line for line in result.stderr.splitlines() if "of 3 runs that match" in line]
        assert said and all("all documents" in line for line in said), (command, result.output, result.exception)
    compared = evalkit.compare("a", "b", root=tmp_path)
    assert [Path(folder).name for folder in (*compared.runs_a, *compared.runs_b)] == chosen(tmp_path, "a", "b")
