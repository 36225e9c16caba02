"""The paper's argument for logits as signals (section 3.3): E[softmax(z)] ≈ softmax(E[z] / √(1 + σ²)).

    python benchmarks/mean_of_softmax.py [--output docs/images/mean_of_softmax.png]

z has N independent Gaussian components of means μ and standard deviation s. With softmax as the distribution of the
largest of z + Gumbel noise, whose variance is π²/6, σ² = 6 s² / π² (Shekhovtsov and Flach, 2018). Compared are the mean
of the softmax over many draws, this approximation, and the softmax of the mean, which logits as signals converge to.
Printed are entropies, in nats, and total variation distances to the mean of the softmax.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import softmax
from tabulate import tabulate

N, SPREAD, DRAWS = 64, 2.0, 200_000


def entropy(shares: np.ndarray) -> float:
    return float(-(shares * np.log(shares)).sum())


def temperature_of(means: np.ndarray, target: float) -> float:
    """Return the temperature at which the softmax of the means has an entropy."""
    return float(brentq(lambda temperature: entropy(softmax(means / temperature)) - target, 1, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    means = np.sort(random.normal(0, SPREAD, N))[::-1]
    rows, curves = [], {"softmax(E[z])": softmax(means)}
    for deviation in (0.5, 1.0, 2.0, 3.0):
        total, two = np.zeros(N), np.zeros(N)
        for _ in range(DRAWS // 2000):
            draws = random.normal(means, deviation, (2, 2000, N))
            total += softmax(draws, axis=-1).sum((0, 1))
            two += softmax(draws.mean(0), axis=-1).sum(0)
        mean, logits = total / (2 * DRAWS), two / DRAWS
        near = softmax(means / math.sqrt(1 + 6 * deviation**2 / math.pi**2))
        fitted = temperature_of(means, entropy(mean))
        shown = (near, softmax(means), softmax(means / fitted))
        distance = [float(np.abs(shares - mean).sum() / 2) for shares in shown]
        entropies = map(entropy, (softmax(means), logits, mean, near))
        rows.append([deviation, *entropies, math.sqrt(1 + 6 * deviation**2 / math.pi**2), fitted, *distance])
        if deviation in (1.0, 3.0):
            curves |= {f"E[softmax(z)], s = {deviation:g}": mean, f"best temperature, s = {deviation:g}": shown[2]}
    headers = ["s", "H: softmax(E[z])", "softmax of mean of 2", "E[softmax(z)]", "approximation", "√(1 + σ²)",
               "best temperature", "distance: approximation", "softmax(E[z])", "best temperature"]  # fmt: skip
    print(tabulate(rows, headers, floatfmt=".3f"))
    if options.output:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.2), layout="constrained")
        axes = figure.subplots()
        styles = ("k-", "C0-", "C0--", "C1-", "C1--")
        for (label, shares), style in zip(curves.items(), styles, strict=True):
            axes.semilogy(np.arange(1, N + 1), shares, style, label=label)
        axes.set(xlabel="component, by its mean", ylabel="probability")
        axes.legend(fontsize=8)
        figure.savefig(options.output, dpi=150)


if __name__ == "__main__":
    main()
