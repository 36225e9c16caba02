"""Size and speed of `evalkit report`: writing the page of finished runs, and using it in Chromium.

    python benchmarks/report_page.py RUN_A RUN_B

With one run, the second is a copy of it whose log-likelihoods have noise added, named "with noise": its numbers are
made up. Printed: seconds and peak memory of writing, the size of the file, and in Chromium (pip install playwright,
apt-get install chromium) the time of the first paint, of opening tasks, of a filter and a sort, and the heap's size.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evalkit.comparison.naming import find_run
from evalkit.models.loading.locate import silent
from evalkit.pages.report import contents_of_runs, write_report
from evalkit.paths import RUNS
from evalkit.runs.folder import Run

_COUNT = "document.querySelector('.count').innerText"
_ROWS = "document.querySelector('#documents-table .tabulator-table').innerText"
_DRAWN = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--keep", type=Path, help="keep the page under this name")
    arguments = parser.parse_args()
    runs = [find_run(run, RUNS) for run in arguments.runs]
    if len(runs) == 1:
        runs.append(with_noise(runs[0]))
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.keep or Path(folder) / "report.html"
        started = time.perf_counter()
        size = write_report(contents_of_runs(runs), path, silent)
        print("| | measured |\n|---|---|")
        print(f"| written in | {time.perf_counter() - started:.1f} s |")
        print(f"| peak memory of writing | {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB |")
        print(f"| file | {size / 1e6:.1f} MB |")
        in_chromium(path.resolve())


def with_noise(run: Run) -> Run:
    """Return a copy of a run in memory, with other scores."""
    made = Run(run.folder, run.manifest | {"id": "0" * 12, "model": "with noise"})
    scores, random = run.scores.copy(), np.random.default_rng(0)
    for column in [name for name in scores if str(name).startswith("ll_")]:
        scores[column] += random.normal(0, 0.02, len(scores)) * scores[column].abs()
    made.__dict__.update(scores=scores, _results=(run.files, run.stored))
    return made


def in_chromium(path: Path) -> None:
    """Open the page as a reader does."""
    from playwright.sync_api import sync_playwright

    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        requests: list[str] = []
        tab.on("request", lambda one: requests.append(one.url))
        tab.goto(path.as_uri())
        tab.wait_for_timeout(1000)
        paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        print(f"| first paint | {paint:.2f} s |")
        tab.locator("#explorer").scroll_into_view_if_needed()
        tab.locator(".count").wait_for()
        tasks = tab.get_by_label("Task", exact=True)
        selected = tasks.input_value()
        for one in [one for one in tasks.locator("option").all() if one.get_attribute("value") != selected]:
            act = partial(tasks.select_option, value=one.get_attribute("value"))
            print(f"| {one.inner_text().strip()} opened | {timed(tab, act):.2f} s |")
        sort = tab.locator("[tabulator-field='number-0'] button.sort")
        print(f"| sort of what was opened last | {timed(tab, sort.click, _ROWS):.2f} s |")
        filters = tab.get_by_label("A", exact=True)
        print(f"| filter of it | {timed(tab, partial(filters.select_option, '1')):.2f} s |")
        act = partial(tab.get_by_role("searchbox").fill, "water")
        print(f"| search for a word, with 0.15 s of waiting for typing | {timed(tab, act):.2f} s |")
        tab.wait_for_timeout(1000)
        heap = tab.evaluate("performance.memory.usedJSHeapSize") / 1e6
        print(f"| heap with every task opened | {heap:,.0f} MB |\n| requests but the file | {len(requests) - 1} |")
        browser.close()


def timed(tab: Any, act: Callable[[], Any], watched: str = _COUNT) -> float:
    """Return the seconds until what is watched has changed and is drawn."""
    before = tab.evaluate(watched)
    started = time.perf_counter()
    act()
    tab.wait_for_function(f"before => {watched} !== before", arg=before, timeout=20000)
    tab.evaluate(_DRAWN)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
