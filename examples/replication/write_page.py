"""Write docs/replication.md and its figures from tables/*.csv (summarise.py). Every number of the page comes from them.

    python examples/replication/write_page.py [--output FOLDER]

The text is in page.md.j2.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from reading import NAMES, SEEDS, SOURCES, Row, chosen, read

from evalkit.paths import replace_file
from evalkit.reporting.decimals import fixed
from evalkit.stats import estimates

HERE = Path(__file__).parent
UNITS = {
    "accuracy": (100, 1, "accuracy, points"),
    "bits_per_byte": (1, 4, "bits per byte"),
    "log_loss": (1, 4, "log loss, nats"),
}
"""Outcome → factor, decimals, words."""
MEASURES = {
    "bos_abs": "Share of absolute weights on BOS, mean over tokens",
    "entropy_shifted": "Entropy of the last token's weights, nats (shifted, as in the paper)",
    "rank": "Effective rank of the map, median over heads",
    "similarity": "Cosine between a head's map and the layer's others",
    "bos_negative": "Share of tokens whose weight on BOS is negative",
}
WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}
LEVEL = 0.05
WIDTH = 132
"""Characters of a line of prose."""
TABLES = ("facts", "training", "outcomes", "differences", "needed", "attention", "needle")
Tables = dict[str, list[Row]]


def main() -> None:
    """Write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "docs", help="folder (default: docs)")
    output = parser.parse_args().output
    tables = {path.stem: read(path) for path in (HERE / "tables").glob("*.csv")}
    if missing := [name for name in TABLES if name not in tables]:
        raise SystemExit(f"write_page.py: {HERE / 'tables'} has no {', '.join(missing)}.csv; run summarise.py first")
    text = page(tables)
    from figures import draw_attention, draw_differences, draw_losses  # imports matplotlib

    images = output / "images"
    images.mkdir(parents=True, exist_ok=True)
    draw_losses(tables["training"], images / "replication_loss.png")
    draw_differences(tables["differences"], images / "replication_differences.png")
    draw_attention(tables["attention"], images / "replication_attention.png")
    replace_file(output / "replication.md", text.encode())


def page(tables: Tables) -> str:
    """Return the whole page."""
    loader = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True)
    text = loader.get_template("page.md.j2").render(
        **facts(tables["facts"]),
        findings=list(findings(tables["differences"])),
        levels=levels(tables["outcomes"]),
        differences=differences(tables["differences"]),
        by_seed=by_seed(tables["outcomes"]),
        zeroshot=(HERE / "tables" / "zeroshot8.md").read_text(encoding="utf-8").strip(),
        averages=averages(tables["differences"]),
        attention=list(attention(tables["attention"])),
        needles=needles(tables["needle"]),
        needed=needed(tables["needed"]),
    )
    return "\n\n".join(map(wrapped, text.rstrip("\n").split("\n\n"))) + "\n"


def wrapped(block: str) -> str:
    """Return a paragraph or list in lines of at most `WIDTH` characters; headings, tables, images and code stay."""
    if block.startswith(("#", "|", "![", "```")):
        return block
    indent = "  " if block.startswith("- ") else ""
    items = re.split(r"\n(?=- )", block) if indent else [block]
    fill = textwrap.TextWrapper(WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False).fill
    return "\n".join(map(fill, items))


def facts(rows: list[Row]) -> dict[str, Any]:
    """Return what was trained, on what, and with which versions."""
    found = {row["name"]: row["value"] for row in rows}
    train = [int(value) for name, value in found.items() if name.startswith("bytes_") and name.endswith(".train")]
    return {
        "tokens": f"{int(found['steps']) * int(found['tokens_per_step']) / 1e6:.2f}",
        "parameters": f"{int(found['parameters_vanilla']) / 1e6:.2f}",
        "embedding": f"{int(found['parameters_embedding']) / 1e6:.2f}",
        "text": f"{sum(train) / 1e6:.1f}",
        "steps": found["steps"],
        "seeds": WORDS.get(int(found["seeds"]), found["seeds"]),
        "documents": f"{int(found['documents_of_a_run_zeroshot8']):,}",
        "versions": ", ".join(f"{name} {found[f'version_{name}']}" for name in ("torch", "transformers", "lm-eval")),
    }


def findings(rows: list[Row]) -> Iterator[str]:
    """Yield the verdict on the primary outcome for each variant."""
    for row in chosen(rows, benchmark="held_out", task="Average"):
        p, name = float(row["p_holm"]), NAMES[row["model"]]
        if p < LEVEL:
            verdict = f"{name} is {'better' if float(row['difference']) < 0 else 'worse'} than Vanilla"
        else:
            verdict = f"no difference between {name} and Vanilla is shown"
        error = f"95 % interval {interval(row, 4)}; p {p_text(p)} after Holm's correction"
        shown = f"With 80 % power it could have shown {number(row['could_show'], 4)}."
        yield f"**{verdict}**: {signed(row['difference'], 4)} bits per byte ({error}). {shown}"


def levels(rows: list[Row]) -> str:
    """Return bits per byte by model and text."""
    tasks = (*SOURCES, "Average")
    of = {
        (model, task): chosen(rows, benchmark="held_out", model=model, task=task) for model in NAMES for task in tasks
    }
    lines = [[name, *(spread(of[model, task], 4) for task in tasks)] for model, name in NAMES.items()]
    return markdown(["", *SOURCES.values(), "Average"], lines)


def differences(rows: list[Row]) -> str:
    """Return the differences of bits per byte by text."""
    lines = [
        [
            NAMES[row["model"]],
            SOURCES.get(row["task"], row["task"]),
            signed(row["difference"], 4),
            interval(row, 4),
            p_text(float(row["p"])),
            f"{float(row['deviation_vanilla']):.4f}, {float(row['deviation']):.4f}",
            f"{float(row['stderr_documents']):.4f}",
        ]
        for row in chosen(rows, benchmark="held_out")
    ]
    heads = ["variant", "text", "difference", "95 % interval", "p"]
    return markdown([*heads, "SD between seeds: Vanilla, variant", "SE over documents"], lines)


def by_seed(rows: list[Row]) -> str:
    """Return the differences of the average bits per byte within each seed, and their mean with a t interval."""
    of = chosen(rows, benchmark="held_out", task="Average")
    seeds = sorted({row["seed"] for row in of}, key=int)
    values = {(row["model"], row["seed"]): float(row["value"]) for row in of}
    lines = []
    for model in list(NAMES)[1:]:
        found = np.array([values[model, seed] - values["vanilla", seed] for seed in seeds])
        estimate = estimates.mean(found)
        low, high = estimates.interval(estimate)
        ends = f"{signed(low, 4)} to {signed(high, 4)}"
        lines.append([NAMES[model], *(signed(value, 4) for value in found), signed(estimate.value, 4), ends])
    return markdown(["variant", *(f"seed {seed}" for seed in seeds), "mean", "95 % interval"], lines)


def averages(rows: list[Row]) -> str:
    """Return the differences of the averages over the zero-shot tasks."""
    lines = []
    for row in chosen(rows, benchmark="zeroshot8", task="Average"):
        factor, places, unit = UNITS[row["outcome"]]
        lines.append(
            [
                NAMES[row["model"]],
                unit,
                signed(row["difference"], places, factor),
                interval(row, places, factor),
                p_text(float(row["p"])),
                number(row["could_show"], places, factor),
            ]
        )
    return markdown(["variant", "average of", "difference", "95 % interval", "p", "could have shown"], lines)


def attention(rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Yield the title of each measure, and its table by layer."""
    layers = sorted({row["layer"] for row in rows}, key=int)
    for measure, title in MEASURES.items():
        of = chosen(rows, measure=measure)
        lines = [
            [name, *(spread(chosen(of, model=model, layer=layer), 3) for layer in layers)]
            for model, name in NAMES.items()
        ]
        yield title, markdown(["", *(f"layer {layer}" for layer in layers)], lines)


def needles(rows: list[Row]) -> str:
    """Return how many needles were found."""
    lengths = sorted({row["length"] for row in rows}, key=int)
    lines = []
    for model, name in NAMES.items():
        of = [chosen(rows, model=model, length=length) for length in lengths]
        sums = [[sum(int(row[key]) for row in some) for key in ("found", "needles")] for some in of]
        lines.append([name, *(f"{found} of {all_of}" for found, all_of in sums)])
    return markdown(["needles found", *(f"{length} tokens" for length in lengths)], lines)


def needed(rows: list[Row]) -> str:
    """Return what numbers of seeds and documents would show, and the seeds that differences need."""
    lines = []
    for row in rows:
        factor, places, unit = UNITS[row["outcome"]]
        shown = [number(row[f"shown_by_{seeds}"], places, factor) for seeds in SEEDS]
        lines.append(
            [
                NAMES[row["model"]],
                f"{row['benchmark'].replace('_', ' ')}, {unit}",
                f"{float(row['documents']):.3g} ×",
                *shown,
                f"{signed(row['difference'], places, factor)} {'(paper)' if row['kind'] == 'paper' else ''}".strip(),
                row["seeds"] or "> 1,000",
            ]
        )
    shown_by = [f"shown by {SEEDS[0]} seeds", *(f"by {seeds}" for seeds in SEEDS[1:])]
    return markdown(["", "average", "documents", *shown_by, "difference", "seeds that it needs"], lines)


def spread(rows: list[Row], places: int) -> str:
    """Return mean ± standard deviation over seeds."""
    values = [float(row["value"]) for row in rows]
    return f"{mean(values):.{places}f} ± {stdev(values):.{places}f}" if len(values) > 1 else "–"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns after the first are aligned to the right."""
    lines = [heads, ["---", *(["---:"] * (len(heads) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def interval(row: Row, places: int, factor: float = 1) -> str:
    """Return the 95 % interval of a difference."""
    return f"{signed(row['low'], places, factor)} to {signed(row['high'], places, factor)}"


def number(stored: str, places: int, factor: float = 1) -> str:
    """Return a number; a dash if there is none."""
    return fixed(factor * float(stored) if stored else None, places)


def signed(stored: str | float, places: int, factor: float = 1) -> str:
    """Return a number with its sign."""
    return fixed(factor * float(stored), places, signed=True)


def p_text(p: float) -> str:
    """Return a p value."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


if __name__ == "__main__":
    main()
