"""Perplexity of texts: bits per byte by document and by position in the context window."""

from evalkit.runs.scales import Scale

SCALE = Scale("bits_per_byte", "bits per byte", higher_is_better=False)
"""Metric of a text, and its unit."""
