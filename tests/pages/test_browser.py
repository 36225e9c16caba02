"""Pages in Chromium, opened from disk: filters, sorting, documents, addresses, copying, printing, accessibility."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evalkit.pages.documents import DocumentData
from evalkit.pages.page import write_page
from evalkit.reporting.report import Report, render
from tests.pages.made_up import HOSTILE, SEGMENTS, TABLE, Choices, block, documents, page

pytestmark = pytest.mark.browser

ARC, MMLU = Choices(300, 1, 30, 1), Choices(400, 4, 30, 2)
SUBJECTS = ["anatomy", "law/history", "virology", "economics"]


@dataclass
class Opened:
    """A page in the browser."""

    tab: Any
    requests: list[str]

    @property
    def count(self) -> str:
        return str(self.tab.locator(".count").inner_text())

    def documents(self) -> None:
        self.tab.locator("#explorer").scroll_into_view_if_needed()
        self.tab.locator(".count", has_text="300 of 300").wait_for()

    def select(self, label: str, value: str) -> None:
        self.tab.get_by_label(label, exact=True).select_option(value)

    def shown(self, number: int, of: int) -> None:
        """Wait until the count says so."""
        self.tab.locator(".count", has_text=f"{number:,} of {of:,}").wait_for()

    def column(self, field: str) -> list[str]:
        cells = self.tab.locator(f"#documents-table .tabulator-row [tabulator-field='{field}']")
        return [str(text) for text in cells.all_inner_texts()]

    def sort(self, field: str) -> None:
        self.tab.locator(f"[tabulator-field='{field}'] button.sort").click()

    def title(self) -> str:
        return str(self.tab.locator("#document-title").inner_text())


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with documents."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    data = documents([("arc_easy", ARC, ["arc_easy"]), ("mmlu", MMLU, SUBJECTS)])
    write_page(page(data), path)
    return path.as_uri()


@pytest.fixture
def opened(chromium: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The page in a new tab; an error in a script fails the test. Parameters are the context's settings."""
    context = chromium.new_context(**getattr(request, "param", {}))
    context.set_default_timeout(8000)
    tab, requests, errors = context.new_page(), list[str](), list[str]()
    tab.on("request", lambda one: requests.append(one.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    tab.goto(address)
    yield Opened(tab, requests)
    context.close()
    assert errors == []


def test_a_task_is_opened_when_the_reader_comes_near(opened: Opened) -> None:
    opened.documents()
    assert opened.column("document")[:3] == ["0", "1", "2"]
    assert opened.column("text")[0].startswith("Document 0: <b>")
    right = ARC.right(0, "ppl")
    words = [text.split(" · ")[0] for text in opened.column("verdict-0")]
    assert words == ["✓ right" if one else "✗ wrong" for one in right[: len(words)]]


def test_every_verdict_is_pythons(opened: Opened) -> None:
    """For each rule and run the number of right documents, and of ties."""
    opened.documents()
    for rule in ("ppl", "sum"):
        opened.select("Rule", rule)
        for run, letter in enumerate("AB"):
            opened.select(letter, "1")
            opened.shown(int(ARC.right(run, rule).sum()), 300)
            opened.select(letter, "")
        opened.tab.get_by_label("Ties").check()
        opened.shown(int((ARC.ties[f"0/{rule}"] | ARC.ties[f"1/{rule}"]).sum()), 300)
        opened.tab.get_by_label("Ties").uncheck()


def test_filters(opened: Opened) -> None:
    opened.documents()
    right = [ARC.right(run, "ppl") for run in (0, 1)]
    opened.tab.get_by_role("button", name="A right, B wrong").click()
    opened.shown(int((right[0] & ~right[1]).sum()), 300)
    opened.tab.get_by_role("button", name="B right, A wrong").click()
    opened.shown(int((right[1] & ~right[0]).sum()), 300)
    opened.tab.get_by_label("Truncated").check()
    truncated = ((ARC.truncated[0] + ARC.truncated[1]).reshape(300, 4) > 0).any(axis=1)
    opened.shown(int((right[1] & ~right[0] & truncated).sum()), 300)
    opened.tab.get_by_role("button", name="Clear filters").click()
    opened.shown(300, 300)
    opened.tab.get_by_label("Margin within ±").fill("0.5")
    margins = np.abs(np.array([ARC.margins["0/ppl"], ARC.margins["1/ppl"]], dtype="float32"))
    opened.shown(int((margins <= 0.5).any(axis=0).sum()), 300)


def test_search_finds_texts_of_any_case(opened: Opened) -> None:
    opened.documents()
    opened.tab.get_by_label("Search").fill("ONERROR")
    opened.shown(1, 300)
    [document] = opened.column("document")
    for words in ("onerror option", "option  OnError "):  # every word, in any order
        opened.tab.get_by_label("Search").fill("no such words")
        opened.shown(0, 300)
        opened.tab.get_by_label("Search").fill(words)
        opened.shown(1, 300)
        assert opened.column("document") == [document]
    opened.tab.get_by_label("Search").fill("no such words")
    opened.shown(0, 300)
    assert opened.tab.get_by_text("No document matches.").is_visible()


def test_sorting_by_margin_and_again_under_another_rule(opened: Opened) -> None:
    opened.documents()
    opened.sort("number-0")
    by_margin = np.argsort(ARC.margins["0/ppl"].astype("float32"), kind="stable")
    assert opened.column("document")[:5] == [str(place) for place in by_margin[:5]]
    opened.select("Rule", "sum")
    by_margin = np.argsort(ARC.margins["0/sum"].astype("float32"), kind="stable")
    assert opened.column("document")[:5] == [str(place) for place in by_margin[:5]]
    assert opened.column("number-0")[0] == f"{ARC.margins['0/sum'].min():.3f}".replace("-", "−")
    opened.sort("number-0")
    assert opened.column("document")[0] == str(by_margin[-1])


def test_a_document_shows_what_was_scored(opened: Opened) -> None:
    opened.documents()
    opened.tab.locator(".tabulator-row").nth(3).click()
    assert opened.title() == "arc_easy / 3"
    panel = opened.tab.locator("#document")
    assert [str(one) for one in panel.locator(".segment-name").all_inner_texts()[:3]] == SEGMENT_START
    assert panel.locator(".choice.gold .choice-title").inner_text().startswith(f"Choice {ARC.gold[3]} · gold answer")
    decisions = panel.get_by_role("region", name="Choices of each rule").locator("tbody tr")
    for rule, row in zip(("ppl", "sum"), decisions.all_inner_texts(), strict=True):
        expected = ARC.predictions[f"0/{rule}"][3]
        assert row.split("\t")[:2] == [rule, f"{expected} {'✓ right' if ARC.right(0, rule)[3] else '✗ wrong'}"
                                       + (", tie" if ARC.ties[f"0/{rule}"][3] else "")]  # fmt: skip
    ll, n = ARC.ll[1].reshape(300, 4, 5)[3, 2].astype("float32"), ARC.tokens[1].reshape(300, 4, 5)[3, 2]
    rows = panel.get_by_role("region", name="Scores of B (baseline)").locator("tbody tr").all_inner_texts()
    numbers = [[f"{ll[s]:.3f}", f"{n[s]}", f"{np.exp(-float(ll[s]) / n[s]):.2f}"] for s in range(5)]
    total, tokens = ll.astype(float).sum(), n.sum()
    numbers.append([f"{total:.3f}", f"{tokens}", f"{np.exp(-total / tokens):.2f}"])
    shown = [row.replace("−", "-").split("\t") for row in rows[12:18]]  # of choice 2
    assert [row[2:] for row in shown] == numbers
    assert [row[1] for row in shown] == ["special", "instruction", "context", "continuation", "end", "whole"]


SEGMENT_START = ["special", "instruction", "context"]


def test_addresses_open_documents_in_tasks_and_subjects(opened: Opened) -> None:
    place = 4 * 7 + 1
    target = "#mmlu/law%2Fhistory/7"
    opened.tab.evaluate(f"location.hash = '{target}'")
    opened.tab.locator("#document-title", has_text="mmlu / law/history / 7").wait_for()
    assert MMLU.texts[place] in opened.tab.locator("#document .prompt").first.inner_text()
    opened.tab.get_by_role("button", name="Next").click()
    opened.tab.locator("#document-title", has_text="mmlu / virology / 7").wait_for()
    opened.tab.go_back()
    opened.tab.locator("#document-title", has_text="mmlu / law/history / 7").wait_for()
    opened.tab.evaluate("location.hash = '#mmlu/nothing/7'")
    opened.tab.locator("#announcement", has_text="no document").wait_for()
    opened.tab.evaluate("location.hash = '#nothing/7'")
    opened.tab.locator("#announcement", has_text="no task").wait_for()
    assert opened.title() == "Not found"


def test_a_link_from_outside_opens_its_document(opened: Opened, address: str) -> None:
    tab = opened.tab.context.new_page()
    tab.goto(f"{address}#arc_easy/250")
    tab.locator("#document-title", has_text="arc_easy / 250").wait_for()
    assert ARC.texts[250] in tab.locator("#document .prompt").first.inner_text()


def test_next_and_previous_follow_order_and_filter(opened: Opened) -> None:
    opened.documents()
    opened.select("A", "2")
    wrong = np.flatnonzero(~ARC.right(0, "ppl"))
    opened.shown(len(wrong), 300)
    opened.sort("number-0")
    order = wrong[np.argsort(ARC.margins["0/ppl"][wrong].astype("float32"), kind="stable")]
    opened.tab.locator(".tabulator-row").first.click()
    assert opened.title() == f"arc_easy / {order[0]}"
    assert opened.tab.get_by_role("button", name="Previous").is_disabled()
    opened.tab.get_by_role("button", name="Next").click()
    opened.tab.locator("#document-title", has_text=re.compile(rf"/ {order[1]}$")).wait_for()


def test_all_tasks_together(opened: Opened) -> None:
    opened.documents()
    opened.select("Task", "all")
    opened.shown(703, 703)
    opened.select("A", "1")
    opened.shown(int(ARC.right(0, "ppl").sum() + MMLU.right(0, "ppl").sum()) + 1, 703)
    opened.tab.locator(".count", has_text="a sample of 900").wait_for()


def test_answers(opened: Opened) -> None:
    opened.documents()
    opened.select("Task", "2")
    opened.shown(3, 3)
    assert opened.column("number-0") == ["0.250", "1.000", "–"]
    opened.tab.get_by_role("button", name="B above A").click()
    opened.shown(1, 3)
    opened.tab.locator(".tabulator-row").first.click()
    panel = opened.tab.locator("#document")
    assert opened.title() == "qasper / q/1"
    assert panel.get_by_text("answer 1 <i>0</i>").is_visible()
    assert panel.locator("dd").all_inner_texts() == ["0.2500", "end token", "812", "0.5000", "end token", "813"]
    assert "#qasper/q%2F1" in opened.tab.url


def test_the_keyboard_alone(opened: Opened) -> None:
    opened.documents()
    keys = opened.tab.keyboard
    opened.tab.get_by_label("Task", exact=True).focus()
    for _ in range(40):
        keys.press("Tab")
        if opened.tab.evaluate("document.activeElement.closest('[tabulator-field=number-1]') !== null"):
            break
    keys.press("Enter")
    opened.tab.locator("[tabulator-field=number-1][aria-sort=ascending]").wait_for()
    order = np.argsort(ARC.margins["1/ppl"].astype("float32"), kind="stable")
    keys.press("Tab")
    focused = "document.activeElement.textContent"
    for key, place in (("ArrowDown", 0), ("ArrowDown", 1), ("End", -1), ("ArrowUp", -2), ("Home", 0)):
        keys.press(key)
        opened.tab.locator(f"a:focus:text-is('{order[place]}')").wait_for()
    keys.press("ArrowDown")
    opened.tab.locator(f"a:focus:text-is('{order[1]}')").wait_for()
    keys.press("Enter")
    opened.tab.locator("#document-title:focus").wait_for()
    assert opened.title() == f"arc_easy / {order[1]}"
    keys.press("Tab")
    assert "Previous" in opened.tab.evaluate(focused)
    keys.press("Tab")
    keys.press("Enter")
    opened.tab.locator("#document-title", has_text=re.compile(rf"/ {order[2]}$")).wait_for()
    keys.press("Escape")
    opened.tab.locator(f"a:focus:text-is('{order[2]}')").wait_for()
    assert opened.tab.locator("#document").is_hidden()


@pytest.mark.parametrize("form", ["latex", "markdown", "csv"])
@pytest.mark.parametrize("clipboard", [True, False])
def test_copying(opened: Opened, form: Any, clipboard: bool) -> None:
    """The clipboard's interface, and the fallback where it is missing."""
    opened.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not clipboard:
        opened.tab.evaluate("navigator.clipboard.writeText = undefined")
    pressed = opened.tab.locator(f"button[data-form={form}]").first
    pressed.focus()
    opened.tab.keyboard.press("Enter")
    opened.tab.locator("#announcement", has_text="copied").wait_for()
    assert opened.tab.evaluate("navigator.clipboard.readText()") == render(Report(tables=(TABLE,)), form)


def test_printing_shows_closed_parts_and_the_open_document_only(opened: Opened, tmp_path: Path) -> None:
    opened.documents()
    opened.tab.locator(".tabulator-row").first.click()
    opened.tab.emulate_media(media="print")
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.tab.locator("#how-a table").is_visible() and opened.tab.locator("#document").is_visible()
    for hidden in ("nav", ".controls", "#documents-table", ".copy >> nth=0", "#document .buttons"):
        assert opened.tab.locator(hidden).is_hidden()
    opened.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not opened.tab.locator("#how-a").get_attribute("open")
    printed = opened.tab.pdf()
    assert printed.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8


def test_no_request_and_no_script_of_the_data(opened: Opened, address: str) -> None:
    opened.documents()
    opened.tab.locator(".tabulator-row").first.click()
    assert opened.title() == "arc_easy / 0"
    assert opened.tab.locator("#document .choice .option").nth(1).inner_text() == HOSTILE
    assert opened.tab.locator("#document img, .tabulator img, #document b b").count() == 0
    assert opened.tab.title() == f"Results of {HOSTILE}"
    assert [one for one in opened.requests if not one.startswith("data:")] == [address]


@pytest.mark.parametrize("opened", [{"color_scheme": one} for one in ("light", "dark")], indirect=True)
def test_accessibility(opened: Opened) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened.documents()
    opened.tab.locator("#making summary").click()
    opened.tab.locator(".tabulator-row").nth(1).click()
    found = axe.run(opened.tab).response["violations"]
    assert [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found] == []


@pytest.mark.parametrize("opened", [{"viewport": {"width": 400, "height": 800}}], indirect=True)
def test_a_narrow_screen_is_not_scrolled_sideways(opened: Opened) -> None:
    opened.documents()
    opened.tab.locator(".tabulator-row").first.click()
    assert opened.title() == "arc_easy / 0"
    assert opened.tab.evaluate("document.documentElement.scrollWidth") == 400


@pytest.mark.parametrize("opened", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_the_static_parts_are_readable(opened: Opened) -> None:
    assert opened.tab.locator("#results-table table").is_visible() and opened.tab.locator("figure img").is_visible()
    assert opened.tab.locator("noscript p").is_visible()
    assert opened.tab.locator("button:visible").count() == 0


def open_task(chromium: Any, folder: Path, kind: str, data: str, subtasks: list[str]) -> Any:
    """Return a tab with the documents of a page of one run and one task in view."""
    task = {"task": "made", "label": "made", "kind": kind, "block": 0, "documents": 1, "of": 1, "runs": [0],
            "rules": [], "subtasks": subtasks, "official": None, "metric": "perplexity"}  # fmt: skip
    runs = [{"name": "one", "id": "a1", "rule": None}]
    path = folder / "report.html"
    write_page(page(DocumentData({"runs": runs, "segments": SEGMENTS, "tasks": [task]}, [data])), path)
    tab = chromium.new_page()
    tab.goto(path.as_uri())
    tab.locator("#explorer").scroll_into_view_if_needed()
    return tab


def test_texts_begin_after_what_the_contexts_of_a_subject_share(chromium: Any, tmp_path: Path) -> None:
    """Also where the choices have the contexts, as in WinoGrande."""
    contexts = ["About law.\n\nFirst?", "About law.\n\nSecond?", "About cells.\n\nOnly?"]
    prompt = {"runs": [0], "common": [[[0, "[BOS]"]]] * 3,
              "choices": [[[[2, text], [3, f" {n}"]] for n in (0, 1)] for text in contexts]}  # fmt: skip
    header = {"ids": [0, 1, 0], "options": [[]] * 3, "prompts": [prompt], "problem": ""}
    arrays = {"subtask": ("u2", np.array([0, 0, 1])), "gold": ("u1", np.zeros(3)), "choices": ("u1", np.full(3, 2))}
    tab = open_task(chromium, tmp_path, "choices", block(header, arrays), ["law", "cells"])
    tab.locator(".count", has_text="3 of 3").wait_for()
    cells = tab.locator("#documents-table .tabulator-row [tabulator-field='text']")
    assert cells.all_inner_texts() == ["First?", "Second?", "About cells. Only?"]
    tab.close()


def test_scores_with_other_bounds_are_neither_right_nor_wrong(chromium: Any, tmp_path: Path) -> None:
    header = {"ids": ["0"], "references": [[]], "prompts": [], "problem": "",
              "runs": {"0": {"answers": ["x"], "facts": [{}]}}}  # fmt: skip
    arrays = {"subtask": ("u2", np.zeros(1)), "0/score": ("f8", np.array([12.5]))}
    tab = open_task(chromium, tmp_path, "answers", block(header, arrays), ["made"])
    tab.locator(".count", has_text="1 of 1").wait_for()
    assert tab.get_by_label("A", exact=True).count() == 0
    tab.close()
