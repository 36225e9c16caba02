"""Suites: a name → tasks, their documents as questions, and the token sequences of their prompts; lm-eval's tasks."""
