"""Write the small tables from which the replication's page is made: from trainings and finished runs.

    python examples/replication/summarise.py

Reads `trained` and `runs` beside this file (study.yaml), writes `tables/*.csv`, of which write_page.py makes
docs/replication.md.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from reading import NAMES, SEEDS

import evalkit
from evalkit.errors import EvalkitError, UsageError
from evalkit.models.zoo.named import read_models
from evalkit.models.zoo.shapes import parameters
from evalkit.paths import replace_file, resource
from evalkit.stats.power import ALPHA, seeds_detectable, seeds_needed
from evalkit.stats.significance import holm

HERE = Path(__file__).parent
TABLES = HERE / "tables"
MODELS = tuple(NAMES)
SUITES = {"perplexity": "held_out"}
"""Benchmarks of the study that are named otherwise than their suite."""
PRIMARY = ("held_out", "bits_per_byte")
LEVELS = {PRIMARY: ALPHA / (len(MODELS) - 1)}
"""Of the tests: Holm's first step for the primary outcome; 5 % for others, which are not corrected."""
OUTCOMES = {"held_out": ("bits_per_byte",), "zeroshot8": ("accuracy", "bits_per_byte", "log_loss")}
"""The continuous outcomes of each benchmark, the primary one first."""
MEASURES = ("bos_abs", "entropy_shifted", "rank", "similarity", "bos_negative")
"""Of the attention, by layer."""
FIGURES = ("entropy", "rank")
"""Of `evalkit figure`."""
Row = dict[str, Any]
Runs = dict[str, dict[str, list[evalkit.Run]]]
"""Benchmark → model → runs, by seed."""


def main() -> None:
    """Read everything and write the tables."""
    runs = runs_by_model(HERE / "runs")
    TABLES.mkdir(exist_ok=True)
    compared = {
        (name, outcome): comparisons(runs[name], outcome) for name, outcomes in OUTCOMES.items() for outcome in outcomes
    }
    write("facts", list(facts(runs)))
    write("training", list(training()))
    write("outcomes", [row for name, outcome in compared for row in outcomes(runs[name], name, outcome)])
    write(
        "differences", [row for (name, outcome), found in compared.items() for row in differences(found, name, outcome)]
    )
    # More text can be found for the first; the second has a fixed number of documents
    plans = {PRIMARY: 10.0, ("zeroshot8", "accuracy"): all_documents(runs["zeroshot8"][MODELS[0]][0])}
    write("needed", [row for of, most in plans.items() for row in needed(compared[of], *of, (1.0, most))])
    write("attention", [row for measure in MEASURES for row in attention(runs["attention"], measure)])
    write("needle", list(needles(runs["needle"])))
    print_zeroshot(runs["zeroshot8"])
    draw_figures(runs["attention"])


def runs_by_model(root: Path) -> Runs:
    """Return the finished run of each benchmark, model and seed, by seed.

    Raises:
        UsageError: one is missing, or there are two.
    """
    study = yaml.safe_load((HERE / "study.yaml").read_text(encoding="utf-8"))
    seeds = yaml.safe_load((HERE / "training.yaml").read_text(encoding="utf-8"))["seeds"]
    by_place: dict[tuple[str, str, int], list[evalkit.Run]] = defaultdict(list)
    for run in evalkit.list_runs(root):
        place = re.search(r"(?:^|/)trained/(\w+)-seed(\d+)/model$", run.manifest["model"])
        if run.complete and place:
            by_place[SUITES.get(run.suite, run.suite), place[1], int(place[2])].append(run)
    found: Runs = {name: {model: [] for model in MODELS} for name in study["benchmarks"]}
    for name, by_model in found.items():
        for model, members in by_model.items():
            for seed in seeds:
                runs = by_place[name, model, seed]
                if len(runs) != 1:
                    raise UsageError(f"{root}: {len(runs)} finished runs of {model} seed {seed} on {name}; 1 is needed")
                members.extend(runs)
    return found


def seed_of(run: evalkit.Run) -> int:
    """Return a run's seed, from its checkpoint's name."""
    return int(run.manifest["model"].rpartition("-seed")[2].partition("/")[0])


def rule_of(runs: dict[str, list[evalkit.Run]], outcome: str) -> str | None:
    """Return the outcome as `evalkit.compare` takes it; None: the runs' own."""
    return None if outcome == "accuracy" or runs[MODELS[0]][0].suite == "perplexity" else outcome


def comparisons(runs: dict[str, list[evalkit.Run]], outcome: str) -> list[evalkit.Comparison]:
    """Compare each variant with vanilla, seeds and documents crossed."""
    return evalkit.compare(groups={name: runs[name] for name in MODELS}, outcome=rule_of(runs, outcome))


def facts(runs: Runs) -> Iterator[Row]:
    """Yield what was trained, on what, and with which versions."""
    recipe = yaml.safe_load((HERE / "recipe.yaml").read_text(encoding="utf-8"))
    yield {"name": "steps", "value": recipe["steps"]}
    yield {"name": "seeds", "value": len(runs["held_out"][MODELS[0]])}
    yield {"name": "tokens_per_step", "value": recipe["batch"] * recipe["length"]}
    for model in read_models(HERE / "models.yaml"):
        yield {"name": f"parameters_{model.name}", "value": parameters(model.shape).rest}
    yield {"name": "parameters_embedding", "value": parameters(model.shape).embedding}
    for path in sorted((HERE / "text").glob("*.jsonl")):
        texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        yield {"name": f"documents_{path.stem}", "value": len(texts)}
        yield {"name": f"bytes_{path.stem}", "value": sum(len(text.encode()) for text in texts)}
    for name, by_model in runs.items():
        yield {
            "name": f"documents_of_a_run_{name}",
            "value": sum(task["n"] for task in by_model[MODELS[0]][0].stored["tasks"]),
        }
    for name in ("torch", "transformers", "lm-eval"):
        yield {"name": f"version_{name}", "value": importlib.metadata.version(name)}


def training() -> Iterator[Row]:
    """Yield the logged losses, in nats per token."""
    for name in MODELS:
        for folder in sorted((HERE / "trained").glob(f"{name}-seed*")):
            with (folder / "training.csv").open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    losses = {key: short(float(row[key])) if row[key] else "" for key in ("loss", "held_out_loss")}
                    yield {"model": name, "seed": folder.name.partition("-seed")[2], "step": row["step"], **losses}


def outcomes(runs: dict[str, list[evalkit.Run]], benchmark: str, outcome: str) -> Iterator[Row]:
    """Yield the outcome of each task for each seed, and their average."""
    every = [(name, run) for name in MODELS for run in runs[name]]
    found = evalkit.compare(*(run for _, run in every), outcome=rule_of(runs, outcome))
    for place, (name, run) in enumerate(every):
        comparison = found[max(place - 1, 0)]  # the first run is side A of each
        for line in (*comparison.tasks, comparison.average):
            value = line.score_b if place else line.score_a
            of = {"benchmark": benchmark, "outcome": outcome, "model": name, "seed": seed_of(run)}
            yield {**of, "task": line.name, "value": short(value)}


def differences(found: list[evalkit.Comparison], benchmark: str, outcome: str) -> Iterator[Row]:
    """Yield each variant's difference from vanilla; p values of averages are corrected over the variants."""
    level = LEVELS.get((benchmark, outcome), ALPHA)
    corrected = holm([comparison.average.p if comparison.average.p is not None else 1.0 for comparison in found])
    for comparison, p_variants in zip(found, corrected, strict=True):
        for line in (*comparison.tasks, comparison.average):
            assert line.spread is not None  # both sides have several seeds
            a, b = line.spread.deviations
            of = {"benchmark": benchmark, "outcome": outcome, "model": comparison.b, "task": line.name}
            numbers = {
                "difference": line.difference, "low": line.low, "high": line.high, "stderr": line.stderr,
                "p": line.p, "p_holm": p_variants if line is comparison.average else None,
                "could_show": seeds_detectable(line.spread, line.spread.runs_b, level=level),
                "deviation_vanilla": a, "deviation": b,
                "stderr_documents": math.sqrt(line.spread.documents),
            }  # fmt: skip
            yield {**of, **{key: "" if number is None else short(number) for key, number in numbers.items()}}


def needed(found: list[evalkit.Comparison], benchmark: str, outcome: str, factors: Sequence[float]) -> Iterator[Row]:
    """Yield the differences that numbers of seeds and documents would show, and the seeds that differences need.

    Args:
        found: the comparisons with vanilla.
        benchmark: of the study.
        outcome: that is compared.
        factors: how many times the documents of the study.
    """
    level = LEVELS.get((benchmark, outcome), ALPHA)
    paper = published() if outcome == "accuracy" else {}
    for comparison in found:
        average = comparison.average
        assert average.spread is not None  # both sides have several seeds
        planned = {"observed": average.difference}
        if comparison.b in paper:
            planned["paper"] = paper[comparison.b]
        for factor in factors:
            shown = {}
            for seeds in SEEDS:
                smallest = seeds_detectable(average.spread, seeds, factor, level)
                shown[f"shown_by_{seeds}"] = "" if smallest is None else short(smallest)
            for kind, difference in planned.items():
                fewest = seeds_needed(average.spread, difference, factor, level)
                of = {"benchmark": benchmark, "outcome": outcome, "model": comparison.b, "documents": short(factor)}
                yield {**of, **shown, "kind": kind, "difference": short(difference), "seeds": fewest or ""}


def all_documents(run: evalkit.Run) -> float:
    """Return how many times smaller the variance of an average over tasks is with all of each task's documents.

    The mean over tasks of the documents' reciprocals counts, as if a document varied as much in each task.
    """
    sources = run.manifest["documents"].values()
    return mean(1 / task["n"] for task in run.stored["tasks"]) / mean(1 / source["total"] for source in sources)


def published() -> dict[str, float]:
    """Return the paper's differences of average accuracy from vanilla at 125 million parameters, as fractions."""
    with resource("results/published/main_res.csv").open(newline="", encoding="utf-8") as file:
        averages = {row.pop("model"): mean(float(value) for value in row.values()) for row in csv.DictReader(file)}
    return {name: (averages[f"{name}_125m"] - averages["vanilla_125m"]) / 100 for name in MODELS[1:]}


def attention(runs: dict[str, list[evalkit.Run]], measure: str) -> Iterator[Row]:
    """Yield a measure of each layer for each seed, means over documents and heads."""
    for name in MODELS:
        for run in runs[name]:
            for layer in run.stored["layers"]:
                if found := layer["measures"].get(measure):
                    of = {"measure": measure, "model": name, "seed": seed_of(run), "layer": layer["layer"]}
                    yield {**of, "value": short(found["value"])}


def needles(runs: dict[str, list[evalkit.Run]]) -> Iterator[Row]:
    """Yield the share of needles found at each length."""
    for name in MODELS:
        for run in runs[name]:
            table = run.table("answers.parquet")
            for length, found in table.groupby("length")["score"]:
                of = {"model": name, "seed": seed_of(run), "length": length}
                yield {**of, "needles": len(found), "found": int(found.sum())}


def print_zeroshot(runs: dict[str, list[evalkit.Run]]) -> None:
    """Write the accuracies in the layout of the paper's main table, for the page and in LaTeX."""
    rows = {name: [str(run.folder.resolve()) for run in runs[name]] for name in MODELS}
    with tempfile.TemporaryDirectory() as folder:
        mapping = Path(folder) / "rows.yaml"
        mapping.write_text(yaml.safe_dump({"rows": rows}), encoding="utf-8")
        for ending, form in (("md", "markdown"), ("tex", "latex")):
            output = TABLES / f"zeroshot8.{ending}"
            given = ["--source", "runs", "--runs", str(mapping), "--stderr", "--format", form, "-o", str(output)]
            call("table", str(HERE / "layout.yaml"), *given)


def draw_figures(runs: dict[str, list[evalkit.Run]]) -> None:
    """Draw evalkit's figures of the attention of the first seeds; their numbers are written to `tables`."""
    images = HERE.parents[1] / "docs" / "images"
    first = [str(runs[name][0].folder) for name in MODELS]
    for name in FIGURES:
        figure = TABLES / f"figure_{name}.png"
        call("figure", name, *first, "--names", ",".join(MODELS), "--notes", "-o", str(figure))
        figure.with_name(f"{figure.stem}-caption.tex").unlink()
        figure.replace(images / f"replication_{name}.png")


def call(*words: str) -> None:
    """Run an evalkit command."""
    subprocess.run([sys.executable, "-m", "evalkit", *words], check=True)


def short(number: float) -> float:
    """Round to six significant digits."""
    return float(f"{number:.6g}")


def write(name: str, rows: list[Row]) -> None:
    """Write a table as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(TABLES / f"{name}.csv", text.getvalue().encode())
    print(f"{TABLES / name}.csv: {len(rows)} rows")


if __name__ == "__main__":
    try:
        main()
    except EvalkitError as error:
        raise SystemExit(f"summarise.py: {error}") from None
