"""Every file of a finished run is bound to it: another run's file, or a flipped bit, is rejected."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evalkit.benchmarks.lm_eval.views import metrics_report
from evalkit.benchmarks.longbench.benchmark import LongBenchRequest
from evalkit.benchmarks.longbench.results import GENERATIONS, load_generations, report_of
from evalkit.benchmarks.multiple_choice.results_report import accuracy_table, rules_table
from evalkit.benchmarks.needle.benchmark import NEEDLES, Needle, NeedleRequest
from evalkit.benchmarks.registry import benchmark_of
from evalkit.benchmarks.request import provenance, request_of
from evalkit.benchmarks.run import evaluate
from evalkit.benchmarks.run_listing import list_found, runs_report
from evalkit.benchmarks.session import run_plan
from evalkit.display import Progress
from evalkit.errors import EvalkitError, RunError, UsageError
from evalkit.exchange.exports import FORMS, export_run
from evalkit.models.loading.locate import locate
from evalkit.models.loading.spec import ModelSpec
from evalkit.runs.folder import JOURNAL, MANIFEST, RESULTS, SCORES, Run, load_run
from evalkit.runs.writing import find_finished, open_run
from evalkit.tables.measured import accuracies
from tests.benchmarks.lm_eval.made import made_tasks
from tests.benchmarks.longbench.made import evaluate_longbench, record, write
from tests.printed import printed
from tests.sealed import read, reseal
from tests.tiny import TRAINING_TEXT, tiny_checkpoint

FLIPS = 600
KINDS = ("suite", "lm_eval", "longbench", "needle")
SILENT = Progress(live=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints whose window is short, so that generating takes no time."""
    folder = tmp_path_factory.mktemp("small")
    return tuple(tiny_checkpoint(folder / f"tiny{seed}", seed=seed, window=512) for seed in (0, 1))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def pairs(
    small: tuple[Path, Path], documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Run, Run]]:
    """Of each kind of run one of each checkpoint. Not to be changed; copy their folders."""
    folder = tmp_path_factory.mktemp("pairs")
    tasks, talk = made_tasks(folder / "tasks"), "\n".join(TRAINING_TEXT)
    write(folder / "rows" / "trec.jsonl", [record("trec", n, context=talk) for n in range(2)])
    common: dict[str, Any] = {"output": folder / "runs"}

    def longbench(model: Path) -> Run:
        asked = request_of(LongBenchRequest, model, {"data_dir": folder / "rows", "tasks": "trec"} | common)
        return evaluate_longbench(asked, SILENT)

    def needle(model: Path) -> Run:
        asked = request_of(NeedleRequest, model, {"lengths": (200,), "depths": (50,), "repeats": 1} | common)
        return run_plan(Needle().plan(asked, SILENT.say), SILENT)

    makers: dict[str, Callable[[Path], Run]] = {
        "suite": lambda model: evaluate(
            str(model), data_dir=documents, allow_unofficial_data=True, tasks=("piqa", "boolq"), log_samples=True,
            progress=SILENT, **common),
        "lm_eval": lambda model: evaluate(
            str(model), include_path=tasks, tasks=("made_choice", "made_texts"), log_samples=True, progress=SILENT,
            **common),
        "longbench": longbench,
        "needle": needle,
    }  # fmt: skip
    return {kind: (make(small[0]), make(small[1])) for kind, make in makers.items()}


def everything(folder: Path, out: Path) -> str:
    """Everything that any command prints or writes of the numbers of a run."""
    run = load_run(folder)
    forms = {"lm_eval": ("lm_eval",), "multiple_choice": FORMS}.get(run.kind, ("every_eval_ever",))
    files = [path for form in forms for path in export_run(run, form, output=out)]
    shown = [path.read_text(encoding="utf-8", errors="backslashreplace") for path in files]
    shown.append(printed(runs_report(list_found(folder.parent), folder.parent), "json"))
    if "damaged" in shown[-1]:
        raise RunError("damaged")
    if run.kind == "longbench":
        shown += [printed(report_of(run), "json"), load_generations(run).to_csv(), str(accuracies(run, None))]
    elif run.kind == "needle":
        shown += [printed(Needle().report(run)), Needle().answers(run).to_csv()]
    else:
        if run.kind == "lm_eval":
            shown += [printed(metrics_report(run))]
        else:
            shown += [printed(accuracy_table(run.results(), run.manifest, run.seconds)), str(accuracies(run, None))]
        shown += [printed(rules_table(run.scores, run.manifest, run.manifest["rule"]))]
    return "\n".join(shown)


def read_back(folder: Path) -> list[str]:
    """Names of the files of a run that anything reads again."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.suffix in _READ)


_READ = (".json", ".jsonl", ".parquet")


def flip(content: bytes, dice: random.Random) -> bytes:
    place = dice.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)]) + content[place + 1 :]


def count_silent(run: Run, tmp_path: Path, flips: int) -> dict[str, int]:
    """For each file, of how many flipped bits something else was printed without a refusal."""
    folder = Path(shutil.copytree(run.folder, tmp_path / "copies" / run.folder.name))
    expected, dice, silent = everything(folder, tmp_path / "out"), random.Random(8), {}
    for name in read_back(folder):
        path, silent[name] = folder / name, 0
        whole = path.read_bytes()
        for _ in range(flips if name != JOURNAL else 12):  # which is not read to print a number
            path.write_bytes(flip(whole, dice))
            try:
                silent[name] += everything(folder, tmp_path / "out") != expected
            except EvalkitError as error:
                assert "\n" not in str(error)
        path.write_bytes(whole)
    assert everything(folder, tmp_path / "out") == expected
    return silent


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_changes_a_number(pairs: dict[str, tuple[Run, Run]], tmp_path: Path, kind: str) -> None:
    silent = count_silent(pairs[kind][0], tmp_path, 12)
    assert {MANIFEST, RESULTS, JOURNAL} < silent.keys()
    assert set(silent.values()) == {0}, silent


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_of_many_does(pairs: dict[str, tuple[Run, Run]], tmp_path: Path, kind: str) -> None:
    silent = count_silent(pairs[kind][0], tmp_path, FLIPS)
    assert set(silent.values()) == {0}, silent


@pytest.mark.parametrize("kind", KINDS)
def test_another_runs_files_are_refused(pairs: dict[str, tuple[Run, Run]], tmp_path: Path, kind: str) -> None:
    """Each file of another run of the same kind, in the place of the run's own."""
    run, other = pairs[kind]
    folder = Path(shutil.copytree(run.folder, tmp_path / run.folder.name))
    table = {"longbench": GENERATIONS, "needle": NEEDLES}.get(kind, SCORES)
    of_other = rf"is damaged \(it belongs to run {other.manifest['id']}.*delete {RESULTS} and run its command"
    of_manifest = f"contains run {other.manifest['id']}, but its name is that of run {run.manifest['id']}; restore its"
    for name, words in ((RESULTS, of_other), (table, of_other), (MANIFEST, of_manifest)):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes((other.folder / name).read_bytes())
        with pytest.raises(RunError, match=words if name == MANIFEST else f"{name} {words}"):
            printed_alone(folder, tmp_path)
        (folder / name).write_bytes(whole)
    if run.manifest["rule"] not in ("longbench", "needle"):
        own, others = (sorted(one.glob("lm_eval/*")) for one in (folder, other.folder))
        for path, another in zip(own, others, strict=True):
            whole = path.read_bytes()
            path.write_bytes(another.read_bytes() + b"\n")
            with pytest.raises(RunError, match=rf"{path.name} is damaged"):
                export_run(load_run(folder), "lm_eval", output=tmp_path / "out")
            path.write_bytes(whole)


def printed_alone(folder: Path, tmp_path: Path) -> None:
    """Everything but the list of runs, which lists a damaged one and does not end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.runs.test_binding.list_found", lambda _: [])
        everything(folder, tmp_path / "out")


def test_a_manifest_of_the_same_specification(pairs: dict[str, tuple[Run, Run]], tmp_path: Path) -> None:
    """The id leaves out the rule, the groups and where documents are from; results are printed with those beside."""
    run = pairs["suite"][0]
    folder = Path(shutil.copytree(run.folder, tmp_path / run.folder.name))
    results = (folder / RESULTS).read_bytes()
    manifest = read(folder, MANIFEST) | {"rule": "acc"}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    reseal(folder)
    (folder / RESULTS).write_bytes(results)
    with pytest.raises(RunError, match=r"results.json is damaged \(manifest.json is not the one that it was written"):
        _ = load_run(folder).stored


def test_a_flipped_bit_of_the_journal_costs_a_batch_and_changes_nothing(
    pairs: dict[str, tuple[Run, Run]], small: tuple[Path, Path], documents: Path, tmp_path: Path
) -> None:
    """Where results are made anew from it."""
    run, dice = pairs["suite"][0], random.Random(3)
    for number in range(5):
        folder = Path(shutil.copytree(run.folder, tmp_path / str(number) / run.folder.name))
        (folder / JOURNAL).write_bytes(flip((folder / JOURNAL).read_bytes(), dice))
        (folder / RESULTS).unlink()
        asked: dict[str, Any] = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("piqa", "boolq")}
        again = evaluate(str(small[0]), output=folder.parent, progress=SILENT, **asked)
        assert again.folder == folder
        assert again.scores.equals(run.scores)


# Files that a finished run does not need


@pytest.fixture
def again(
    small: tuple[Path, Path], documents: Path, pairs: dict[str, tuple[Run, Run]], tmp_path: Path
) -> Callable[..., Run]:
    """Gives the suite's command again, in a copy of the runs; nothing may be scored."""
    shutil.copytree(pairs["suite"][0].folder, tmp_path / "runs" / pairs["suite"][0].folder.name)

    def run(**options: Any) -> Run:
        asked = {"data_dir": documents, "allow_unofficial_data": True, "tasks": ("piqa", "boolq"), "log_samples": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("evalkit.benchmarks.session.load_checked", lambda *_: pytest.fail("a model was loaded"))
            return evaluate(str(small[0]), output=tmp_path / "runs", progress=SILENT, **(asked | options))

    return run


def test_a_run_may_be_kept_without_its_journal(again: Callable[..., Run], tmp_path: Path) -> None:
    folder = again().folder
    expected = everything(folder, tmp_path / "out")
    (folder / JOURNAL).unlink()
    found = again()
    assert everything(folder, tmp_path / "out").replace('"journal": false', '"journal": true') == expected
    assert found.complete
    [listed] = list_found(folder.parent)
    assert (listed.state, listed.journal) == ("finished", False)
    said = f"stored without a journal, so their tables cannot be recomputed: {listed.id[:7]}"
    assert printed(runs_report([listed], folder.parent)).splitlines()[-1] == said


@pytest.mark.parametrize("lost", [SCORES, RESULTS, MANIFEST])
def test_without_its_journal_nothing_is_scored_anew_unasked(again: Callable[..., Run], lost: str) -> None:
    folder = again().folder
    for name in (JOURNAL, lost):
        (folder / name).unlink()
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(
        RunError, match=r"has .* but no journal.jsonl to rebuild the rest from; restore .*or delete the "
    ):
        again()
    # The error loses nothing, and no manifest is created that does not match the other files
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_damaged_manifest_is_made_anew_only_where_there_is_a_journal(again: Callable[..., Run]) -> None:
    folder = again().folder
    (folder / MANIFEST).write_text("{", encoding="utf-8")
    with pytest.raises(RunError, match=r"damaged \(.*\); delete it and run its command again, which resumes from the"):
        again()
    (folder / JOURNAL).unlink()
    with pytest.raises(RunError, match=r"damaged \(.*\); restore the original file, or delete the folder and"):
        again()


def test_a_file_of_a_finished_run_is_missing(again: Callable[..., Run], tmp_path: Path) -> None:
    folder = again().folder
    [path] = folder.glob("lm_eval/results_*.json")
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(RunError, match=rf"{path.name} is missing; delete results.json and run its command again, whi"):
        export_run(load_run(folder), "lm_eval", output=tmp_path / "out")
    (folder / RESULTS).unlink()
    again()
    assert path.read_bytes() == content
    for name in (path, folder / JOURNAL):
        name.unlink()
    with pytest.raises(RunError, match=rf"{path.name} is missing; restore the original file, or delete the"):
        export_run(load_run(folder), "lm_eval", output=tmp_path / "out")


def test_all_files_of_another_run(again: Callable[..., Run], pairs: dict[str, tuple[Run, Run]]) -> None:
    """They fit one another, and not the folder."""
    folder, other = again().folder, pairs["suite"][1]
    shutil.rmtree(folder)
    shutil.copytree(other.folder, folder)
    words = f"contains run {other.manifest['id']}, but its name is that of run {folder.name[-12:]}; restore its files"
    with pytest.raises(RunError, match=words):
        again()
    [listed] = list_found(folder.parent)
    assert listed.state == "damaged"
    renamed = folder.rename(folder.with_name("renamed"))
    assert load_run(renamed).manifest == other.manifest


def test_all_files_of_another_run_under_a_name_of_digits(tmp_path: Path, pairs: dict[str, tuple[Run, Run]]) -> None:
    """A date and time may end a folder's name; who asks for a run by its specification gets no other for that."""
    run, other = pairs["suite"]
    folder = Path(shutil.copytree(other.folder, tmp_path / "made-202611211530"))
    assert load_run(folder).manifest == other.manifest
    with pytest.raises(RunError, match="belongs to another specification; choose another --output"):
        find_finished(folder, run.manifest, lambda _: True, print, "auto")


def test_a_damaged_file_of_a_run_without_its_journal(again: Callable[..., Run]) -> None:
    folder = again().folder
    (folder / JOURNAL).unlink()
    (folder / SCORES).write_bytes((folder / SCORES).read_bytes()[:-9])
    with pytest.raises(RunError, match=r"restore the original file, or delete the folder and run its command"):
        _ = load_run(folder).scores


def test_another_runs_journal_is_not_taken(again: Callable[..., Run], pairs: dict[str, tuple[Run, Run]]) -> None:
    folder, other = again().folder, pairs["suite"][1]
    (folder / JOURNAL).write_bytes((other.folder / JOURNAL).read_bytes())
    assert again().folder == folder  # a finished run does not read it
    (folder / SCORES).unlink()
    with pytest.raises(RunError, match=rf"line 1: not a batch of this run \(it belongs to run {other.manifest['id']}"):
        again()
    # The error loses nothing
    assert (folder / JOURNAL).read_bytes() == (other.folder / JOURNAL).read_bytes()
    assert load_run(folder).stored


@pytest.mark.parametrize("lost", [SCORES, RESULTS, MANIFEST])
def test_what_is_lost_is_made_again(again: Callable[..., Run], lost: str) -> None:
    first = again()
    tables = first.scores, first.stored
    whole = {name: (first.folder / name).read_bytes() for name in (SCORES, RESULTS)}
    (first.folder / lost).unlink()
    found = again()
    assert found.scores.equals(tables[0])
    assert found.stored == tables[1]
    if lost != MANIFEST:  # which says when it was made
        assert {name: (found.folder / name).read_bytes() for name in whole} == whole


def test_a_run_of_an_earlier_version(own_run: Path) -> None:
    manifest = read(own_run, MANIFEST)
    (own_run / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(
        RunError, match=r"no 'sha256' of its content: truncated, or written by an earlier version of evalkit\)"
    ):
        load_run(own_run)


# Forms


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"documents": []}, "'documents' is "),
        (
            {"documents": {"piqa": {"source": 1, "official": True, "count": 2}}},
            "'documents.piqa.source' is ",
        ),
        ({"groups": {"A": "piqa"}}, "'groups.A' is "),
        ({"group_sizes": {}}, "'groups' and 'group_sizes' have different keys"),
        ({"created": "yesterday"}, "'created': "),
        ({"template": None}, "'template' is "),
        ({"model": ["a"]}, "'model' is "),
        ({"loaded": []}, "'loaded' is "),
        ({"devices": [{"device": "cpu"}]}, "it lacks 'devices[0].hardware'"),
        ({"specification": {"suite": "zeroshot8"}}, "it lacks 'specification.dtype'"),
    ],
)
def test_a_manifest_of_another_form(own_run: Path, change: dict[str, Any], words: str) -> None:
    content = read(own_run, MANIFEST) | change
    (own_run / MANIFEST).write_text(json.dumps(content), encoding="utf-8")
    reseal(own_run)
    with pytest.raises(RunError, match=r"manifest.json is damaged \(.*\); delete it and") as caught:
        load_run(own_run)
    assert words in str(caught.value)
    [listed] = list_found(own_run.parent)
    assert (listed.state, listed.notes) == ("damaged", (str(caught.value),))


@pytest.mark.parametrize("content", [{"specification": []}, {"specification": None}, {"id": 3}, {}])
def test_a_manifest_without_a_specification(own_run: Path, content: dict[str, Any]) -> None:
    from evalkit.runs.forms import sealed

    (own_run / MANIFEST).write_text(json.dumps(sealed(content)), encoding="utf-8")
    with pytest.raises(RunError, match=r"manifest.json is damaged \("):
        load_run(own_run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tasks": {}}, "'tasks' is "),
        ({"tasks": [1]}, "'tasks[0]' is "),
        ({"tasks": [{"task": "piqa"}]}, "it lacks 'tasks[0].n'"),
        ({"rules": []}, "'rules' is "),
        (
            {"averages": [{"name": "A", "accuracy": "0.5", "stderr": None}]},
            "'averages[0].accuracy' is ",
        ),
        ({"samples": 1}, "'samples' is "),
    ],
)
def test_results_of_another_form(own_run: Path, change: dict[str, Any], words: str) -> None:
    (own_run / RESULTS).write_text(json.dumps(read(own_run, RESULTS) | change), encoding="utf-8")
    reseal(own_run)
    with pytest.raises(RunError, match=r"results.json is damaged \(.*\); delete results.json and run") as caught:
        benchmark_of(load_run(own_run))
    assert words in str(caught.value)


def test_a_command_that_utf8_cannot_hold_is_written_and_read(
    checkpoint: Path, own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command line of other bytes, as Python hands it over."""
    monkeypatch.setattr("sys.argv", ["evalkit", "caf\udce9"])
    about = provenance(ModelSpec("tiny"), locate(str(checkpoint)))
    with open_run(tmp_path, "odd", read(own_run, MANIFEST) | about):
        pass
    assert load_run(tmp_path / "odd").manifest["command"] == ["evalkit", "caf\\udce9"]


def test_a_folder_that_utf8_cannot_hold_is_refused_before_it_is_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From inside of it, the name given is fine and the path is not."""
    monkeypatch.chdir(shutil.copytree(checkpoint, tmp_path / "caf\udce9"))
    with pytest.raises(UsageError, match=r"--model .*: is not text in UTF-8; rename a file or folder"):
        provenance(ModelSpec("."), locate("."))
