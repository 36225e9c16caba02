"""One HTML page of finished runs, which opens from disk without a network."""
