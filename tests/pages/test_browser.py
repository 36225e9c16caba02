"""Pages in Chromium, opened from disk: filters, documents, addresses, copying, widths, dark mode, accessibility.

By default, a sample: the decisions that a page of two runs shows are the rules' own.
"""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from evalkit.models.loading.locate import silent
from evalkit.pages.documents import DocumentData
from evalkit.pages.page import write_page
from evalkit.pages.report import contents_of_runs, write_report
from evalkit.reporting.report import Report, render
from evalkit.runs.accuracies import available_rules
from evalkit.runs.folder import Run, load_run
from evalkit.runs.rules import decide, find_rule
from evalkit.suites.suites import label_of
from tests.pages.made_up import HOSTILE, SEGMENTS, TABLE, Choices, block, documents, page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARC, MMLU = Choices(300, 1, 30, 1), Choices(400, 4, 30, 2)
SUBJECTS = ["anatomy", "law/history", "virology", "economics"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install -e '.[dev]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty tab; an error in a script fails the test. Parameters are the context's settings."""
    context, errors = chromium.new_context(**getattr(request, "param", {})), list[str]()
    context.set_default_timeout(8000)
    context.on("page", lambda page: page.on("pageerror", lambda error: errors.append(str(error))))
    tab = context.new_page()
    tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield tab
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page with documents."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(page(documents([("arc_easy", ARC, ["arc_easy"]), ("mmlu", MMLU, SUBJECTS)])), path)
    return path.as_uri()


@pytest.fixture
def opened(tab: Any, address: str) -> Any:
    """The page, with the documents of its first task in view."""
    tab.goto(address)
    tab.locator("#explorer").scroll_into_view_if_needed()
    shown(tab, 300, 300)
    return tab


def shown(tab: Any, number: int, of: int) -> None:
    """Wait until the count says so."""
    tab.locator(".count", has_text=f"{number:,} of {of:,}").wait_for()


def select(tab: Any, label: str, value: str) -> None:
    tab.get_by_label(label, exact=True).select_option(value)


def column(tab: Any, field: str) -> list[str]:
    cells = tab.locator(f"#documents-table .tabulator-row [tabulator-field='{field}']")
    return [str(text) for text in cells.all_inner_texts()]


def sort(tab: Any, field: str) -> None:
    tab.locator(f"[tabulator-field='{field}'] button.sort").click()


def titled(tab: Any, title: str) -> None:
    """Wait until the open document has this title."""
    tab.locator("#document-title", has_text=re.compile(rf"^{re.escape(title)}$")).wait_for()


def by_margin(name: str, of: Any = slice(None)) -> np.ndarray:
    return np.argsort(ARC.margins[name][of].astype("float32"), kind="stable")


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.browser)])
def test_every_rule_of_a_document(count: int, two_runs: list[Run], tab: Any, tmp_path: Path) -> None:
    """Choice, verdict and tie under every rule and run, of random documents opened by their address."""
    for run in two_runs:  # every fifth document has two choices with equal scores
        scores = run.scores
        first = np.flatnonzero(scores["choice"] == 0)[::5]
        for name in [name for name in scores if str(name).startswith(("ll_", "n_"))] + ["chars", "bytes"]:
            scores.iloc[first + 1, scores.columns.get_loc(name)] = scores[name].to_numpy()[first]
    path = tmp_path / "report.html"
    write_report(contents_of_runs(two_runs), path, silent)
    rules = list(available_rules(two_runs[0].scores))
    decided = [{rule: decide(run.scores, find_rule(rule)) for rule in rules} for run in two_runs]
    chosen = np.random.default_rng(0).permutation(len(decided[0]["ppl"]))[:count]
    assert decided[0]["ppl"]["tie"].to_numpy()[chosen].any()
    tab.goto(path.as_uri())
    for number in chosen:
        document = decided[0]["ppl"].iloc[number]
        task, subtask, of_task = document["task"], document["subtask"], str(document["doc_id"])
        subject = [] if task == subtask else [subtask]
        tab.evaluate("name => { location.hash = name }", "/".join([task, *subject, of_task]))
        titled(tab, " / ".join([label_of(task).full, *subject, of_task]))
        rows = tab.get_by_role("region", name="Choices of each rule").locator("tbody tr").all_inner_texts()
        for rule, row in zip(rules, rows, strict=True):
            label, *cells = row.split("\t")
            assert label.startswith(rule)
            for of_run, cell in zip(decided, cells[::2], strict=True):
                made = of_run[rule].iloc[number]
                verdict = "✓ right" if made["correct"] else "✗ wrong"
                assert cell == f"{made['prediction']} {verdict}" + ", tie" * bool(made["tie"]), (of_task, rule)


@pytest.mark.browser
def test_rules_filters_and_search(opened: Any) -> None:
    right = {(run, rule): ARC.right(run, rule) for run in (0, 1) for rule in ("ppl", "sum")}
    words = [text.split(" · ")[0] for text in column(opened, "verdict-0")]
    assert words == ["✓ right" if correct else "✗ wrong" for correct in right[0, "ppl"][: len(words)]]
    for rule in ("sum", "ppl"):
        select(opened, "Rule", rule)
        for run, letter in enumerate("AB"):
            select(opened, letter, "1")
            shown(opened, int(right[run, rule].sum()), 300)
            select(opened, letter, "")
        opened.get_by_label("Ties").check()
        shown(opened, int((ARC.ties[f"0/{rule}"] | ARC.ties[f"1/{rule}"]).sum()), 300)
        opened.get_by_label("Ties").uncheck()
    lost, won = right[0, "ppl"] & ~right[1, "ppl"], right[1, "ppl"] & ~right[0, "ppl"]
    for name, flags in (("A right, B wrong", lost), ("B right, A wrong", won)):
        opened.get_by_role("button", name=name).click()
        shown(opened, int(flags.sum()), 300)
    opened.get_by_label("Truncated").check()
    truncated = ((ARC.truncated[0] + ARC.truncated[1]).reshape(300, 4) > 0).any(axis=1)
    shown(opened, int((won & truncated).sum()), 300)
    opened.get_by_role("button", name="Clear filters").click()
    shown(opened, 300, 300)
    opened.get_by_label("Margin within ±").fill("0.5")
    margins = np.abs(np.array([ARC.margins["0/ppl"], ARC.margins["1/ppl"]], dtype="float32"))
    shown(opened, int((margins <= 0.5).any(axis=0).sum()), 300)
    opened.get_by_role("button", name="Clear filters").click()
    for query, count in (("ONERROR", 1), ("no such words", 0), ("option  OnError ", 1), ("no such words", 0)):
        opened.get_by_label("Search").fill(query)
        shown(opened, count, 300)
    assert opened.get_by_text("No document matches.").is_visible()
    opened.get_by_role("button", name="Clear filters").click()
    select(opened, "Task", "all")
    shown(opened, 703, 703)
    select(opened, "A", "1")
    shown(opened, int(right[0, "ppl"].sum() + MMLU.right(0, "ppl").sum()) + 1, 703)
    opened.locator(".count", has_text="a sample of 900").wait_for()


@pytest.mark.browser
def test_order_of_documents(opened: Any) -> None:
    """By the margins of the rule; next and previous follow order and filter."""
    sort(opened, "number-0")
    assert column(opened, "document")[:5] == list(map(str, by_margin("0/ppl")[:5]))
    select(opened, "Rule", "sum")
    assert column(opened, "document")[:5] == list(map(str, by_margin("0/sum")[:5]))
    assert column(opened, "number-0")[0] == f"{ARC.margins['0/sum'].min():.3f}".replace("-", "−")
    sort(opened, "number-0")
    assert column(opened, "document")[0] == str(by_margin("0/sum")[-1])
    sort(opened, "number-0")
    select(opened, "Rule", "ppl")
    select(opened, "A", "2")
    wrong = np.flatnonzero(~ARC.right(0, "ppl"))
    shown(opened, len(wrong), 300)
    order = wrong[by_margin("0/ppl", wrong)]
    sort(opened, "number-0")
    if column(opened, "document")[0] != str(order[0]):  # it was sorted from the highest
        sort(opened, "number-0")
    opened.locator(".tabulator-row").first.click()
    titled(opened, f"arc_easy / {order[0]}")
    assert opened.get_by_role("button", name="Previous").is_disabled()
    opened.get_by_role("button", name="Next").click()
    titled(opened, f"arc_easy / {order[1]}")


@pytest.mark.browser
def test_a_document_shows_what_was_scored(opened: Any) -> None:
    opened.locator(".tabulator-row").nth(3).click()
    titled(opened, "arc_easy / 3")
    panel = opened.locator("#document")
    assert panel.locator(".segment-name").all_inner_texts()[:3] == ["special", "instruction", "context"]
    assert panel.locator(".choice.gold .choice-title").inner_text().startswith(f"Choice {ARC.gold[3]} · gold answer")
    ll, n = ARC.ll[1].reshape(300, 4, 5)[3, 2].astype("float32"), ARC.tokens[1].reshape(300, 4, 5)[3, 2]
    rows = panel.get_by_role("region", name="Scores of B (baseline)").locator("tbody tr").all_inner_texts()
    numbers = [[f"{ll[s]:.3f}", f"{n[s]}", f"{np.exp(-float(ll[s]) / n[s]):.2f}"] for s in range(5)]
    total, tokens = ll.astype(float).sum(), n.sum()
    numbers.append([f"{total:.3f}", f"{tokens}", f"{np.exp(-total / tokens):.2f}"])
    cells = [row.replace("−", "-").split("\t") for row in rows[12:18]]  # of choice 2
    assert [row[2:] for row in cells] == numbers
    assert [row[1] for row in cells] == ["special", "instruction", "context", "continuation", "end", "whole"]
    select(opened, "Task", "2")  # answers
    shown(opened, 3, 3)
    assert column(opened, "number-0") == ["0.250", "1.000", "–"]
    opened.get_by_role("button", name="B above A").click()
    shown(opened, 1, 3)
    opened.locator(".tabulator-row").first.click()
    titled(opened, "qasper / q/1")
    assert panel.get_by_text("answer 1 <i>0</i>").is_visible()
    assert panel.locator("dd").all_inner_texts() == ["0.2500", "end token", "812", "0.5000", "end token", "813"]
    assert "#qasper/q%2F1" in opened.url


@pytest.mark.browser
def test_addresses_open_documents_in_tasks_and_subjects(opened: Any, address: str) -> None:
    opened.evaluate("location.hash = '#mmlu/law%2Fhistory/7'")
    titled(opened, "mmlu / law/history / 7")
    assert MMLU.texts[4 * 7 + 1] in opened.locator("#document .prompt").first.inner_text()
    opened.get_by_role("button", name="Next").click()
    titled(opened, "mmlu / virology / 7")
    opened.go_back()
    titled(opened, "mmlu / law/history / 7")
    for target, noun in (("mmlu/nothing/7", "no document"), ("nothing/7", "no task")):
        opened.evaluate(f"location.hash = '#{target}'")
        opened.locator("#announcement", has_text=noun).wait_for()
    titled(opened, "Not found")
    other = opened.context.new_page()
    other.goto(f"{address}#arc_easy/250")
    titled(other, "arc_easy / 250")
    assert ARC.texts[250] in other.locator("#document .prompt").first.inner_text()


@pytest.mark.browser
def test_the_keyboard_alone(opened: Any) -> None:
    keys = opened.keyboard
    opened.get_by_label("Task", exact=True).focus()
    for _ in range(40):
        keys.press("Tab")
        if opened.evaluate("document.activeElement.closest('[tabulator-field=number-1]') !== null"):
            break
    keys.press("Enter")
    opened.locator("[tabulator-field=number-1][aria-sort=ascending]").wait_for()
    order = by_margin("1/ppl")
    keys.press("Tab")
    steps = (("ArrowDown", 0), ("ArrowDown", 1), ("End", -1), ("ArrowUp", -2), ("Home", 0), ("ArrowDown", 1))
    for key, number in steps:
        keys.press(key)
        opened.locator(f"a:focus:text-is('{order[number]}')").wait_for()
    keys.press("Enter")
    opened.locator("#document-title:focus").wait_for()
    titled(opened, f"arc_easy / {order[1]}")
    keys.press("Tab")
    assert "Previous" in opened.evaluate("document.activeElement.textContent")
    keys.press("Tab")
    keys.press("Enter")
    titled(opened, f"arc_easy / {order[2]}")
    keys.press("Escape")
    opened.locator(f"a:focus:text-is('{order[2]}')").wait_for()
    assert opened.locator("#document").is_hidden()


@pytest.mark.browser
@pytest.mark.parametrize("clipboard", [True, False])
def test_copying(opened: Any, clipboard: bool) -> None:
    """The clipboard's interface, and the fallback where it is missing."""
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not clipboard:
        opened.evaluate("navigator.clipboard.writeText = undefined")
    for form in ("latex", "markdown", "csv"):
        opened.locator(f"button[data-form={form}]").first.press("Enter")
        opened.locator("#announcement", has_text="copied").wait_for()
        expected = render(Report(tables=(TABLE,)), form)  # type: ignore[arg-type]
        opened.wait_for_function("async expected => await navigator.clipboard.readText() === expected", arg=expected)


@pytest.mark.browser
def test_no_script_of_the_data_no_request_and_printing(tab: Any, address: str) -> None:
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(f"{address}#arc_easy/0")
    titled(tab, "arc_easy / 0")
    assert tab.locator("#document .choice .option").nth(1).inner_text() == HOSTILE
    assert tab.locator("#document img, .tabulator img, #document b b").count() == 0
    assert tab.title() == f"Results of {HOSTILE}"
    assert [url.partition("#")[0] for url in requests if not url.startswith("data:")] == [address]
    # Printed are closed parts, and the open document only
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("#how-a table").is_visible() and tab.locator("#document").is_visible()
    for hidden in ("nav", ".controls", "#documents-table", ".copy >> nth=0", "#document .buttons"):
        assert tab.locator(hidden).is_hidden()
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not tab.locator("#how-a").get_attribute("open")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", tab.pdf())) <= 8


@pytest.mark.browser
@pytest.mark.parametrize("tab", [{"color_scheme": scheme} for scheme in ("light", "dark")], indirect=True)
def test_accessibility(opened: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    opened.locator("#making summary").click()
    opened.locator(".tabulator-row").nth(1).click()
    assert [violation["id"] for violation in axe.run(opened).response["violations"]] == []


@pytest.mark.browser
@pytest.mark.parametrize("tab", [{"viewport": {"width": 400, "height": 800}}], indirect=True)
def test_a_narrow_screen_is_not_scrolled_sideways(opened: Any) -> None:
    opened.locator(".tabulator-row").first.click()
    titled(opened, "arc_easy / 0")
    assert opened.evaluate("document.documentElement.scrollWidth") == 400


def pixels(part: Any) -> np.ndarray:
    """[height, width, 3] colours of a part of the page, from 0 to 255."""
    drawn = imread(io.BytesIO(part.screenshot()))[:, :, :3]
    return np.asarray(np.round(255 * drawn), dtype=int)


@pytest.fixture(scope="module")
def compared(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a page of two runs, one of which has a long name."""
    path = tmp_path_factory.mktemp("compared") / "report.html"
    contents = contents_of_runs(list(map(load_run, folders)), given_names=("first", "step1000-" * 9))
    write_report(contents, path, silent, with_documents=False)
    return path.as_uri()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "lines"), [(800, 1), (400, 3)])
def test_wide_tables_scroll_visibly_and_alone(tab: Any, compared: str, width: int, lines: int, scheme: str) -> None:
    """A shadow is where the table goes on; the page is not scrolled sideways, and its navigation is short."""
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 800})
    tab.goto(compared)
    line = tab.evaluate("document.querySelector('nav a').getBoundingClientRect().height")
    assert tab.locator("nav").bounding_box()["height"] <= 1.7 * lines * line
    assert tab.evaluate("[scrollTo(99, 0), document.documentElement.scrollWidth, scrollX].slice(1)") == [width, 0]
    table = tab.locator("#chapter-results .wide").first
    for scrolled, shaded, plain in ((0, -1, 0), (10_000, 0, -1)):
        table.evaluate("(element, left) => { element.scrollLeft = left }", scrolled)
        shown = np.median(pixels(table), axis=0)
        paper = np.median(pixels(tab.locator("h1")), axis=(0, 1))
        assert np.abs(shown[shaded] - paper).max() > 25 and np.abs(shown[plain] - paper).max() <= 2


@pytest.mark.browser
def test_figures_follow_the_setting_and_are_saved_without_it(tab: Any, compared: str) -> None:
    tab.goto(compared)
    backgrounds, inks = [], []
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        shown = pixels(tab.locator("#comparison-1-1 img")).reshape(-1, 3)
        backgrounds.append(np.median(shown, axis=0).tolist())
        inks.append((shown.max(axis=0) if scheme == "dark" else shown.min(axis=0)).mean())
    assert backgrounds == [[255, 255, 255], [0x16, 0x18, 0x1B]]
    assert inks[0] < 0x40 and inks[1] > 0xD0
    saved = base64.b64decode(tab.locator("#comparison-1-1 a.save").get_attribute("href").partition(",")[2]).decode()
    assert saved.startswith("<?xml") and "ARC-Easy" in saved and "prefers-color-scheme" not in saved


@pytest.mark.browser
def test_verdicts_lead_to_comparisons_and_addresses_out_of_the_page(tab: Any, compared: str) -> None:
    tab.goto(compared)
    tab.locator(".verdicts a").click()
    assert tab.evaluate("location.hash") == "#comparison-1-1"
    assert abs(tab.locator("#comparison-1-1").bounding_box()["y"]) < 100
    addresses = tab.locator("#sources a[href^='https://']")
    assert addresses.count() >= 2
    assert all(link.get_attribute("href") == link.inner_text() for link in addresses.all())
    run = tab.locator("#chapter-runs details").first
    assert not run.locator("table").first.is_visible()
    tab.evaluate("name => { location.hash = name }", run.get_attribute("id"))
    run.locator("table").first.wait_for()


@pytest.mark.browser
@pytest.mark.parametrize("tab", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_the_static_parts_are_readable(tab: Any, address: str) -> None:
    tab.goto(address)
    for static in ("#results-table table", "figure img", "noscript p"):
        assert tab.locator(static).is_visible()
    assert tab.locator("button:visible").count() == 0


def open_task(tab: Any, folder: Path, kind: str, data: str, subtasks: list[str]) -> None:
    """Open the documents of a page of one run and one task."""
    task = {"task": "made", "label": "made", "kind": kind, "block": 0, "documents": 1, "of": 1, "runs": [0],
            "rules": [], "subtasks": subtasks, "official": None, "metric": "perplexity"}  # fmt: skip
    runs = [{"name": "run", "id": "a1", "rule": None}]
    path = folder / "report.html"
    write_page(page(DocumentData({"runs": runs, "segments": SEGMENTS, "tasks": [task]}, [data])), path)
    tab.goto(path.as_uri())
    tab.locator("#explorer").scroll_into_view_if_needed()


@pytest.mark.browser
def test_texts_begin_after_what_the_contexts_of_a_subject_share(tab: Any, tmp_path: Path) -> None:
    """Also where the choices have the contexts, as in WinoGrande."""
    contexts = ["About law.\n\nFirst?", "About law.\n\nSecond?", "About cells.\n\nOnly?"]
    prompt = {"runs": [0], "common": [[[0, "[BOS]"]]] * 3,
              "choices": [[[[2, text], [3, f" {n}"]] for n in (0, 1)] for text in contexts]}  # fmt: skip
    header = {"ids": [0, 1, 0], "options": [[]] * 3, "prompts": [prompt], "problem": ""}
    arrays = {"subtask": ("u2", np.array([0, 0, 1])), "gold": ("u1", np.zeros(3)), "choices": ("u1", np.full(3, 2))}
    open_task(tab, tmp_path, "choices", block(header, arrays), ["law", "cells"])
    shown(tab, 3, 3)
    assert column(tab, "text") == ["First?", "Second?", "About cells. Only?"]


@pytest.mark.browser
def test_scores_with_other_bounds_are_neither_right_nor_wrong(tab: Any, tmp_path: Path) -> None:
    header = {"ids": ["0"], "references": [[]], "prompts": [], "problem": "",
              "runs": {"0": {"answers": ["x"], "facts": [{}]}}}  # fmt: skip
    arrays = {"subtask": ("u2", np.zeros(1)), "0/score": ("f8", np.array([12.5]))}
    open_task(tab, tmp_path, "answers", block(header, arrays), ["made"])
    shown(tab, 1, 1)
    assert tab.get_by_label("A", exact=True).count() == 0
