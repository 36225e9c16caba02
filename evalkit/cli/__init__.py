"""Command line; one module for each family of commands."""

from evalkit.cli.root import main

__all__ = ["main"]
