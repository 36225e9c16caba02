"""The LongBench benchmark: generated answers to questions on long documents, scored as in its official code."""

GENERATIONS = "generations.parquet"
"""Table of a run: a row for each (task, document)."""
