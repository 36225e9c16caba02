"""Needle-in-a-haystack test: retrieval of a fact from a long text, by length and depth."""
