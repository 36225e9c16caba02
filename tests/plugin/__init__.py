"""A benchmark of another package: evalkit knows it by its entry point only."""
