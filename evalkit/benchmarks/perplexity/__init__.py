"""Perplexity of texts: bits per byte by document and by position in the context window."""

PERPLEXITY = "perplexity"
"""Name of the benchmark and of its suite."""
