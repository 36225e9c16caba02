"""A benchmark as another package would add it: nothing here is known to evalkit but an entry point."""
