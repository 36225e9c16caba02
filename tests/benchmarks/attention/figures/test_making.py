"""Figures of analyses: every drawn number is a plain group-by of the run's rows, and the files are complete."""

from __future__ import annotations

import csv
import math
import zlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from evalkit.benchmarks.attention.figure_runs import AnalysedRun, run_differences
from evalkit.benchmarks.attention.figures import figure_notes, make, write
from evalkit.benchmarks.attention.groups import KINDS, MEASURES, FigureRequest, parsed_layers
from evalkit.errors import RunError, UnknownNameError, UsageError
from evalkit.runs.folder import Run
from tests.benchmarks.attention.made import made_run, whole_table
from tests.marks import fast

TOLERANCE = 1e-6
DOCUMENT = ["task", "subtask", "doc_id"]


@pytest.fixture(scope="module", params=fast([1], [1, 2]), ids=["gold", "every continuation"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Three runs of the same documents."""
    root = tmp_path_factory.mktemp("runs")
    settings = {"choices": request.param, "tokens": (65, 150)}
    return [made_run(root, f"models/{name}", **settings) for name in ("vanilla", "cog", "diff")]


def analysed(runs: list[Run], *tasks: str) -> list[AnalysedRun]:
    return [AnalysedRun(run.manifest["model"].rpartition("/")[2], run, tasks) for run in runs]


def drawn(name: str, runs: list[Run], folder: Path, tasks: tuple[str, ...] = (), **options: object) -> pd.DataFrame:
    """Draw a figure and read its numbers back from the CSV."""
    members = analysed(runs, *tasks)
    request = FigureRequest(**options)  # type: ignore[arg-type]
    path = folder / f"{name}.pdf"
    files = write(make(name, members, request), members, [path])
    assert files == [path, path.with_suffix(".csv")]
    assert path.read_bytes().startswith(b"%PDF")
    return pd.read_csv(path.with_suffix(".csv"))


def rows_of(run: Run, measure: str, by_position: bool = False) -> pd.DataFrame:
    table = whole_table(run)
    return table[(table["measure"] == measure) & (table["position"].notna() == by_position)]


def same(found: pd.DataFrame, expected: pd.Series, column: str = "value") -> None:
    """Compare a column with a series whose index has the same key columns; both must have the same keys."""
    keys = list(expected.index.names)
    mine = found.set_index(keys)[column].sort_index()
    theirs = expected.sort_index()
    assert [tuple(np.atleast_1d(one)) for one in mine.index] == [tuple(np.atleast_1d(one)) for one in theirs.index]
    np.testing.assert_allclose(mine.to_numpy(float), theirs.to_numpy(float), rtol=TOLERANCE, atol=TOLERANCE)


def over_heads(rows: pd.DataFrame, *keys: str) -> tuple[pd.Series, pd.Series]:
    """Return mean and standard deviation over heads of each head's mean."""
    by_document = rows.groupby([*keys, "head", *DOCUMENT])["value"].mean()
    by_head = by_document.groupby(level=[*keys, "head"]).mean().groupby(level=list(keys))
    return by_head.mean(), by_head.std()


def over_documents(rows: pd.DataFrame, *keys: str, how: str = "mean") -> tuple[pd.Series, pd.Series]:
    """Return mean and standard deviation over documents of each document's mean (or median) over heads."""
    by_sequence = rows.groupby([*keys, *DOCUMENT, "choice"])["value"].agg(how)
    by_document = by_sequence.groupby(level=[*keys, *DOCUMENT]).mean().groupby(level=list(keys))
    return by_document.mean(), by_document.std()


def part(found: pd.DataFrame, run: Run, measure: str) -> pd.DataFrame:
    chosen = found[(found["id"] == run.manifest["id"]) & (found["measure"] == measure)]
    assert not chosen.empty
    return chosen


@pytest.mark.parametrize("band", ["heads", "samples"])
@pytest.mark.parametrize(("name", "measures"), [
    ("entropy", ["entropy_shifted", "entropy"]),
    ("negative", ["bos_negative"]),
    ("summary", ["sink_abs_rate", "bos_abs", "distance", "similarity"]),
])  # fmt: skip
def test_lines_by_layer(runs: list[Run], tmp_path: Path, name: str, measures: list[str], band: str) -> None:
    found = drawn(name, runs, tmp_path, band=band)
    assert [*dict.fromkeys(found["measure"])] == measures
    for run in runs:
        for measure in measures:
            made = over_heads if band == "heads" else over_documents
            means, deviations = made(rows_of(run, measure), "layer")
            same(part(found, run, measure), means)
            same(part(found, run, measure), deviations, "spread")


def test_default_bands_are_the_papers(runs: list[Run], tmp_path: Path) -> None:
    _, documents = over_documents(rows_of(runs[0], "entropy_shifted"), "layer")
    same(part(drawn("entropy", runs, tmp_path, paper=True), runs[0], "entropy_shifted"), documents, "spread")
    _, heads = over_heads(rows_of(runs[0], "bos_negative"), "layer")
    same(part(drawn("negative", runs, tmp_path), runs[0], "bos_negative"), heads, "spread")


def test_the_papers_entropy_has_one_panel(runs: list[Run], tmp_path: Path) -> None:
    assert {*drawn("entropy", runs, tmp_path, paper=True)["measure"]} == {"entropy_shifted"}


def test_tasks_and_layers_are_chosen(runs: list[Run], tmp_path: Path) -> None:
    found = drawn("entropy", runs, tmp_path, ("mmlu",), layers=(-1, 0))
    rows = rows_of(runs[1], "entropy")
    rows = rows[(rows["task"] == "mmlu") & rows["layer"].isin([0, 2])]
    same(part(found, runs[1], "entropy"), over_documents(rows, "layer")[0])
    assert {*found["n"]} == {6}


@pytest.mark.parametrize("band", ["heads", "samples"])
@pytest.mark.parametrize("measure", ["bos", "bos_abs", "entropy"])
def test_by_position(runs: list[Run], tmp_path: Path, measure: str, band: str) -> None:
    found = drawn("bos", runs, tmp_path, measure=measure, band=band)
    assert {*found["layer"]} == {2}
    for run in runs:
        rows = rows_of(run, measure, by_position=True)
        made = over_heads if band == "heads" else over_documents
        means, deviations = made(rows[rows["layer"] == 2], "position")
        same(part(found, run, measure), means)
        same(part(found, run, measure), deviations, "spread")


def test_every_position_of_one_run(runs: list[Run], tmp_path: Path) -> None:
    found = drawn("position", runs[:1], tmp_path)
    for measure in ("bos_abs", "entropy"):
        means, _ = over_heads(rows_of(runs[0], measure, by_position=True), "layer", "position")
        same(part(found, runs[0], measure), means)


def test_positions_of_several_runs(runs: list[Run], tmp_path: Path) -> None:
    found = drawn("position", runs, tmp_path, layers=(0, 2))
    for run in runs:
        rows = rows_of(run, "entropy", by_position=True)
        means, _ = over_heads(rows[rows["layer"] != 1], "layer", "position")
        same(part(found, run, "entropy"), means)


FOUR = {
    "BOS, special tokens, punctuation": ["bos", "special", "punctuation"],
    "content words": ["content"],
    "function words": ["function"],
    "other": ["other"],
}


@pytest.mark.parametrize("band", ["heads", "samples"])
def test_categories(runs: list[Run], tmp_path: Path, band: str) -> None:
    found = drawn("categories", runs, tmp_path, band=band)
    for run in runs:
        table = whole_table(run)
        total = 0.0
        for title, members in FOUR.items():
            rows = table[table["measure"].isin([f"mass_abs_{name}" for name in members])]
            summed = rows.groupby([*DOCUMENT, "choice", "layer", "head"])["value"].sum().reset_index()
            means, deviations = (over_heads if band == "heads" else over_documents)(summed, "layer")
            same(part(found, run, f"mass_abs: {title}"), means)
            same(part(found, run, f"mass_abs: {title}"), deviations, "spread")
            total += part(found, run, f"mass_abs: {title}")["value"].sum()
        assert total == pytest.approx(3)  # layers: the shares of each sum to 1


def test_the_papers_categories(runs: list[Run], tmp_path: Path) -> None:
    found = drawn("categories", runs, tmp_path, paper=True)
    for run in runs:
        means = whole_table(run).groupby(["measure", "layer", "head"])["value"].mean()
        for layer in range(3):
            of_heads: list[list[float]] = []
            for head in range(2):
                sums = [sum(means[f"mass_{name}", layer, head] for name in members) for members in FOUR.values()]
                powers = [math.exp(one) for one in sums]
                of_heads.append([one / sum(powers) for one in powers])
            for place, title in enumerate(FOUR):
                values = [one[place] for one in of_heads]
                [row] = part(found, run, f"mass: {title}").query(f"layer == {layer}").to_dict("records")
                assert row["value"] == pytest.approx(np.mean(values), abs=TOLERANCE)
                assert row["spread"] == pytest.approx(np.std(values, ddof=1), abs=TOLERANCE)


@pytest.mark.parametrize("measure", ["rank", "rank_squares", "rank_stable"])
def test_ranks(runs: list[Run], tmp_path: Path, measure: str) -> None:
    found = drawn("rank", runs, tmp_path, measure=measure)
    left, right = (found[found["panel"] == panel] for panel in dict.fromkeys(found["panel"]))
    medians = {}
    for run in runs:
        rows = rows_of(run, measure)
        means, deviations = over_documents(rows, "layer", how="median")
        assert [*means.index] == [1, 2]
        same(part(left, run, measure), means)
        same(part(left, run, measure), deviations, "spread")
        by_sequence = rows.groupby(["layer", *DOCUMENT, "choice"])["value"].median()
        medians[run.manifest["id"]] = by_sequence.groupby(level=["layer", *DOCUMENT]).mean()
    base = medians[runs[0].manifest["id"]]
    assert {*right["run"]} == {"cog", "diff"}
    for run in runs[1:]:
        above = (medians[run.manifest["id"]] > base).groupby(level="layer")
        same(part(right, run, measure), above.mean())
        same(part(right, run, measure), (above.mean() * (1 - above.mean()) / 9) ** 0.5, "spread")


@pytest.mark.parametrize("measure", ["bos_abs", "rank", "mass_content"])
def test_heatmap(runs: list[Run], tmp_path: Path, measure: str) -> None:
    found = drawn("heatmap", runs, tmp_path, measure=measure)
    for run in runs:
        same(part(found, run, measure), rows_of(run, measure).groupby(["layer", "head"])["value"].mean())


@pytest.mark.parametrize("count", fast([3], [1, 3]))
@pytest.mark.parametrize("name", KINDS)
def test_every_figure_in_both_formats(runs: list[Run], tmp_path: Path, name: str, count: int) -> None:
    members = analysed(runs[:count])
    paths = [tmp_path / "new" / f"{name}{suffix}" for suffix in (".png", ".pdf")]
    files = write(make(name, members, FigureRequest()), members, paths)
    assert [path.name for path in files] == [f"{name}.png", f"{name}.pdf", f"{name}.csv"]
    rows = list(csv.reader(files[2].read_text(encoding="utf-8").splitlines()))
    assert {len(row) for row in rows} == {len(rows[0])}
    assert rows[0][:4] == ["panel", "run", "id", "measure"]


def test_text_in_a_pdf_is_text(runs: list[Run], tmp_path: Path) -> None:
    drawn("entropy", runs, tmp_path)
    content = (tmp_path / "entropy.pdf").read_bytes()
    parts = [content, *(unpacked(one) for one in content.split(b"stream\n")[1:])]
    assert b"/Subtype /Type0" in content  # TrueType, with a map to Unicode; Type 3 cannot be edited
    assert b"/Type3" not in b"".join(parts)


def unpacked(content: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(content)
    except zlib.error:
        return b""


@pytest.mark.slow
def test_a_single_head_has_no_band_and_one_layer_is_enough(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", heads=1, layers=1, ranked=1)
    found = drawn("negative", [run], tmp_path)
    assert found["spread"].isna().all()
    for name in KINDS:
        drawn(name, [run], tmp_path)


def test_models_of_other_depths(runs: list[Run], tmp_path: Path) -> None:
    deep = made_run(tmp_path / "runs", "models/deep", layers=6, choices=1)
    found = drawn("position", [runs[0], deep], tmp_path)
    shown = {name: sorted({*rows["layer"]}) for name, rows in found.groupby("run")}
    assert shown == {"vanilla": [0, 1, 2], "deep": [0, 1, 5]}
    assert any("last layer" in panel for panel in found["panel"])


def test_missing_measures_name_the_option(tmp_path: Path) -> None:
    run = made_run(tmp_path, groups=("bos", "sink"), tokens=(5, 20))
    [one] = analysed([run])
    with pytest.raises(
        UsageError, match=r"has no entropy_shifted; compute it with evalkit attention … --measures entr"
    ):
        make("entropy", [one], FigureRequest())
    with pytest.raises(UsageError, match="has no sink; compute it"):
        make("heatmap", [one], FigureRequest(measure="sink"))
    with pytest.raises(UsageError, match="--measures mass"):
        make("categories", [one], FigureRequest())
    summary = make("summary", [one], FigureRequest())
    assert [panel.title for panel in summary.panels] == ["bos_abs"]


def test_a_measure_that_only_one_run_has(runs: list[Run], tmp_path: Path) -> None:
    other = made_run(tmp_path, "models/less", groups=("bos",))
    with pytest.raises(UsageError, match=rf"run {other.folder.name} has no entropy"):
        make("entropy", analysed([runs[0], other]), FigureRequest())


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("entropi", {}, "unknown figure 'entropi': did you mean 'entropy'"),
        ("entropy", {"measure": "bos"}, "--measure does not apply to figure entropy"),
        ("bos", {"measure": "distance"}, "unknown measure of figure bos 'distance'"),
        ("heatmap", {"band": "heads"}, "--band does not apply to figure heatmap"),
        ("rank", {"paper": True}, "--paper does not apply to figure rank"),
        ("categories", {"paper": True, "band": "samples"}, "leave out --band samples"),
        ("bos", {"layers": (3,)}, "--layers 3: run .* has bos of layers 0 to 2"),
        ("entropy", {"layers": (-4,)}, "--layers -4: run .* has entropy_shifted of layers 0 to 2"),
    ],
)
def test_options_that_cannot_be_used(runs: list[Run], name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(name, analysed(runs), FigureRequest(**options))  # type: ignore[arg-type]


def test_layers_are_numbers() -> None:
    assert parsed_layers(("-1", "3", "3")) == (-1, 3)
    with pytest.raises(UsageError, match="--layers 1,x: expected numbers of layers"):
        parsed_layers(("1", "x"))


def test_an_unknown_task_and_a_run_of_another_benchmark(runs: list[Run], finished: Run) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown task of run .* 'pica': did you mean 'piqa'"):
        analysed(runs, "pica")
    with pytest.raises(UsageError, match="is of benchmark multiple_choice; figures are of runs of evalkit attention"):
        AnalysedRun("a", finished)


def test_ranks_of_other_documents_are_not_paired(runs: list[Run], tmp_path: Path) -> None:
    other = made_run(tmp_path, "models/other", sampled=5)
    with pytest.raises(UsageError, match="so their ranks cannot be paired"):
        make("rank", analysed([runs[0], other]), FigureRequest())


def test_notes_state_what_is_drawn(runs: list[Run]) -> None:
    members = analysed(runs, "mmlu")
    figure = make("entropy", members, FigureRequest(layers=(0, -1)))
    text = figure_notes(figure, members)
    read = "gold continuation" if len({*whole_table(runs[0])["choice"]}) == 1 else "every continuation"
    assert text.splitlines() == [
        "Line: mean over documents of the mean over heads; band: ± 1 standard deviation over documents. "
        "entropy_shifted: entropy of weights - min, as in the paper, in nats; entropy: entropy of |weights|, last "
        "continuation token, in nats. The shift lifts every weight near 0 as soon as one is negative. Weights are "
        "those of the effective maps.",
        f"Layers 0, 2 (from 0), 6 documents of mmlu, {read}, seed 0, inst prompts, float32.",
    ]
    by_position = make("bos", members, FigureRequest(band="samples"))
    assert by_position.words.startswith(
        "Line: mean over documents of the mean over heads; band: ± 1 standard deviation"
    )
    assert "bos: weight on BOS; mean over the positions 1, 2–3, 4–7, … of a document" in by_position.words


def test_differences_between_runs_are_named(runs: list[Run], tmp_path: Path) -> None:
    assert run_differences(analysed(runs)) == []
    seed = made_run(tmp_path, "models/other", choices=len({*whole_table(runs[0])["choice"]}), seed=4, dtype="bfloat16")
    [text] = run_differences(analysed([*runs[:1], seed]))
    assert text == "The runs differ in more than their models: dtype: float32 (vanilla), bfloat16 (other)."
    longer = made_run(tmp_path, "models/longer", tokens=(65, 150), choices=len({*whole_table(runs[0])["choice"]}),
                      sampled=3)  # fmt: skip
    [text] = run_differences(analysed([*runs[:1], longer]))
    assert "documents: " in text
    assert " tokens (vanilla), " in text


def test_files_that_cannot_be_written(runs: list[Run], tmp_path: Path) -> None:
    members = analysed(runs)
    figure = make("negative", members, FigureRequest())
    with pytest.raises(UsageError, match=r"written as \.png, \.pdf or \.svg"):
        write(figure, members, [tmp_path / "a.gif"])
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        write(figure, members, [tmp_path / "file" / "a.png"])
    (tmp_path / "b.csv").mkdir()
    with pytest.raises(RunError, match=r"b\.csv cannot be written"):
        write(figure, members, [tmp_path / "b.png"])


def test_every_measure_has_a_heatmap() -> None:
    assert {*KINDS["heatmap"].measures} == {*MEASURES}
