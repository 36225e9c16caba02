"""Suites of multiple-choice tasks: documents → questions → token sequences → batches → rows of the score table."""
