"""Needle-in-a-haystack test: retrieval of a fact from a long text, by length and depth."""

NEEDLE = "needle"
"""Name of the benchmark and of its one task."""
NEEDLES = "needles.parquet"
"""Table of a run: one row for each length, depth and repeat."""
HEATMAPS = ("heatmap.png", "heatmap.pdf")
