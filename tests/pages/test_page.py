"""Pages without a browser: what is in the file, its vendored library, and the texts that buttons copy."""

from __future__ import annotations

import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import evalkit.pages
from evalkit.pages.page import render_page, write_page
from evalkit.reporting.report import Report, render
from tests.pages.made_up import FIGURE, HOSTILE, TABLE, Choices, documents, page

ASSETS = Path(evalkit.pages.__file__).parent / "assets"
_VOID = {"meta", "img", "br", "hr", "input", "link"}


class Elements(HTMLParser):
    """Elements of a page with their attributes and texts; raises if tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in _VOID:
            self._open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.found[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.found[place][2].append(data)

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(texts)) for name, attributes, texts in self.found if name == tag]


@pytest.fixture(scope="module")
def text() -> str:
    return render_page(page(documents([("arc_easy", Choices(20, 1, 5, 0), ["arc_easy"])])))


@pytest.mark.parametrize("name", ["tabulator.min.js", "tabulator.min.css"])
def test_vendored_files_are_those_of_the_readme(name: str) -> None:
    readme = (ASSETS / "vendor" / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((ASSETS / "vendor" / name).read_bytes()).hexdigest()
    assert re.search(rf"`{re.escape(name)}` \|.*`{digest}`", readme)


def test_tags_are_balanced_and_names_are_text(text: str) -> None:
    elements = Elements(text)
    assert [one for _, one in elements.of("h1")] == [f"Results of {HOSTILE}"]
    assert [attributes["alt"] for attributes, _ in elements.of("img")] == [FIGURE.words]
    assert not any(name.startswith("on") for _, attributes, _ in elements.found for name in attributes)


def test_anchors_are_unique_and_links_lead_to_them(text: str) -> None:
    found = Elements(text).found
    anchors = [attributes["id"] for _, attributes, _ in found if "id" in attributes]
    links = {attributes["href"] for tag, attributes, _ in found if tag == "a"} - {"#"}
    assert len(anchors) == len(set(anchors))
    assert links >= {"#main", "#chapter-overview", "#chapter-documents", "#results-table"}
    assert {f"#{name}" for name in anchors} >= links


def test_copied_texts_are_those_of_the_command_line(text: str) -> None:
    [copied] = [one for attributes, one in Elements(text).of("script") if attributes.get("id") == "copied-texts"]
    texts = json.loads(copied)
    # The second table of a name has another label in LaTeX
    for number, own in enumerate((Report((TABLE,)), Report((TABLE._replace(name="results-2"),)))):
        assert texts[number] == {form: render(own, form) for form in ("latex", "markdown", "csv")}
    assert "tab:results-2" in texts[1]["latex"]
    assert "<" not in copied


def test_a_page_without_documents_has_no_table_library() -> None:
    small = render_page(page())
    assert "abulator" not in small and "DecompressionStream" not in small
    assert len(small.encode()) < 50_000


def test_characters_that_cannot_be_encoded_are_written_by_their_code(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(page(title="run \udcff"), path)
    assert "<h1>run \\udcff</h1>" in path.read_text(encoding="utf-8")
