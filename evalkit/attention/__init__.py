"""Analysis of attention as a benchmark: measures of each head on a sample of documents."""

ATTENTION = "attention"
"""Name of the benchmark and of its suite."""
