"""Figures as SVG documents of a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from evalkit.pages.page import svg_of
from evalkit.reporting.figures import new_figure, save_figure

HOSTILE = "</script><img src=x onerror=alert(1)> & \"id='a'\" 模型 $x"


def plot(title: str, path: Path) -> None:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.plot([1, 2, 3], [3, 4, 2], marker="o")
    axes.set_title(title, parse_math=False)
    save_figure(figure, path)


def ids(svg: str) -> list[str]:
    return [element.attrib["id"] for element in ElementTree.fromstring(svg).iter() if "id" in element.attrib]


def test_a_figure_is_the_same_text_each_time_and_its_text_is_text() -> None:
    svg = svg_of(partial(plot, HOSTILE))
    assert svg == svg_of(partial(plot, HOSTILE))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert HOSTILE in list(root.itertext())
    assert "<img" not in svg
    assert "<script" not in svg
