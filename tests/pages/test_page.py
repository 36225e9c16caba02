"""The file of a page: its elements and addresses, its vendored library, and the texts that buttons copy."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import evalkit.pages
from evalkit.pages.page import write_page
from evalkit.reporting.report import Report, render
from tests.pages.made_up import FIGURE, HOSTILE, TABLE, Choices, documents, page

ASSETS = Path(evalkit.pages.__file__).parent / "assets"
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Elements(HTMLParser):
    """Elements of a page with their attributes and texts; tags must be balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self.open:
            self.elements[number][2].append(data)


def test_elements_addresses_and_copied_texts(tmp_path: Path) -> None:
    write_page(page(documents([("arc_easy", Choices(20, 1, 5, 0), ["arc_easy"])])), tmp_path / "page.html")
    elements = Elements((tmp_path / "page.html").read_text(encoding="utf-8")).elements
    assert ["".join(texts) for tag, _, texts in elements if tag == "h1"] == [f"Results of {HOSTILE}"]
    assert [attributes["alt"] for tag, attributes, _ in elements if tag == "img"] == [FIGURE.words]
    assert not any(name.startswith("on") for _, attributes, _ in elements for name in attributes)
    anchors = [attributes["id"] for _, attributes, _ in elements if "id" in attributes]
    links = {attributes["href"] for tag, attributes, _ in elements if tag == "a"} - {"#"}
    assert len(anchors) == len(set(anchors))
    assert {f"#{name}" for name in anchors} >= links >= {"#main", "#chapter-documents", "#forest-plot"}
    [copied] = ["".join(texts) for _, attributes, texts in elements if attributes.get("id") == "copied-texts"]
    assert "<" not in copied
    # The second table of a name has another label in LaTeX
    reports = (Report((TABLE,)), Report((TABLE._replace(name="results-2"),)))
    expected = [{form: render(report, form) for form in ("latex", "markdown", "csv")} for report in reports]
    assert json.loads(copied)[:2] == expected and "tab:results-2" in expected[1]["latex"]


def test_the_file(tmp_path: Path) -> None:
    """Without documents it has no table library, which is the one of the README."""
    write_page(page(title="run \udcff"), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<h1>run \\udcff</h1>" in text
    assert "abulator" not in text and "DecompressionStream" not in text and len(text) < 50_000
    readme = (ASSETS / "vendor" / "README.md").read_text(encoding="utf-8")
    for name in ("tabulator.min.js", "tabulator.min.css"):
        digest = hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest()
        assert re.search(rf"`{re.escape(name)}` \|.*`{digest}`", readme)


def luminance(colour: str) -> float:
    """Relative luminance of a colour such as #16181b, as WCAG 2 defines it."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_figures_of_dark_pages() -> None:
    """Every grey that is drawn has another there, and texts have a contrast of 4.5 at least."""
    style = (ASSETS / "figure.css").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in ASSETS.parents[1].rglob("*.py"))
    greys = {grey for grey, _ in re.findall(r'"(#([0-9a-f]{2})\2\2)"', sources)}
    assert greys >= {"#222222", "#888888", "#eeeeee"}
    assert [grey for grey in greys if grey not in style] == []
    paper, line = "#16181b", "#373c42"
    texts = set(re.findall(r"\{ fill: (#[0-9a-f]{6})", style)) - {paper, line}
    assert len(texts) == 3
    for text in texts:
        assert (luminance(text) + 0.05) / (luminance(paper) + 0.05) >= 4.5, text
