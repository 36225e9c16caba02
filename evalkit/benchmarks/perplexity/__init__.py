"""Perplexity of texts: bits per byte by document and by position in the context window."""
