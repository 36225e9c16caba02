"""Log-probabilities of sequences that share prefixes: token trees, packing, attention in trees, the engine.

Each distinct prefix is computed once. A model is compared with its own forward pass before anything is scored.
"""
