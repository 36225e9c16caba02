"""Forest plots and curves as SVG: signs, limits and ticks, read back from the drawing."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evalkit.comparison.curves import Curve, curve
from evalkit.comparison.plots import curves, forest
from evalkit.comparison.sides import Side
from evalkit.runs.folder import load_run
from tests.comparison.made import compared, three_tasks

SVG = "{http://www.w3.org/2000/svg}"


def texts(element: ElementTree.Element) -> list[str]:
    return [(text.text or "").strip() for text in element.iter(f"{SVG}text")]


def ticks(path: Path) -> list[str]:
    """Labels of the horizontal axes, of all panels."""
    groups = [group for group in ElementTree.parse(path).iter(f"{SVG}g") if group.get("id", "").startswith("xtick_")]
    return [text for group in groups for text in texts(group)]


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def test_a_forest_has_minus_signs_and_the_scale_of_its_intervals(tmp_path: Path) -> None:
    worse = compared(three_tasks(tmp_path, "org/good-1", 0.95), three_tasks(tmp_path, "org/bad-2", 0.45, 3))
    forest([worse], tmp_path / "forest.svg")
    shown = texts(ElementTree.parse(tmp_path / "forest.svg").getroot())
    differences = [text for text in shown if re.fullmatch(r"[−+-]\d+\.\d", text)]
    assert [number(text) for text in differences] == [
        pytest.approx(100 * row.difference, abs=0.051) for row in (*worse.tasks, *worse.averages)
    ]
    assert any(text.startswith("−") for text in differences)
    assert not any(re.search(r"(?<!\w)-\d", text) for text in shown)
    lows, highs = zip(*((100 * row.low, 100 * row.high) for row in (*worse.tasks, *worse.averages)), strict=True)
    labelled = [number(text) for text in ticks(tmp_path / "forest.svg")]
    assert 0 in labelled and min(lows) < -50
    # Nothing is drawn at the right of zero but what the documents cannot show
    least = max(max(highs), max(100 * (task.detectable or 0) for task in worse.tasks), -min(lows) / 4)
    assert 1.1 * min(lows) <= min(labelled) < 0 < max(labelled) <= 1.1 * least < -min(lows)


def trained(tmp_path: Path, model: str, seed: int, steps: tuple[int, ...]) -> Curve:
    folders = [three_tasks(tmp_path, f"{model}{seed}/step{step}", 0.3 + step / 9000, seed) for step in steps]
    return curve(Side(f"{model} seed {seed}", tuple(map(load_run, folders))), None, None, model)


def test_curves_have_ticks_at_the_measured_steps_and_a_look_for_each_model(tmp_path: Path) -> None:
    steps = (100, 250, 1000, 1750, 3000)
    made = [trained(tmp_path, model, seed, steps) for model in ("vanilla", "cog") for seed in (1, 2)]
    curves(made, tmp_path / "curves.svg")
    assert [*dict.fromkeys(ticks(tmp_path / "curves.svg"))] == ["100", "1k", "1.75k", "3k"]
    root = ElementTree.parse(tmp_path / "curves.svg").getroot()
    [legend] = [group for group in root.iter(f"{SVG}g") if group.get("id") == "legend_1"]
    assert texts(legend) == ["vanilla (2 seeds)", "cog (2 seeds)"]
    lines = [path.get("style", "") for path in root.iter(f"{SVG}path") if "stroke-width: 1.4" in path.get("style", "")]
    coloured = [re.findall(r"stroke: (#\w+)", style)[0] for style in lines]
    # Average and three tasks, two seeds of each model, and the legend
    assert {colour: coloured.count(colour) for colour in coloured} == {"#0072b2": 4 * 2 + 1, "#d55e00": 4 * 2 + 1}
    assert "Agresti and Coull" in " ".join(texts(root))
