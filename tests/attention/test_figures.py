"""Figures of analyses: every drawn number is a plain group-by of the run's rows, and the files are complete."""

from __future__ import annotations

import base64
import io
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from evalkit.attention.figure_runs import AnalysedRun
from evalkit.attention.figures import make, write
from evalkit.attention.groups import KINDS, FigureRequest
from evalkit.errors import RunError, UsageError
from evalkit.reporting.figures import Size, line_look
from evalkit.runs.folder import Run
from tests.attention.made import made_run, sequence, whole_table, write_analysis

DOCUMENT = ["task", "subtask", "doc_id"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    root = tmp_path_factory.mktemp("runs")
    return [made_run(root, f"models/{name}", choices=2, tokens=(65, 150)) for name in ("vanilla", "cog", "diff")]


def analysed(runs: list[Run], *tasks: str) -> list[AnalysedRun]:
    return [AnalysedRun(run.manifest["model"].rpartition("/")[2], run, tasks) for run in runs]


def drawn(name: str, runs: list[Run], folder: Path, *tasks: str, **options: Any) -> pd.DataFrame:
    """Draw a figure and read its numbers back from the CSV. The PDF's text is text: TrueType, with a map to Unicode."""
    members, path = analysed(runs, *tasks), folder / f"{name}.pdf"
    files = [path, path.with_suffix(".csv"), folder / f"{name}-caption.tex"]
    assert write(make(name, members, FigureRequest(**options)), members, [path]) == files
    assert path.read_bytes().startswith(b"%PDF") and b"/Subtype /Type0" in path.read_bytes()
    return pd.read_csv(path.with_suffix(".csv"))


def rows_of(run: Run, *measures: str, by_position: bool = False) -> pd.DataFrame:
    """Return the run's rows; several measures are added up."""
    table = whole_table(run)
    rows = table[table["measure"].isin(measures) & (table["position"].notna() == by_position)]
    keys = [*DOCUMENT, "choice", "layer", "head", "position"]
    return rows.groupby(keys, dropna=False)["value"].sum().reset_index()


def spread(rows: pd.DataFrame, band: str, *keys: str, how: str = "mean") -> pd.DataFrame:
    """Return mean and standard deviation, over heads of each head's mean, or over documents of each document's."""
    if band == "heads":
        values = rows.groupby([*keys, "head", *DOCUMENT])["value"].mean().groupby(level=[*keys, "head"]).mean()
    else:
        by_sequence = rows.groupby([*keys, *DOCUMENT, "choice"])["value"].agg(how)
        values = by_sequence.groupby(level=[*keys, *DOCUMENT]).mean()
    return values.groupby(level=list(keys)).agg(["mean", "std"])


def same(numbers: pd.DataFrame, run: Run, measure: str, expected: pd.DataFrame) -> None:
    part = numbers[(numbers["id"] == run.manifest["id"]) & (numbers["measure"] == measure)]
    part = part.set_index(list(expected.index.names)).sort_index()
    assert part.index.tolist() == expected.index.tolist() != []
    columns = ["value", "spread"][: expected.shape[1]]
    np.testing.assert_allclose(part[columns], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "measures", "default", "band"),
    [
        ("entropy", ["entropy_shifted", "entropy"], "samples", None),
        ("negative", ["bos_negative"], "heads", "samples"),
        ("summary", ["sink_abs_rate", "bos_abs", "distance", "similarity"], "heads", None),
    ],
)
def test_lines_by_layer(
    runs: list[Run], tmp_path: Path, name: str, measures: list[str], default: str, band: str | None
) -> None:
    numbers = drawn(name, runs, tmp_path, band=band)
    assert [*dict.fromkeys(numbers["measure"])] == measures
    for run in runs:
        for measure in measures:
            same(numbers, run, measure, spread(rows_of(run, measure), band or default, "layer"))


def test_by_position(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("bos", runs, tmp_path, measure="entropy", band="heads")
    several = drawn("position", runs, tmp_path, layers=(0, 2), band="samples")
    maps = drawn("position", runs[:1], tmp_path, band="heads")
    tokens = drawn("bos", runs, tmp_path, paper=True)
    for run in runs:
        each = rows_of(run, "bos_token", by_position=True)
        same(tokens, run, "bos_token", spread(each[each["layer"] == 2], "heads", "position"))
        rows = rows_of(run, "entropy", by_position=True)
        same(numbers, run, "entropy", spread(rows[rows["layer"] == 2], "heads", "position"))
        same(several, run, "entropy", spread(rows[rows["layer"] != 1], "samples", "layer", "position"))
    for measure in ("bos_abs", "entropy"):
        same(maps, runs[0], measure, spread(rows_of(runs[0], measure, by_position=True), "heads", "layer", "position"))


def test_single_tokens_are_drawn_where_a_twentieth_of_the_documents_reaches(tmp_path: Path) -> None:
    run = made_run(tmp_path, "models/a", tasks={"piqa": ("piqa",)}, documents=60)
    numbers = drawn("bos", [run], tmp_path, paper=True)
    reached = rows_of(run, "bos_token", by_position=True).groupby("position")["doc_id"].nunique()
    assert reached.min() < 3 < reached.max() == 60
    assert numbers.set_index("position")["n"].to_dict() == reached[reached >= 3].to_dict()


FOUR = {
    "BOS, special tokens, punctuation": ["bos", "special", "punctuation"],
    "content words": ["content"],
    "function words": ["function"],
    "other": ["other"],
}


def test_categories(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("categories", runs, tmp_path, band="samples")
    paper = drawn("categories", runs, tmp_path, paper=True)
    for run in runs:
        sums = {}
        for title, names in FOUR.items():
            rows = rows_of(run, *(f"mass_abs_{name}" for name in names))
            same(numbers, run, f"mass_abs: {title}", spread(rows, "samples", "layer"))
            signed = rows_of(run, *(f"mass_{name}" for name in names))
            sums[title] = signed.groupby(["layer", "head"])["value"].mean()
        powers = pd.DataFrame(sums).map(math.exp)
        for title in FOUR:
            shares = (powers[title] / powers.sum(axis=1)).groupby(level="layer").agg(["mean", "std"])
            same(paper, run, f"mass: {title}", shares)
    # The shares of each layer sum to 1
    assert numbers["value"].sum() == pytest.approx(3 * len(runs))


def test_ranks(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("rank", runs, tmp_path, measure="rank_stable")
    left, right = (numbers[numbers["panel"] == panel] for panel in dict.fromkeys(numbers["panel"]))
    paper = drawn("rank", runs, tmp_path, measure="rank_stable", paper=True)
    pd.testing.assert_frame_equal(paper, right.reset_index(drop=True))
    medians = []
    for run in runs:
        rows = rows_of(run, "rank_stable")
        same(left, run, "rank_stable", spread(rows, "samples", "layer", how="median"))
        by_sequence = rows.groupby(["layer", *DOCUMENT, "choice"])["value"].median()
        medians.append(by_sequence.groupby(level=["layer", *DOCUMENT]).mean())
    assert {*right["run"]} == {"cog", "diff"}
    for run, own in zip(runs[1:], medians[1:], strict=True):
        share = (own > medians[0]).groupby(level="layer").mean()
        same(right, run, "rank_stable", pd.DataFrame({"share": share, "error": (share * (1 - share) / 9) ** 0.5}))


def test_heatmap(runs: list[Run], tmp_path: Path) -> None:
    numbers = drawn("heatmap", runs, tmp_path, measure="mass_content")
    for run in runs:
        same(numbers, run, "mass_content", rows_of(run, "mass_content").groupby(["layer", "head"])[["value"]].mean())


# Seeds of one model


SEEDS = {"vanilla": 3, "cog": 2, "diff": 1}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[AnalysedRun]:
    root = tmp_path_factory.mktemp("seeds")
    return [
        AnalysedRun(f"{model} seed {seed}", made_run(root, f"models/{model}-{seed}"), (), model)
        for model, count in SEEDS.items()
        for seed in range(count)
    ]


def of_model(members: list[AnalysedRun], model: str) -> list[Run]:
    return [member.run for member in members if member.model == model]


def drawn_of_seeds(name: str, members: list[AnalysedRun], folder: Path, **options: Any) -> pd.DataFrame:
    write(make(name, members, FigureRequest(**options)), members, [folder / f"{name}.svg"])
    return pd.read_csv(folder / f"{name}.csv")


def same_over_seeds(numbers: pd.DataFrame, model: str, runs: list[Run], values: list[pd.Series[float]]) -> None:
    """Compare a model's numbers with mean and standard deviation of a value of each seed (the means of `spread`)."""
    part = numbers[numbers["run"] == model].set_index(list(values[0].index.names)).sort_index()
    expected = pd.concat(values, axis=1)
    assert part.index.tolist() == expected.index.tolist() != []
    assert {*part["id"]} == {" ".join(run.manifest["id"] for run in runs)}
    np.testing.assert_allclose(part["value"], expected.mean(axis=1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(part["spread"], expected.std(axis=1), rtol=1e-6, atol=1e-6)
    assert part["spread"].isna().all() == (len(runs) == 1)


def test_lines_of_seeds(seeds: list[AnalysedRun], tmp_path: Path) -> None:
    by_layer, by_position = (drawn_of_seeds(name, seeds, tmp_path) for name in ("entropy", "bos"))
    categories, ranks = (drawn_of_seeds(name, seeds, tmp_path) for name in ("categories", "rank"))
    for model in SEEDS:
        runs = of_model(seeds, model)
        for measure in ("entropy", "entropy_shifted"):
            values = [spread(rows_of(run, measure), "samples", "layer")["mean"] for run in runs]
            same_over_seeds(by_layer[by_layer["measure"] == measure], model, runs, values)
        rows = [rows_of(run, "bos", by_position=True) for run in runs]
        values = [spread(of_run[of_run["layer"] == 2], "heads", "position")["mean"] for of_run in rows]
        same_over_seeds(by_position, model, runs, values)
        rows = [rows_of(run, "mass_abs_content") for run in runs]
        values = [spread(of_run, "heads", "layer")["mean"] for of_run in rows]
        same_over_seeds(categories[categories["panel"] == "Content words"], model, runs, values)
        values = [spread(rows_of(run, "rank"), "samples", "layer", how="median")["mean"] for run in runs]
        same_over_seeds(ranks[ranks["panel"].str.startswith("Effective")], model, runs, values)


def test_documents_above_of_seeds_are_over_pairs(seeds: list[AnalysedRun], tmp_path: Path) -> None:
    numbers = drawn_of_seeds("rank", seeds, tmp_path)
    right = numbers[numbers["panel"] == "Documents above vanilla"]
    assert {*right["run"]} == {"cog", "diff"}

    def medians(run: Run) -> pd.Series[float]:
        return rows_of(run, "rank").groupby(["layer", *DOCUMENT])["value"].median()

    for model in ("cog", "diff"):
        shares = [
            (medians(run) > medians(base)).groupby(level="layer").mean()
            for base in of_model(seeds, "vanilla")
            for run in of_model(seeds, model)
        ]
        same = right[right["run"] == model].set_index("layer")
        np.testing.assert_allclose(same["value"], pd.concat(shares, axis=1).mean(axis=1))
        np.testing.assert_allclose(same["spread"], pd.concat(shares, axis=1).std(axis=1))


def test_a_mean_over_seeds_is_of_all_of_them(tmp_path: Path) -> None:
    """The second seed has the rank of fewer layers."""
    runs = [made_run(tmp_path, f"models/{name}", ranked=ranked) for name, ranked in (("a", 2), ("b", 1), ("c", 2))]
    members = [AnalysedRun(str(n), run, (), model) for n, (run, model) in enumerate(zip(runs, "xxy", strict=True))]
    numbers = drawn_of_seeds("rank", members, tmp_path)
    layers = numbers[numbers["panel"] == "Effective rank, median over heads"].groupby("run")["layer"].agg(list)
    assert layers.to_dict() == {"x": [2], "y": [1, 2]}


def test_heads_of_seeds_are_not_averaged(seeds: list[AnalysedRun], tmp_path: Path) -> None:
    numbers = drawn_of_seeds("heatmap", seeds, tmp_path)
    assert [*dict.fromkeys(numbers["run"])] == [member.name for member in seeds]
    with pytest.raises(UsageError, match="--band heads"):
        make("entropy", seeds, FigureRequest(band="heads"))


# The drawing


SVG = "{http://www.w3.org/2000/svg}"


def ticks(path: Path, axis: str) -> list[str]:
    """Labels of a figure's ticks on the axis x or y, of all panels."""
    elements = ElementTree.parse(path).iter(f"{SVG}g")
    found = [element for element in elements if re.match(f"{axis}tick_", element.get("id", ""))]
    return [(text.text or "").strip() for element in found for text in element.iter(f"{SVG}text")]


@pytest.mark.slow
def test_every_model_has_its_own_look(tmp_path: Path) -> None:
    runs = [made_run(tmp_path, f"models/m{model}-{seed}", documents=1) for model in range(12) for seed in range(2)]
    members = [AnalysedRun(f"m{n // 2} seed {n % 2}", run, (), f"m{n // 2}") for n, run in enumerate(runs)]
    drawn_of_seeds("entropy", members, tmp_path)
    root = ElementTree.parse(tmp_path / "entropy.svg").getroot()
    [legend] = [element for element in root.iter(f"{SVG}g") if element.get("id") == "legend_1"]
    # Read row by row
    entries = [(float(text.get("y", "")), float(text.get("x", "")), text.text) for text in legend.iter(f"{SVG}text")]
    assert [text for *_, text in sorted(entries)] == [f"m{model} (2 seeds)" for model in range(12)]
    assert 1 < len({y for y, *_ in entries}) < 12
    strokes = [re.findall(r"stroke: (#\w+)", line.get("style", "")) for line in legend.iter(f"{SVG}path")]
    looks = [colour for [colour] in filter(None, strokes)]
    assert len({*looks}) == 12
    # Without their colours the lines differ in dashes or markers
    assert len({(line_look(number)["marker"], str(line_look(number)["linestyle"])) for number in range(36)}) == 36


def texts(path: Path) -> list[str]:
    return [text.text or "" for text in ElementTree.parse(path).iter(f"{SVG}text")]


@pytest.mark.slow
def test_titles_and_axes_are_words(runs: list[Run], tmp_path: Path) -> None:
    for name, paper in [
        *((name, False) for name in KINDS),
        *((name, True) for name, kind in KINDS.items() if kind.paper),
    ]:
        for members in (analysed(runs[:1]), analysed(runs)):
            write(make(name, members, FigureRequest(paper=paper)), members, [tmp_path / f"{name}.svg"])
            printed = texts(tmp_path / f"{name}.svg")
            assert not [text for text in printed if "_" in text or text in ("layer", "head", "position")]
            assert printed.count("Layer") + printed.count("Head") + sum("Position of" in text for text in printed)
    assert "vanilla" not in texts(tmp_path / "rank.svg")  # it has no line: the others are compared with it
    write(make("bos", members, FigureRequest(paper=True)), members, [tmp_path / "bos.svg"])
    assert [text for text in texts(tmp_path / "bos.svg") if not re.match(r"−?[\d.]+$", text)] == [
        "Position of the query", "Weight on BOS", "vanilla", "cog", "diff",
    ]  # fmt: skip
    write(make("bos", members, FigureRequest(measure="bos_abs")), members, [tmp_path / "bos.svg"])
    assert "Share of |weights| on BOS, %" in texts(tmp_path / "bos.svg")


def test_notes_are_in_the_caption_and_on_request_below_the_figure(runs: list[Run], tmp_path: Path) -> None:
    members, path, caption = analysed(runs), tmp_path / "negative.svg", tmp_path / "negative-caption.tex"
    figure = make("negative", members, FigureRequest())
    write(figure, members, [path])
    assert not any("standard deviation" in text for text in texts(path))
    written = caption.read_text(encoding="utf-8").splitlines()
    assert len(written) == 2 and written[1].startswith(
        "\\caption{Share of negative weights on BOS, by layer. Line: mean"
    )
    assert "band: $\\pm$ 1 standard deviation over heads" in written[1] and "50 \\%" in written[1]
    write(make("negative", members, FigureRequest(notes=True)), members, [path])
    assert any("standard deviation over heads" in text for text in texts(path))
    caption.write_text("\\caption{Mine}\n")
    with pytest.raises(UsageError, match="caption"):
        write(figure, members, [path])


@pytest.mark.parametrize(("size", "inches"), [pytest.param("column", 3.3, marks=pytest.mark.slow), ("page", 6.9)])
def test_sizes_of_print(runs: list[Run], tmp_path: Path, size: Size, inches: float) -> None:
    for name in ("bos", "categories", "heatmap"):
        members, paths = analysed(runs), [tmp_path / f"{name}.pdf", tmp_path / f"{name}.svg"]
        write(make(name, members, FigureRequest(size=size)), members, paths)
        [box] = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", paths[0].read_bytes())
        assert float(box) == pytest.approx(72 * inches, abs=0.1)
        sizes = re.findall(r"font-size: ([\d.]+)px", paths[1].read_text(encoding="utf-8"))
        assert {*map(float, sizes)} <= {8.0, 9.0} and sizes


def test_bands_of_shares_end_at_0_and_100(tmp_path: Path) -> None:
    """Of two heads with 0 and 50 % the deviation is 35 points, below 0 of the mean; with 50 and 100 % above 100."""
    shares = {0: np.array([0.0, 0.5]), 1: np.array([0.0, 0.5]), 2: np.array([0.5, 1.0])}
    run = given(tmp_path, "a", {layer: {"bos_negative": heads} for layer, heads in shares.items()})
    path = tmp_path / "negative.svg"
    write(make("negative", [run], FigureRequest()), [run], [path])
    assert "cut off at 0 and 100" in (tmp_path / "negative-caption.tex").read_text(encoding="utf-8")
    root = ElementTree.parse(path).getroot()
    [band] = [group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("FillBetween")]
    [outline], [base] = band.iter(f"{SVG}path"), band.iter(f"{SVG}use")
    points = re.findall(r"[\d.-]+ ([\d.-]+)", outline.get("d", ""))
    heights = [float(y) + float(base.get("y", "")) for y in points]
    marks = {}
    for tick in (group for group in root.iter(f"{SVG}g") if group.get("id", "").startswith("ytick_")):
        [label], [mark] = [text.text for text in tick.iter(f"{SVG}text")], [*tick.iter(f"{SVG}use")]
        marks[label] = float(mark.get("y", ""))
    assert (max(heights), min(heights)) == pytest.approx((marks["0"], marks["100"]), abs=0.01)
    inside = given(tmp_path, "b", {0: {"bos_negative": np.array([0.5, 0.6])}})
    write(make("negative", [inside], FigureRequest()), [inside], [path])
    assert "cut off" not in (tmp_path / "negative-caption.tex").read_text(encoding="utf-8")


def given(root: Path, model: str, by_layer: dict[int, dict[str, Any]]) -> AnalysedRun:
    """The analysis of one document with given measures: layer → measure → [heads]."""
    analysed = [[(sequence("piqa", 0, [1, 2, 3]), by_layer)]]
    run = write_analysis(root, f"models/{model}", {"piqa": ("piqa",)}, {"piqa": analysed}, len(by_layer), {}, sample=1)
    return AnalysedRun(model, run)


def test_the_last_layer_is_labelled(tmp_path: Path) -> None:
    run = given(tmp_path, "deep", {layer: {"bos_negative": np.array([0.25, 0.5])} for layer in range(30)})
    for name, measure, axis in (("negative", None, "x"), ("heatmap", "bos_negative", "y")):
        path = tmp_path / f"{name}.svg"
        write(make(name, [run], FigureRequest(measure=measure)), [run], [path])
        labels = [int(label) for label in ticks(path, axis) if label.isdigit() and (axis == "x" or int(label) < 30)]
        assert {0, 29} <= {*labels} and len(labels) < 30


def cells(path: Path) -> list[np.ndarray[Any, Any]]:
    """Pixels of each image of an SVG figure, [rows, columns, RGBA]; they are stored from below."""
    images = ElementTree.parse(path).iter(f"{SVG}image")
    encoded = (image.get("{http://www.w3.org/1999/xlink}href", "").partition(",")[2] for image in images)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(text))).convert("RGBA")) for text in encoded]


def test_maps_have_no_empty_cells_and_the_scale_of_the_data(tmp_path: Path) -> None:
    """Layer 1 has half the heads; of two runs whose values are between 0.40 and 0.45."""
    first = given(
        tmp_path, "a", {0: {"bos_abs": np.array([0.40, 0.41, 0.42, 0.43])}, 1: {"bos_abs": np.array([0.41, 0.44])}}
    )
    second = given(
        tmp_path, "b", {0: {"bos_abs": np.array([0.45, 0.41, 0.42, 0.43])}, 1: {"bos_abs": np.array([0.41, 0.44])}}
    )
    path = tmp_path / "heatmap.svg"
    write(make("heatmap", [first, second], FigureRequest()), [first, second], [path])
    scale = [float(label) for label in ticks(path, "y") if label not in ("0", "1")]
    assert scale and min(scale) >= 40 and max(scale) <= 45
    maps = [image for image in cells(path) if len({*map(tuple, image.reshape(-1, 4).tolist())}) < 10]
    assert len(maps) == 2
    for image in maps:
        bottom, top = image[len(image) // 4], image[3 * len(image) // 4]
        assert (image[..., 3] == 255).all()  # a cell without a value would be transparent
        assert (len(np.unique(top, axis=0)), len(np.unique(bottom, axis=0))) == (2, 4)
        half = len(top) // 2
        assert (top[0] == top[half - 2]).all() and (top[half + 2] == top[-1]).all()
    # The smallest value has the first colour of viridis, the largest the last; an equal one the same in both
    ends = [maps[0][len(maps[0]) // 4][0], maps[1][len(maps[1]) // 4][0]]
    np.testing.assert_allclose(ends, [(68, 1, 84, 255), (253, 231, 37, 255)], atol=2)
    assert (maps[0][-1] == maps[1][-1]).all() and (maps[0][0] != maps[1][0]).any()


def test_a_figure_of_zeros_is_not_drawn(tmp_path: Path) -> None:
    zeros = given(tmp_path, "softmax", {0: {"bos_negative": np.zeros(2)}, 1: {"bos_negative": np.zeros(2)}})
    signed = given(tmp_path, "cog", {0: {"bos_negative": np.zeros(2)}, 1: {"bos_negative": np.array([0.0, 0.5])}})
    for name, measure in (("negative", None), ("heatmap", "bos_negative")):
        request, path = FigureRequest(measure=measure), tmp_path / f"{name}.svg"
        with pytest.raises(UsageError, match="no run has negative weights"):
            write(make(name, [zeros], request), [zeros], [path])
        assert not path.exists()
        write(make(name, [zeros, signed], request), [zeros, signed], [path])
        assert path.exists()


def test_options_that_cannot_be_used(runs: list[Run]) -> None:
    for request, name, noun in (
        (FigureRequest(measure="distance"), "bos", "'distance'"),
        (FigureRequest(band="heads"), "heatmap", "--band"),
        (FigureRequest(paper=True), "summary", "--paper"),
        (FigureRequest(layers=(-4,)), "bos", "--layers -4"),
    ):
        with pytest.raises(UsageError, match=noun):
            make(name, analysed(runs), request)


def test_files_that_cannot_be_written(runs: list[Run], tmp_path: Path) -> None:
    members = analysed(runs)
    figure = make("negative", members, FigureRequest())
    (tmp_path / "b.csv").mkdir()
    (tmp_path / "c.csv").write_text("mine\n")
    for name, error, noun in (("a.gif", UsageError, r"\.svg"), ("b.png", RunError, r"b\.csv"),
                              ("c.png", UsageError, r"c\.csv")):  # fmt: skip
        with pytest.raises(error, match=noun):
            write(figure, members, [tmp_path / name])
    assert (tmp_path / "c.csv").read_text() == "mine\n"
