"""Effect of a context extension on a checkpoint's log-likelihoods, by position.

    python benchmarks/context_extension.py --text FILE [--model demo] --context 16384 [--original 8192] [--tokens 12288]
    python benchmarks/context_extension.py --draw A.json B.json --picture curves.svg

The first `--tokens` tokens of each text run through the model at once (float32 sums), under no extension, linear, ntk
and YaRN; the table and the picture show the mean negative log-likelihood of a token, in nats, by its position. A window
reduced by `--original` shows the cost of the extension and not its benefit: the model was trained on longer texts. The
benefit shows past the window of its training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
from tabulate import tabulate

from evalkit.models.context_settings import context_settings, extension_of
from evalkit.models.load import load
from evalkit.models.locate import locate
from evalkit.scoring.forward import Forward

METHODS = ("none", "linear", "ntk", "yarn")
COLOURS = {"none": "#888888", "linear": "#d58f00", "ntk": "#3b7dd8", "yarn": "#b3261e", "dynamic-yarn": "#2e7d32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="plain text, or JSON lines with a 'text' each")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--original", type=int, help="original window; default: the checkpoint's own")
    parser.add_argument("--tokens", type=int, help="tokens of each text; default: the context")
    parser.add_argument("--texts", type=int, default=1, help="number of consecutive passages of the text")
    parser.add_argument("--bucket", type=int, default=1024, help="number of positions per average")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--results", type=Path, help="JSON file for the figures")
    parser.add_argument("--draw", type=Path, nargs="+", help="draw these results without measuring")
    parser.add_argument("--picture", type=Path, help="PNG, PDF or SVG of the curves")
    options = parser.parse_args()
    if options.draw:
        draw([json.loads(path.read_text(encoding="utf-8")) for path in options.draw], options.picture)
        return
    if options.text is None:
        parser.error("--text is missing: real text of at least as many tokens as the context")
    tokens = options.tokens or options.context
    checkpoint = locate(options.model)
    curves: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    window = 0
    for method in options.methods.split(","):
        settings = context_settings(options.context, method, options.original)
        extension = extension_of(checkpoint, settings, lambda line: print(line, file=sys.stderr))
        if extension is None:
            parser.error(f"--context {options.context} needs no stretching")
        loaded = load(checkpoint, dtype=options.dtype, extension=extension)
        print(extension.describe(), file=sys.stderr)
        window = extension.original
        sequences = token_windows(loaded.tokenizer, options.text, tokens, options.texts)
        forward = Forward(loaded.model)
        began = time.perf_counter()
        scores = [-forward.score_unshared(sequence).logprobs for sequence in sequences]
        seconds[method] = time.perf_counter() - began
        curves[method] = np.mean(scores, axis=0)
    found = {
        "model": options.model,
        "text": options.text.name,
        "tokens": tokens,
        "texts": options.texts,
        "context": options.context,
        "original": window,
        "bucket": options.bucket,
        "seconds": {method: round(spent, 1) for method, spent in seconds.items()},
        "buckets": {method: by_bucket(curve, options.bucket) for method, curve in curves.items()},
    }
    print(table(found))
    if options.results:
        options.results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture:
        draw([found], options.picture)


def token_windows(tokenizer: object, path: Path, tokens: int, count: int) -> list[np.ndarray]:
    """Return the first `count` passages of `tokens` tokens of a file, [tokens] each."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        content = "\n\n".join(json.loads(line)["text"] for line in content.splitlines() if line)
    # No text has more than ten characters per token on average
    ids = tokenizer(content[: 10 * tokens * count], add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    if len(ids) < tokens * count:
        raise SystemExit(f"{path} has {len(ids)} tokens, fewer than {count} × {tokens}")
    return [np.array(ids[i * tokens : (i + 1) * tokens], np.int32) for i in range(count)]


def by_bucket(curve: np.ndarray, bucket: int) -> list[float]:
    """Return the mean of [tokens] by position, without the first token, which is not predicted."""
    return [round(float(np.nanmean(curve[start : start + bucket])), 4) for start in range(0, len(curve), bucket)]


def table(found: dict) -> str:
    methods, bucket = list(found["buckets"]), found["bucket"]
    rows = []
    for number, values in enumerate(zip(*found["buckets"].values(), strict=True)):
        past = " *" if number * bucket >= found["original"] else ""
        stop = min((number + 1) * bucket, found["tokens"])
        rows.append([f"{number * bucket:,}–{stop:,}{past}", *(f"{value:.3f}" for value in values)])
    means = [f"{math.exp(np.mean(found['buckets'][method])):.2f}" for method in methods]
    rows.append(["perplexity of all", *means])
    rows.append(["seconds", *(f"{found['seconds'][method]:.0f}" for method in methods)])
    note = f"* past the {found['original']:,} tokens that are stretched from"
    return tabulate(rows, ["positions", *methods], colalign=["left", *["right"] * len(methods)]) + "\n" + note


def draw(runs: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(runs), figsize=(5.2 * len(runs), 3.6), squeeze=False, layout="constrained")
    for panel, run in zip(panels[0], runs, strict=True):
        for method, values in run["buckets"].items():
            middles = (np.arange(len(values)) + 0.5) * run["bucket"]
            panel.plot(middles, values, marker="o", markersize=3, label=method, color=COLOURS.get(method))
        panel.axvline(run["original"], color="black", linewidth=0.8, linestyle=":")
        panel.set_title(f"stretched from {run['original']:,} to {run['context']:,} tokens", fontsize=10)
        panel.set_xlabel("position (the dotted line: the window stretched from)")
        panel.set_ylabel("nats a token")
        panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
