"""A needle in a haystack: is a fact found wherever it lies in a long text?"""

NEEDLE = "needle"
"""The benchmark's name, and its one task's."""
