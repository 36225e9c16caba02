"""Perplexity of texts: bits per byte by document and by position in the context window."""

BITS, BITS_UNIT = "bits_per_byte", "bits per byte"
"""Metric of a text, and its unit."""
