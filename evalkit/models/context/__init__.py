"""Context extension: a longer window planned from config.json, and applied to a model whose layers are verified."""
