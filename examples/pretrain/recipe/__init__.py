"""A training recipe on transformers' Trainer: packed rows in a fixed order, whole checkpoints, exact resumption."""
