"""Suites under several prompts: how much accuracies depend on template, system prompt and order of the options."""

PROMPT_VARIANTS = "prompt_variants"
"""Name of the benchmark."""

PROMPTS = "prompts.parquet"
"""The score table of every prompt."""

PROMPT = "prompt"
"""Column with the prompt's name."""
